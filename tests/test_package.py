"""The package as a whole: what importing it costs, what it exports, what its docs and examples show."""

import importlib.util
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import fedagrac as fg

ROOT = Path(__file__).parents[1]


def third_party(statement):
    """Return the top-level packages, outside the standard library, that are loaded after the statement."""
    code = f"{statement}\nimport sys, json\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return {name for name in json.loads(out.stdout) if name not in sys.stdlib_module_names and name[0] != "_"}


def test_importing_the_package_imports_torch_and_numpy_only():
    alone = third_party("import torch, numpy")
    ours = third_party("import fedagrac")
    assert ours - alone == {"fedagrac"}


def test_a_simulation_needs_torch_and_numpy_only():
    code = """
import fedagrac as fg, numpy as np
rng = np.random.default_rng(0)
fed = fg.Federation.from_arrays([(rng.normal(size=(9, 3)), rng.integers(0, 2, 9)) for _ in range(3)])
fg.simulate(fg.models.build("logistic", features=3), fed, fg.FedaGrac(lr=.1), rounds=2, steps=fg.Linear(1, 2))
"""
    heavy = {
        "pandas",
        "sklearn",
        "scipy",
        "matplotlib",
        "rich",
        "typer",
        "pydantic",
        "safetensors",
        "plotly",
        "pooch",
    }
    assert not third_party(code) & heavy


def test_every_exported_name_exists_and_is_documented():
    for name in fg.__all__:
        assert getattr(fg, name).__doc__, name
    api = (ROOT / "docs" / "api.md").read_text()
    missing = [n for n in fg.__all__ if n not in ("models", "schedule") and f"fedagrac.{n}" not in api]
    assert not missing


def test_every_algorithm_has_a_page_and_a_row():
    table = (ROOT / "docs" / "algorithms" / "index.md").read_text()
    for name in fg.algorithms.REGISTRY:
        assert f"`{name}`" in table
        assert (ROOT / "docs" / "algorithms" / f"{name.split('-')[0]}.md").exists()


def test_the_package_is_typed():
    assert (Path(fg.__file__).parent / "py.typed").exists()


def test_constraints_pin_every_dependency():
    """Exact versions for all that the package and its extras name."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        named += extra
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    for requirement in named:
        assert re.split(r"[\[<>=!~ ]", requirement)[0].lower() in pinned, requirement


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_run(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    outcome = module.main(rounds=4)
    results = outcome.values() if isinstance(outcome, dict) else [outcome]
    for result in results:
        assert result.status == "finished"
        assert len(result.history) == 4
    assert "accuracy" in capsys.readouterr().out or (tmp_path / "compare_two.png").exists()


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


PAGES = [p for p in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if python_blocks(p)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_snippets_in_the_docs_run(page, tmp_path, monkeypatch):
    """All Python blocks of a page, in order, as one program."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    script = tmp_path / "page.py"
    script.write_text("\n".join(python_blocks(page)))
    names = runpy.run_path(str(script))
    assert any(value is fg for value in names.values())
