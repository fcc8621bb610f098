"""Compiled steps, wherever torch is installed."""

import torch
from torch.utils import cpp_extension

from fedagrac.engines.lanes.compiled import compile_step


def test_steps_compile_when_torch_is_in_a_folder_with_spaces(tmp_path, monkeypatch):
    """Inductor splits the linker's options at spaces."""
    folder = tmp_path / "a folder with spaces"
    folder.symlink_to(cpp_extension.TORCH_LIB_PATH)
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(folder))
    x = torch.arange(4.0)

    def step(buffers):
        buffers[0].mul_(2).add_(1)

    compiled = compile_step(step, [x])
    expected = 2 * x + 1
    compiled()
    assert x.tolist() == expected.tolist()
    assert str(folder) == cpp_extension.TORCH_LIB_PATH
