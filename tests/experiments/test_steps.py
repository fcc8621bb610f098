"""The forms of [steps] in experiment files and on Flower: numbers, lists, traces, and the user's own."""

import tomllib
from pathlib import Path

import pytest
import tomli_w
from safetensors.torch import load_file

import fedagrac as fg
from command_line import command
from fedagrac.errors import InputError
from fedagrac.experiments.build import build_steps
from fedagrac.experiments.overrides import apply_settings
from fedagrac.experiments.run import check_same, prepare, run_experiment
from fedagrac.experiments.schema import Experiment
from fedagrac.flower.settings import Settings
from fedagrac.imports import Imports

COUNTS = [[1, 2, 3, 9], [4, 1, 1, 2]]
TABLE = {
    "name": "forms",
    "rounds": 2,
    "lr": 0.1,
    "engine": "serial",
    "checkpoint_every": 1,
    "data": {"clients": 4, "batch_size": 5},
    "steps": {"kind": "explicit", "table": COUNTS},
    "algorithm": [{"name": "fedagrac"}],
}
OWN = """
from dataclasses import dataclass
import numpy as np
import fedagrac as fg

def counts(round, num_clients):
    return [[1, 2, 3, 9], [4, 1, 1, 2]][round]

@dataclass(frozen=True)
class Shifted(fg.StepSchedule):
    first: int
    more: int = 1

    def counts(self, round, clients, seed):
        return self.first + self.more * round + np.arange(clients)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Work in an empty folder, with a trace and a module in a folder below."""
    monkeypatch.chdir(tmp_path)
    folder = Path("study")
    folder.mkdir()
    (folder / "k.csv").write_text("round,0,1,2,3\n1,1,2,3,9\n2,4,1,1,2\n")
    (folder / "my_steps.py").write_text(OWN)
    return folder


def written(folder, steps):
    """Return an experiment file whose steps are of some form."""
    file = folder / "experiment.toml"
    file.write_text(tomli_w.dumps({**TABLE, "steps": steps}))
    return file


def vector(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("steps", [COUNTS, "k.csv", {"kind": "trace", "path": "k.csv"}])
def test_a_trace_is_the_explicit_table_of_its_counts(steps, here):
    assert Experiment.load(written(here, steps)).resolved() == Experiment.of(TABLE).resolved()


def test_what_a_run_stores_of_a_trace_does_not_depend_on_the_file(here, capsys):
    file = written(here, {"kind": "trace", "path": "k.csv"})
    code, _, err = command("run", str(file), "--out", "mine", capsys=capsys)
    assert code == 0, err
    for folder in ("mine", "mine/fedagrac"):
        assert tomllib.loads(Path(folder, "experiment.toml").read_text())["steps"] == TABLE["steps"]
    (expected,) = run_experiment(prepare(Experiment.of(TABLE)), Path("explicit"))
    prepared = prepare(Experiment.load(file))
    (here / "k.csv").unlink()
    (again,) = run_experiment(prepare(Experiment.load("mine/experiment.toml")), Path("again"))
    for folder in (Path("mine/fedagrac"), again):
        assert all((vector(folder)[key] == values).all() for key, values in vector(expected).items())
    check_same(prepared, Path("mine"))  # it may resume there
    (here / "k.csv").write_text("round,0,1,2,3\n1,1,2,3,9\n2,4,1,1,3\n")
    with pytest.raises(InputError, match=r"steps.table.1.3: 2 -> 3"):
        check_same(prepare(Experiment.load(file)), Path("mine"))


def test_a_path_beside_the_file_comes_before_one_in_the_current_folder(here):
    Path("k.csv").write_text("0,1,2,3\n7,7,7,7\n")
    beside = Experiment.load(written(here, {"kind": "trace", "path": "k.csv"}))
    assert beside.steps["table"] == COUNTS
    assert Experiment.of({**TABLE, "steps": {"kind": "trace", "path": "k.csv"}}).steps["table"] == [[7, 7, 7, 7]]


def test_numbers_and_lists_are_constant_and_explicit():
    assert Experiment.of({**TABLE, "steps": 100}).resolved()["steps"] == {"kind": "constant", "steps": 100}
    row = Experiment.of({**TABLE, "steps": [2, 3, 5, 8]}).resolved()["steps"]
    assert row == {"kind": "explicit", "table": [[2, 3, 5, 8]]}
    assert Experiment.of(apply_settings(TABLE, ["steps=7"])).steps == {"kind": "constant", "steps": 7}


@pytest.mark.parametrize("steps", ["my_steps:counts", {"kind": "my_steps:counts"}])
def test_a_function_is_named_by_its_import_path(steps, here):
    prepared = prepare(Experiment.load(written(here, steps)), imports=Imports(here))
    assert prepared.described()["steps"] == {"kind": "my_steps:counts"}
    assert [prepared.steps.counts(t, 4, 0).tolist() for t in (0, 1)] == COUNTS


def test_a_schedule_of_ones_own_has_settings(here):
    imports = Imports(here)
    table = {**TABLE, "steps": {"kind": "my_steps:Shifted", "first": 5}}
    experiment = Experiment.of(table, imports)
    assert experiment.has_own_code
    schedule = prepare(experiment, imports=imports).steps
    assert schedule.counts(1, 4, 0).tolist() == [6, 7, 8, 9]
    for wrong, message in (
        ({"frst": 5}, r"steps.kind = 'my_steps:Shifted': .*frst"),
        ({}, "steps.kind = .*first"),
    ):
        with pytest.raises(InputError, match=message):
            Experiment.of({**table, "steps": {"kind": "my_steps:Shifted", **wrong}}, imports)
    with pytest.raises(InputError, match=r"steps.more = 1: expected no setting"):
        Experiment.of({**table, "steps": {"kind": "my_steps:counts", "more": 1}}, imports)


def test_import_paths_of_steps_obey_the_rule_of_import_paths(here, capsys):
    for path in ("os:system", "elsewhere:counts"):
        with pytest.raises(InputError, match=rf"steps.(name|kind) = '{path}'"):
            prepare(Experiment.of({**TABLE, "steps": path}), imports=Imports(here))
    file = written(here, "my_steps:counts")
    assert command("run", str(file), "--out", "mine", capsys=capsys)[0] == 0
    code, _, err = command("run", "--resume", "--out", "mine", capsys=capsys)
    assert (code, "--trust-imports" in err) == (2, True)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (0, "steps = 0"),
        (True, "steps = True"),
        (2.5, "steps = 2.5"),
        ([1, 0], r"steps\[0\]\[1\] = 0"),
        ("none.csv", "steps = 'none.csv': expected a CSV file that exists"),
        ({"kind": "trace"}, "steps.path = None"),
        ({"kind": "trace", "path": 3}, "steps.path = 3"),
        ({"kind": "trace", "path": "k.csv", "table": 1}, "steps.table = 1"),
        ({"kind": "trce"}, "steps.kind = 'trce'"),
    ],
)
def test_bad_steps_are_refused_by_name(steps, message):
    with pytest.raises(InputError, match=message):
        Experiment.of({**TABLE, "steps": steps})


def test_a_trace_that_no_experiment_file_has_room_for_is_refused(here):
    wide = ",".join(map(str, range(1001)))
    (here / "large.csv").write_text(wide + "\n" + ("5" + ",5" * 1000 + "\n") * 1000)
    with pytest.raises(InputError, match="at most 1000000 step counts"):
        Experiment.of({**TABLE, "steps": "large.csv"}, folder=here)


def test_numbers_and_lists_on_flower():
    config = {"clients": 3, "algorithm.name": "fedavg", "algorithm.lr": 0.1}
    assert Settings.of({**config, "steps": 7}).build_steps() == fg.Constant(7)
    assert Settings.of({**config, "steps": "[1, 2, 3]"}).build_steps() == fg.Explicit([[1, 2, 3]])
    for steps in ({"steps": 0}, {"steps": "k.csv"}, {"steps.kind": "trace", "steps.path": "k.csv"}):
        with pytest.raises(InputError, match="steps"):
            Settings.of({**config, **steps})


def test_recipes_take_the_same_tables():
    assert build_steps({"kind": "constant", "steps": 3}) == fg.Constant(3)
