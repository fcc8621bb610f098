"""The kernels of GPUs give the numbers of torch's operations, in Triton's interpreter, which needs no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_every_kernel_gives_the_numbers_of_torch():
    script = Path(__file__).with_name("triton_kernels.py")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", script],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.stdout == "done\n", ran.stderr[-2000:]
