"""The package as a whole: what importing it costs, what it exports, what its docs and examples show."""

import ast
import importlib
import importlib.util
import json
import re
import runpy
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import fedagrac as fg
from fedagrac.algorithms import table

ROOT = Path(__file__).parents[1]


def third_party(statement):
    """Return the top-level packages, outside the standard library, that are loaded after the statement."""
    code = f"{statement}\nimport sys, json\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return {name for name in json.loads(out.stdout) if name not in sys.stdlib_module_names and name[0] != "_"}


def test_importing_the_package_imports_torch_and_numpy_only():
    alone = third_party("import torch, numpy.random")
    ours = third_party("import fedagrac\nfedagrac.simulate")
    assert ours - alone == {"fedagrac"}


def test_importing_the_package_alone_imports_nothing_else():
    assert third_party("import fedagrac") == {"fedagrac"}
    assert third_party("from fedagrac import __version__, InputError") == {"fedagrac"}


def test_names_are_imported_when_they_are_first_used():
    assert third_party("import fedagrac\nassert 'simulate' in dir(fedagrac)") == {"fedagrac"}
    names = {}
    exec("from fedagrac import *", names)
    assert set(names) - {"__builtins__"} == set(fg.__all__)
    assert names["simulate"] is fg.simulate is importlib.import_module("fedagrac.rounds.api").simulate
    assert fg.schedule is importlib.import_module("fedagrac.core.schedule")
    with pytest.raises(AttributeError, match="no attribute 'simulated'"):
        fg.simulated  # noqa: B018


def test_type_checkers_see_every_exported_name():
    tree = ast.parse(Path(fg.__file__).read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)]
    seen = [(alias.name, alias.asname) for node in checked.body for alias in node.names]
    assert all(name == exported for name, exported in seen)
    assert sorted(name for name, _ in seen) == fg.__all__


def test_options_of_the_command_line_are_named_by_the_command_line_only():
    """`paper` is left out: it is a program of its own, with options of its own."""
    package = Path(fg.__file__).parent
    rooms = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] not in ("cli", "paper")]
    words = re.compile(r"--(out|resume|set|grid|trust-imports|nodes|host)\b|resume with:|go on with:")
    assert [(str(path), match[0]) for path in rooms for match in words.finditer(path.read_text())] == []


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


@pytest.fixture(scope="module")
def rivals():
    spec = importlib.util.spec_from_file_location("rivals", ROOT / "benchmarks" / "rivals.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["rivals"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_the_comparison_are_those_of_its_records(rivals):
    page = (ROOT / "docs" / "comparison.md").read_text()
    tables = rivals.tables(rivals.read(ROOT / "benchmarks" / "records" / "rivals.jsonl"))
    assert list(tables) == ["a9a", "a9a, paired", "fashion", "fashion, paired", "cifar10"]
    assert all(f"\n{table}\n" in page for table in tables.values())


def test_the_comparison_chooses_settings_that_reach_the_target_and_stay(rivals):
    problem = rivals.PROBLEMS["a9a"]  # test loss 0.327, 80 rounds, chosen on the seeds 100 and 101

    def run(lr, seed, *parts, name="fedavg", status="finished"):
        losses = [loss for loss, rounds in parts for _ in range(rounds)]
        facts = {"problem": "a9a", "name": name, "options": {"lr": lr}, "seed": seed, "status": status}
        return {**facts, "round": list(range(1, 81)), "test_loss": losses}

    touches = run(0.3, 100, (0.4, 9), (0.2, 1), (0.4, 70))
    leaves = run(0.3, 100, (0.4, 20), (0.32, 40), (0.4, 20))
    stays = run(0.1, 100, (0.4, 20), (0.32, 60))  # 4 of 5 rounds: (4 * 0.32 + 0.4) / 5 = 0.336
    assert rivals.reached(touches, problem) is None
    assert rivals.reached(leaves, problem) is None
    assert stays["round"][rivals.reached(stays, problem)] == 25
    fast_once = [run(0.3, 100, (0.32, 80)), run(0.3, 101, (0.4, 80))]
    both = [stays, run(0.1, 101, (0.4, 40), (0.32, 40))]
    assert rivals.chosen(fast_once + both, problem) == {("fedavg", None, None): {"lr": 0.1}}
    lost = [run(0.3, seed, (0.3, 80), status="diverged") for seed in (100, 101)]
    assert rivals.chosen(lost + both, problem) == {("fedavg", None, None): {"lr": 0.1}}
    wider = {(options["lr"], seed) for _, options, seed in rivals.grown(problem, lost + both, ["fedavg"])}
    assert wider == {(lr, seed) for lr in (0.03, 0.1, 0.3) for seed in (100, 101)}  # 0.1 is the smallest tried
    assert rivals.edges(problem, lost + both, ("fedavg", None, None), {"lr": 0.1}) == {"lr": "smallest"}


def test_every_algorithm_has_a_page_and_a_row():
    """The tables in the docs and in the README are those that the code makes."""
    for page, pages in (("docs/algorithms/index.md", ""), ("README.md", "docs/algorithms/")):
        text = (ROOT / page).read_text()
        assert f"\n{table.BEGIN}\n{table.table(pages)}\n\n{table.END}\n" in text, f"{table.BEGIN} in {page}"
        assert all(text.count(f"| [`{name}`](") == 1 for name in fg.algorithms.REGISTRY)  # no second table
    for name, (cls, _) in fg.algorithms.REGISTRY.items():
        assert table.table().count(f"[`{name}`]") == 1
        text = (ROOT / "docs" / "algorithms" / f"{cls.__module__.rpartition('.')[2]}.md").read_text()
        assert f"::: fedagrac.{cls.__name__}\n" in text
        assert "## Unequal step counts" in text


def test_the_table_is_written_between_its_marks(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    table.write_table(page)
    assert page.read_text() == f"before\n{table.BEGIN}\n{table.table('docs/algorithms/')}\n\n{table.END}\nafter\n"
    row = next(line for line in page.read_text().splitlines() if "`fedagrac`" in line)
    assert row.endswith("| none | 8 d | 4 d, 8 d if fast |")
    page.write_text(f"before\n{table.BEGIN}\nold\n")
    with pytest.raises(fg.InputError, match="without marks"):
        table.write_table(page)
    assert page.read_text().endswith("old\n")


def test_the_package_is_typed():
    assert (Path(fg.__file__).parent / "py.typed").exists()


def pins():
    """Return the versions of constraints.txt by normalised name."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)] == []
    found = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    assert len(found) == len(lines)
    return found


def test_constraints_pin_all_that_the_package_its_extras_and_its_build_name():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = table["project"]["optional-dependencies"].values()
    named = [table["build-system"]["requires"], table["project"]["dependencies"], *extras]
    missing = {
        Requirement(line).name
        for group in named
        for line in group
        if canonicalize_name(Requirement(line).name) not in pins()
    }
    assert missing == set()


def test_constraints_pin_what_is_installed_and_all_that_it_needs_in_turn():
    """Walk the requirements of every extra, as far as they are installed here."""
    pinned, todo, wrong = pins(), [], {}
    seen = {("fedagrac", extra) for extra in ("", *metadata.metadata("fedagrac").get_all("Provides-Extra"))}
    todo += seen
    while todo:
        name, extra = todo.pop()
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if name != "fedagrac" and Version(found.version).public != pinned.get(name):
            wrong[name] = f"{found.version} is installed, {pinned.get(name)} is pinned"
        for line in found.requires or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                new = {(canonicalize_name(needed.name), more) for more in ("", *needed.extras)} - seen
                seen |= new
                todo += new
    assert wrong == {}
    assert {"torch", "flwr", "sympy", "click", "pluggy"} <= {name for name, _ in seen}


def test_an_audit_counts_what_was_not_looked_up_as_not_audited(tmp_path, monkeypatch):
    """pip-audit says "no known vulnerabilities" of versions for which the service had no answer."""
    monkeypatch.syspath_prepend(ROOT / ".ci")
    audit = importlib.import_module("audit")
    fine, flawed = {"name": "a", "version": "1", "vulns": []}, {"name": "b", "version": "2", "vulns": [FLAW]}
    unknown = {"name": "c", "skip_reason": "not found"}
    tool = tmp_path / "pip-audit"

    def said(content):
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{content}\nEND\n")
        tool.chmod(0o755)
        code, lines = audit.audit([str(tool)], ROOT / "constraints.txt")
        return code, lines[-1]

    assert said(json.dumps({"dependencies": [fine]})) == (0, "no known vulnerabilities; 1 of 1 versions looked up")
    assert said(json.dumps({"dependencies": [fine, unknown]}))[0] == 3
    assert said(json.dumps({"dependencies": []}))[0] == 3
    assert said("Traceback")[0] == 3
    code, line = said(json.dumps({"dependencies": [fine, flawed, unknown]}))
    assert (code, line) == (1, "1 known vulnerabilities; 2 of 3 versions looked up")


FLAW = {"id": "CVE-1", "fix_versions": ["3"]}


def test_the_security_policy_is_in_the_source_archive():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "SECURITY.md" in table["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert "SECURITY.md" in (ROOT / "CONTRIBUTING.md").read_text()
    assert (ROOT / "SECURITY.md").exists()


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
