"""Own data and own algorithms in experiment files, and the examples of docs/experiments.md."""

import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch

import fedagrac as fg
from command_line import command
from fedagrac.errors import InputError
from fedagrac.experiments.overrides import apply_settings
from fedagrac.experiments.run import prepare, run_experiment
from fedagrac.experiments.schema import Experiment, read_toml
from fedagrac.experiments.sweep import Sweep, run_sweep
from fedagrac.imports import Imports
from fedagrac.report import read_run
from fedagrac.report.charts import series_of

PAGE = Path(__file__).parents[2] / "docs" / "experiments.md"
FILES = dict(re.findall(r'^```\w+ title="(.*?)"\n(.*?)^```', PAGE.read_text(), re.MULTILINE | re.DOTALL))

DATA = """
import fedagrac as fg

def load(path="here", factor=1.0):
    return fg.Federation.from_arrays([([[1.0 * factor]], [0]), ([[3.0]], [1])], name=path)

def split(clients, partition, seed=7, data_dir=None):
    fed = fg.Federation.load("digits", clients, partition, seed)
    fed.name = f"seed {seed} in {data_dir}"
    return fed

def text():
    return "no federation"

def refused():
    return fg.Federation.from_arrays([])
"""

ALGORITHMS = """
from dataclasses import dataclass

import fedagrac as fg

@dataclass(frozen=True)
class Mine(fg.FedAvg):
    shrink: float = 1.0
    name = "mine"

    def check(self):
        if self.shrink > 1:
            raise fg.InputError("shrink", self.shrink, "at most 1")

    def plan(self, state, rows, cohort):
        return fg.Plan.of(cohort.steps, self.lr * self.shrink)

@dataclass(frozen=True)
class Nameless(fg.FedAvg):
    name = None

@dataclass(frozen=True)
class Lost(fg.FedAvg):
    traits = fg.Traits(vectors=("y",))

@dataclass(frozen=True)
class Plain(fg.FedAvg):
    traits = {"rows": "nu"}

@dataclass(frozen=True)
class Once(fg.FedAvg):
    traits = fg.Traits(exchanges=3)

@dataclass(frozen=True)
class Unfinished(fg.Algorithm):
    name = "unfinished"

def half(lr, mu=0.5):
    return fg.FedProx(lr=lr / 2, mu=mu)

def without_lr():
    return fg.FedAvg(lr=1.0)

def number(lr):
    return lr
"""

TABLE = {
    "name": "own",
    "rounds": 3,
    "lr": 0.1,
    "data": {"name": "digits", "clients": 4, "batch_size": 10},
    "steps": {"kind": "linear", "first": 2, "increment": 2},
    "algorithm": [{"name": "mine:Mine"}],
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Return the current folder, which holds the files of a user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    for name, text in FILES.items():
        Path(name).write_text(text)
    Path("own_data.py").write_text(DATA)
    Path("mine.py").write_text(ALGORITHMS)
    return tmp_path


def with_data(name, **more):
    return {**TABLE, "data": {"name": name, **more}, "algorithm": [{"name": "fedavg"}]}


def with_algorithm(name, **more):
    return {**TABLE, "algorithm": [{"name": name, **more}]}


# the page


def test_the_files_of_the_page_run(capsys):
    code, out, err = command("run", "hospitals.toml", "--out", "out", capsys=capsys)
    assert code == 0, err
    assert "ServerMomentum" in out
    stored = tomllib.loads(Path("out/ServerMomentum/experiment.toml").read_text())
    assert stored["data"] == {
        "name": "my_data:load", "hospitals": 6, "batch_size": 10, "sampling": "replacement",
    }  # fmt: skip
    (entry,) = stored["algorithm"]
    assert entry == {"name": "my_algorithms:ServerMomentum", "beta": 0.5, "lr": 0.1, "label": "ServerMomentum"}
    run = read_run("out/ServerMomentum")
    assert (run.federation.name, run.federation.sizes) == ("hospitals", [40, 50, 60, 70, 80, 90])


def test_an_own_algorithm_has_the_numbers_of_its_formula():
    """Momentum by hand: beta = 0 is FedAvg, and otherwise v_2 = beta v_1 + D_2 on the same clients."""
    table = {**read_toml("hospitals.toml"), "dtype": "float64", "rounds": 1}
    table["algorithm"] = [{"name": "my_algorithms:ServerMomentum", "beta": 0.0}, {"name": "fedavg"}]
    prepared = prepare(Experiment.of(table))
    fed, model, options = prepared.federation, prepared.module, prepared.options()
    none, plain = (fg.simulate(model, fed, e.algorithm, **options) for e in prepared.entries)
    torch.testing.assert_close(none.vector, plain.vector, rtol=1e-12, atol=1e-12)
    options["rounds"] = 2
    half = fg.simulate(model, fed, fg.algorithm("my_algorithms:ServerMomentum", lr=0.1, beta=0.5), **options)
    first = plain.vector
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    again = fg.simulate(model, fed, fg.FedAvg(lr=0.1), **options)  # round 2 begins at the same model
    velocity = 0.5 * (start - first) + first - again.vector
    torch.testing.assert_close(half.vector, first - velocity, rtol=1e-12, atol=1e-12)


def test_clients_are_fine_tuned_and_train_alone(folder):
    prepared = prepare(Experiment.load("speakers.toml"))
    (path,) = run_experiment(prepared, folder / "out")
    fed, model, options = prepared.federation, prepared.module, prepared.options()
    assert [int(n) for n in fed.validation.sizes] == [5, 6, 7, 8, 9, 10]
    result = fg.simulate(model, fed, fg.FedaGrac(lr=0.1), **options)
    tuned = fg.fine_tune(result, lr=0.05, steps=20, batch_size=20)
    stored = json.loads((path / "per_client.json").read_text())
    assert stored["name"] == [f"speaker {i}" for i in range(6)]
    assert stored["loss"] == pytest.approx(result.per_client.loss.tolist(), rel=1e-5)
    assert stored["tuned_loss"] == pytest.approx(tuned.loss.tolist(), rel=1e-5)
    assert stored["tuned_accuracy"] == pytest.approx(tuned.accuracy.tolist())
    alone = fg.local_only(model, fed, lr=0.1, rounds=10, steps=fg.Linear(2, 4))
    before = (folder / "out" / "local_only.json").read_text()
    assert json.loads(before)["loss"] == pytest.approx(alone.loss.tolist(), rel=1e-5)
    assert {"top3", "val_accuracy"} <= set(read_run(path).history[-1])
    run_experiment(prepared, folder / "out", resume=True)  # nothing is left to do
    assert (folder / "out" / "local_only.json").read_text() == before


def test_clients_without_test_sets_cannot_be_measured():
    table = {**with_algorithm("fedavg"), "per_client": {"fine_tune_steps": 3}}
    with pytest.raises(InputError, match="per_client = 'digits': expected data with a test set for each client"):
        prepare(Experiment.of(table))


# data


def test_an_own_function_receives_what_it_takes():
    fed = prepare(Experiment.of(with_data("own_data:load", factor=5.0, batch_size=1))).federation
    assert (fed.name, fed.inputs.tolist()) == ("here", [[5.0], [3.0]])
    partition = {"kind": "shards", "classes": 2}
    table = {**with_data("own_data:split", clients=5, partition=partition), "seed": 3}
    fed = prepare(Experiment.of(table), data_dir="there").federation
    assert (fed.num_clients, fed.name) == (5, "seed 3 in there")
    assert all(len(set(fed.targets[fed.samples_of(i)].tolist())) <= 2 for i in range(5))
    expected = fg.Federation.load("digits", 5, fg.Shards(2), 3)
    assert all(np.array_equal(fed.samples_of(i), expected.samples_of(i)) for i in range(5))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"name": "own_data:text"},
            "data.name = 'own_data:text': expected a factory of Federation; it returned str",
        ),
        ({"name": "own_data:load", "clients": 3}, "takes clients"),
        ({"name": "own_data:load", "pth": "x"}, "takes pth"),
        ({"name": "own_data:split"}, "missing a required argument: 'clients'"),
        ({"name": "own_data:refused"}, r"data.clients = \[\]"),
        ({"name": "own_data:missing"}, "missing"),
        ({"name": "os:getcwd"}, "`trusted`"),
        ({"name": "digits", "clents": 4}, "did you mean 'clients'"),
        ({"name": "digits", "alpha": 4}, "data.digits.alpha = 4"),
        ({"name": "synthetic", "alhpa": 4}, "did you mean 'alpha'"),
        ({"name": "synthetic", "alpha": -1}, "data.alpha = -1"),
        ({"name": "digits", "validation": 1.5}, "data.validation = 1.5"),
    ],
)
def test_data_that_are_refused(data, message):
    with pytest.raises(InputError, match=message):
        prepare(Experiment.of({**TABLE, "data": data, "algorithm": [{"name": "fedavg"}]}))


def test_the_options_of_a_data_set_need_no_list():
    fed = prepare(Experiment.of(with_data("synthetic", clients=3, alpha=0.0, beta=2.0))).federation
    expected = fg.Federation.load("synthetic", 3, seed=0, alpha=0.0, beta=2.0)
    assert torch.equal(fed.inputs, expected.inputs)


def test_a_share_of_the_samples_is_held_out():
    prepared = prepare(Experiment.of(with_data("digits", clients=4, validation=0.25)))
    whole = fg.Federation.load("digits", 4, seed=0)
    held = prepared.federation.validation
    assert np.allclose(held.sizes, 0.25 * whole.sizes, atol=1)
    assert (prepared.federation.sizes + held.sizes == whole.sizes).all()


# algorithms


def test_an_own_algorithm_is_its_class_or_what_a_function_returns():
    entries = [
        {"name": "mine:Mine", "shrink": 0.5},
        {"name": "mine:half"},
        {"name": "mine:half", "label": "x", "lr": 1},
    ]
    prepared = prepare(Experiment.of({**TABLE, "algorithm": entries}))
    mine, half, other = prepared.entries
    assert (mine.algorithm.lr, mine.algorithm.shrink, mine.label, mine.folder) == (0.1, 0.5, "Mine", "Mine")
    assert (half.algorithm, half.label) == (fg.FedProx(lr=0.05, mu=0.5), "half")
    assert (other.algorithm, other.label) == (fg.FedProx(lr=0.5, mu=0.5), "x")
    assert fg.algorithm("mine:half", lr=4.0) == fg.FedProx(lr=2.0, mu=0.5)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "mine:Mine", "shrnk": 1}, r"algorithm\[0\].mine:Mine.shrnk = 1.*did you mean 'shrink'"),
        ({"name": "mine:Mine", "shrink": 2.0}, r"algorithm\[0\].shrink = 2.0: expected at most 1"),
        ({"name": "mine:Nameless"}, "Nameless.name = None: expected a text"),
        ({"name": "mine:Lost"}, "Lost.traits.vectors"),
        ({"name": "mine:Plain"}, "Plain.traits = {'rows': 'nu'}: expected fedagrac.Traits"),
        ({"name": "mine:Once"}, "Once.traits.exchanges = 3: expected 1 or 2"),
        ({"name": "mine:Unfinished"}, "abstract"),
        ({"name": "mine:without_lr"}, "takes lr"),
        ({"name": "mine:number"}, "a factory of Algorithm; it returned float"),
        ({"name": "mine:fg"}, "itself defines"),
        ({"name": "mine:Gone"}, "Gone"),
        ({"name": "fractions:Fraction"}, r"algorithm\[0\].name = 'fractions:Fraction'.*`trusted`"),
    ],
)
def test_algorithms_that_are_refused(entry, message):
    with pytest.raises(InputError, match=message):
        prepare(Experiment.of({**TABLE, "algorithm": [entry]}))


def test_a_file_from_elsewhere_needs_trust(capsys):
    table = {**TABLE, "algorithm": [{"name": "fedagrac.algorithms:FedProx", "mu": 1.0}]}
    Path("other.toml").write_text(tomli_w.dumps(table))
    for words in (["run"], ["sweep", "--grid", "algorithm.FedProx.mu=1,2"]):
        code, _, err = command(words[0], "other.toml", *words[1:], capsys=capsys)
        assert (code, "--trust-imports" in err) == (2, True)
    (entry,) = prepare(Experiment.of(table), imports=Imports(trusted=True)).entries
    assert entry.algorithm == fg.FedProx(lr=0.1, mu=1.0)
    sweep = Sweep.of(table, ["algorithm.FedProx.mu=1,2"], seeds=1, imports=Imports(trusted=True))
    assert [point.setting for point in sweep.points] == [{"mu": 1}, {"mu": 2}]


def test_nothing_is_imported_before_every_path_is_allowed(folder):
    Path("noisy.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    table = {**TABLE, "model": {"name": "os:system"}, "algorithm": [{"name": "noisy:Mine"}]}
    with pytest.raises(InputError, match=r"model.name = 'os:system'"):
        prepare(Experiment.of(table))
    assert not Path("ran").exists()


def test_files_are_found_beside_the_experiment_file(folder, monkeypatch):
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    table = {**TABLE, "data": {"name": "own_data:split", "clients": 3, "partition": {"kind": "iid"}}}
    prepared = prepare(Experiment.of(table), imports=Imports(folder))
    assert (prepared.entries[0].label, prepared.federation.num_clients) == ("Mine", 3)
    with pytest.raises(InputError, match="a file"):
        prepare(Experiment.of(table))


# resume, sweeps, reports


def test_an_experiment_with_own_parts_resumes_from_its_folder(folder):
    table = {**TABLE, "data": {"name": "own_data:split", "clients": 3, "partition": {"kind": "iid"}}}
    prepared = prepare(Experiment.of(table))
    whole, cut = (run_experiment(prepared, folder / name)[0] for name in ("whole", "cut"))
    (cut / "status.json").unlink()
    stored = Experiment.load(folder / "cut" / "experiment.toml")
    run_experiment(prepare(stored, imports=Imports(folder / "cut")), folder / "cut", resume=True)
    before, after = read_run(whole), read_run(cut)
    assert after.status == "finished"
    assert [r["test_loss"] for r in after.history] == [r["test_loss"] for r in before.history]
    assert after.experiment["algorithm"] == [{"name": "mine:Mine", "shrink": 1.0, "lr": 0.1, "label": "Mine"}]


def test_a_sweep_varies_the_settings_of_an_own_algorithm(folder):
    table = {**TABLE, "algorithm": [{"name": "mine:Mine"}, {"name": "fedavg"}]}
    sweep = Sweep.of(table, ["algorithm.Mine.shrink=1,0.5", "algorithm.lr=0.1,0.2"], seeds=1)
    assert [point.label for point in sweep.points][:2] == ["Mine shrink=1 lr=0.1", "Mine shrink=1 lr=0.2"]
    folders = run_sweep(sweep, folder / "out")
    same, fedavg = (read_run(folders[label][0]) for label in ("Mine shrink=0.5 lr=0.2", "fedavg lr=0.1"))
    assert [r["test_loss"] for r in same.history] == pytest.approx(
        [r["test_loss"] for r in fedavg.history], rel=1e-5
    )
    with pytest.raises(InputError, match="at most 1"):
        Sweep.of(table, ["algorithm.Mine.shrink=1,2"], seeds=1)


def test_settings_select_an_own_algorithm_by_its_class():
    table = {**TABLE, "algorithm": [{"name": "mine:Mine"}, {"name": "fedavg"}]}
    assert apply_settings(table, ["algorithm.Mine.lr=0.5"])["algorithm"][0]["lr"] == 0.5


def test_charts_tell_own_algorithms_apart(folder):
    entries = [{"name": "mine:Mine"}, {"name": "mine:half"}, {"name": "fedavg"}]
    prepared = prepare(Experiment.of({**TABLE, "rounds": 1, "algorithm": entries}))
    lines = series_of([read_run(path) for path in run_experiment(prepared, folder / "out")])
    assert [line.label for line in lines] == ["Mine", "half", "fedavg"]
    assert len({(line.look.colour, line.look.pattern) for line in lines}) == 3


# the other keys


REGRESSION = """
import fedagrac as fg
import torch

def line():
    data = ([[0.0], [1.0], [2.0]], [[1.0], [3.0], [5.0]])
    return fg.Federation.from_arrays([data, data], test=data)

def net():
    return torch.nn.Linear(1, 1)
"""


def test_a_loss_is_chosen_by_name():
    Path("regression.py").write_text(REGRESSION)
    table = {
        **with_algorithm("fedavg"), "rounds": 200, "loss": "mse", "model": {"name": "regression:net"},
        "data": {"name": "regression:line", "batch_size": "full"},
    }  # fmt: skip
    prepared = prepare(Experiment.of(table))
    result = fg.simulate(prepared.module, prepared.federation, prepared.entries[0].algorithm, **prepared.options())
    assert result.vector.tolist() == pytest.approx([2.0, 1.0], abs=1e-3)  # y = 2 x + 1
    with pytest.raises(InputError, match=r"loss = 'msee'.*did you mean"):
        Experiment.of({**table, "loss": "msee"})


def test_metrics_are_named():
    with pytest.raises(InputError, match=r"metrics = 'top6'.*did you mean"):
        Experiment.of({**TABLE, "metrics": ["top6"]})
    assert Experiment.of(TABLE).resolved()["metrics"] == []


def test_metrics_are_measured():
    prepared = prepare(Experiment.of({**with_algorithm("fedavg"), "metrics": ["top3", "perplexity"]}))
    result = fg.simulate(prepared.module, prepared.federation, prepared.entries[0].algorithm, **prepared.options())
    x, y = prepared.federation.test
    output = result.model()(x).double().detach().numpy()
    place = (output > output[np.arange(len(y)), y][:, None]).sum(axis=1)
    last = result.history[-1]
    assert last["top3"] == pytest.approx((place < 3).mean())
    assert last["perplexity"] == pytest.approx(np.exp(last["test_loss"]), rel=1e-5)


def test_buffers_reach_the_runs():
    assert prepare(Experiment.of({**TABLE, "buffers": "frozen"})).fleet.setup.buffers == "frozen"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffers": "own"}, "buffers = 'own'"),
        ({"per_client": {}}, "fine_tune_steps"),
        ({"per_client": {"fine_tune_steps": 0}}, "per_client.fine_tune_steps = 0"),
        ({"per_client": {"fine_tune_stps": 3}}, "did you mean 'fine_tune_steps'"),
        ({"per_client": {"fine_tune_steps": 3}, "lr": None}, "per_client.fine_tune_lr"),
        ({"per_client": {"local_only": True}, "lr": None}, "lr = None"),
        ({"per_client": {"local_only": "yes"}}, "per_client.local_only = 'yes'"),
    ],
)
def test_keys_that_are_refused(change, message):
    table = {**TABLE, "algorithm": [{"name": "fedavg", "lr": 0.1}], **change}
    with pytest.raises(InputError, match=message):
        Experiment.of({key: value for key, value in table.items() if value is not None})
