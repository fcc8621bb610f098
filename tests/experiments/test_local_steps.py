"""Local optimizers, schedules of lr, and algorithms inside others, in experiment files and on Flower."""

import tomllib
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

import fedagrac as fg
from command_line import command
from fedagrac.errors import InputError
from fedagrac.experiments.build import build_algorithm
from fedagrac.experiments.overrides import apply_settings
from fedagrac.experiments.run import prepare, run_experiment
from fedagrac.experiments.schema import Experiment
from fedagrac.experiments.sweep import Sweep
from fedagrac.flower.settings import Settings
from fedagrac.imports import Imports
from fedagrac.report import read_run
from fedagrac.report.page import render_page

TABLE = {
    "name": "local",
    "rounds": 3,
    "lr": {"kind": "exponential", "first": 0.1, "factor": 0.5},
    "engine": "serial",
    "data": {"clients": 4, "partition": {"kind": "dirichlet", "alpha": 0.3}, "batch_size": 5},
    "steps": {"kind": "linear", "first": 1, "increment": 2},
    "algorithm": [
        {"name": "fedagrac", "local": {"kind": "adam", "betas": [0.9, 0.99]}, "lr": {"0": 0.01, "2": 0.001}},
        {"name": "fedavg", "local": {"kind": "sgd", "momentum": 0.5, "clip": 1.0}},
        {"name": "fedlin"},
        {"name": "fedavgm", "inner": {"name": "fedagrac", "calibration": 0.5}},
    ],
}
EXPONENTIAL = fg.schedule.Exponential(0.1, 0.5)


def changed(table, *settings):
    return Experiment.of(apply_settings(table, list(settings)))


def test_tables_become_the_objects_of_python():
    adam, momentum, _, inside = (entry.algorithm for entry in prepare(Experiment.of(TABLE)).entries)
    assert adam == fg.FedaGrac(lr=fg.schedule.Piecewise({0: 0.01, 2: 0.001}), local=fg.Adam(betas=(0.9, 0.99)))
    assert momentum == fg.FedAvg(lr=EXPONENTIAL, local=fg.SGD(momentum=0.5, clip=1.0))
    assert inside.inside == fg.FedaGrac(lr=EXPONENTIAL, calibration=0.5)


def test_a_shared_schedule_is_scaled_for_an_algorithm_that_divides_its_steps():
    prepared = prepare(Experiment.of(TABLE))
    fedlin = prepared.entries[2]
    mean = float(prepared.federation.weights @ [1, 3, 5, 7])
    assert [fedlin.algorithm.lr(t) for t in range(3)] == pytest.approx([0.1 * mean, 0.05 * mean, 0.025 * mean])


def test_the_experiment_of_a_run_folder_repeats_it_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = run_experiment(prepare(Experiment.of(TABLE)), Path("first"))
    again = run_experiment(prepare(Experiment.load("first/experiment.toml")), Path("again"))
    assert [folder.name for folder in first] == ["fedagrac", "fedavg", "fedlin", "fedavgm"]
    for one, other in zip(first, again, strict=True):
        a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
        assert all(torch.equal(a[key], b[key]) for key in a), one
        alone = run_experiment(prepare(Experiment.load(one / "experiment.toml")), Path("alone") / one.name)
        c = load_file(alone[0] / "model.safetensors")
        assert all(torch.equal(a[key], c[key]) for key in a), one
    table = tomllib.loads(Path("first/experiment.toml").read_text())
    assert table == tomllib.loads(Path("again/experiment.toml").read_text())
    assert table["algorithm"][0]["local"] == {"kind": "adam", "betas": [0.9, 0.99], "eps": 1e-8}
    assert table["algorithm"][3]["inner"]["first_steps"] == "epoch"  # defaults are written out inside, too
    page = render_page([read_run(folder) for folder in first])
    for shown in ("adam: betas [0.9, 0.99], eps 1e-08", "fedagrac: calibration 0.5", "exponential: first 0.1"):
        assert shown in page


def test_a_step_size_that_becomes_zero_is_refused_before_any_algorithm_runs():
    cosine = {"kind": "cosine", "first": 0.1, "rounds": 2}
    table = {**TABLE, "rounds": 3, "algorithm": [{"name": "fedavg"}, {"name": "scaffold", "lr": cosine}]}
    with pytest.raises(fg.InputError, match=r"algorithm\[1\]\.lr of scaffold in round 3 = 0\.0: .*last="):
        prepare(Experiment.of(table))


def test_settings_reach_into_the_tables_of_one_algorithm():
    made = changed(TABLE, "algorithm.fedlin.local.kind=adamw", "algorithm.fedavgm.inner.calibration=0.25")
    assert made.algorithm[2].build(0.1).local == fg.AdamW()
    assert made.algorithm[3].build(0.1).inner.calibration == 0.25
    assert changed(TABLE, 'algorithm.local={kind="adam"}').algorithm[1].build(0.1).local == fg.Adam()


def test_a_sweep_varies_lr_and_whole_tables():
    grid = ['algorithm.lr=0.1,{kind="cosine",first=0.1,rounds=9}', "algorithm.fedavgm.momentum=0,0.5"]
    experiment = Sweep.of(TABLE, grid, seeds=1).experiments[0]
    rates = [entry.build().lr for entry in experiment.algorithm if entry.name == "fedavg"]
    assert rates == [0.1, fg.schedule.Cosine(0.1, 9)]
    assert len(experiment.algorithm) == 2 * 3 + 4


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "fedavg", "local": {"kind": "adan"}}, r"algorithm\[0\].local.kind = .*adan"),
        ({"name": "fedavg", "local": {"kind": "adam", "beta": 1}}, r"algorithm\[0\].local.beta"),
        ({"name": "fedavg", "local": {"kind": "sgd", "clip": -1}}, r"algorithm\[0\].local.clip"),
        ({"name": "fedavg", "local": "adam"}, r"algorithm\[0\].local"),
        ({"name": "fednova", "local": {"kind": "adam"}}, r"algorithm\[0\].local"),
        ({"name": "fedavg", "lr": {"kind": "cosine", "first": 0.1}}, r"algorithm\[0\].lr.rounds"),
        ({"name": "fedavg", "inner": {"name": "fedprox"}}, r"algorithm\[0\].*inner"),
        ({"name": "fedadam", "inner": "fedprox"}, r"algorithm\[0\].inner = .*a table with the name"),
        ({"name": "fedadam", "inner": {"name": "fedprx"}}, r"algorithm\[0\].inner.name = .*fedprox"),
        ({"name": "fedadam", "inner": {"name": "fedprox", "nu": 1}}, r"algorithm\[0\].inner.fedprox.nu"),
        ({"name": "fedadam", "inner": {"name": "fedprox", "lr": 1}}, r"algorithm\[0\].inner.lr = .*of the whole"),
        (
            {"name": "fedadam", "inner": {"name": "fedyogi"}},
            r"algorithm\[0\].inner = .*without a server",
        ),
        (
            {"name": "fedadam", "inner": {"name": "fednova"}, "local": {"kind": "adam"}},
            r"algorithm\[0\].local = .*not a sum of gradients",
        ),
    ],
)
def test_tables_that_are_refused(entry, message):
    with pytest.raises(InputError, match=message):
        Experiment.of({**TABLE, "algorithm": [entry]})


def test_an_algorithm_inside_another_obeys_the_rule_of_import_paths(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "import fedagrac as fg\nfrom dataclasses import dataclass\n"
        "@dataclass(frozen=True)\nclass Half(fg.FedaGrac):\n    calibration: float = 0.5\n"
    )
    made = build_algorithm({"name": "fedavgm", "lr": 0.1, "inner": {"name": "mine:Half"}})
    assert (type(made.inside).__name__, made.inside.calibration) == ("Half", 0.5)
    table = {**TABLE, "algorithm": [{"name": "fedavgm", "inner": {"name": "os:system"}}]}
    assert Experiment.of(table).has_own_code
    with pytest.raises(InputError, match=r"algorithm\[0\].*os:system"):
        prepare(Experiment.of(table), imports=Imports())
    Path("bad.toml").write_text(tomli_w.dumps(table))
    code, _, err = command("run", "bad.toml", capsys=capsys)
    assert (code, "Traceback" in err) == (2, False)


def test_the_same_tables_on_flower():
    config = {
        "clients": 3,
        "algorithm.name": "fedadam",
        "algorithm.lr.kind": "exponential",
        "algorithm.lr.first": 0.1,
        "algorithm.lr.factor": 0.5,
        "algorithm.local.kind": "adam",
        "algorithm.local.betas": "[0.9, 0.99]",
        "algorithm.inner.name": "fedagrac",
        "algorithm.inner.calibration": 0.5,
    }
    made = Settings.of(config).build_algorithm()
    assert (made.lr, made.local) == (EXPONENTIAL, fg.Adam(betas=(0.9, 0.99)))
    assert made.inside == fg.FedaGrac(lr=EXPONENTIAL, local=fg.Adam(betas=(0.9, 0.99)), calibration=0.5)
    with pytest.raises(InputError, match=r"algorithm.local.kind"):
        Settings.of({**config, "algorithm.local.kind": "adan"})


def test_epochs_on_flower_need_the_samples_of_every_client():
    config = {"clients": 3, "algorithm.name": "fedavg", "algorithm.lr": 0.1, "batch_size": 10}
    config |= {"steps.kind": "epochs", "steps.epochs": 2}
    with pytest.raises(InputError, match=r"steps.kind = .*samples of each partition"):
        Settings.of(config)
    steps = Settings.of({**config, "samples": '{"0": 10, "1": 11, "2": 40}'}).build_steps()
    assert steps.counts(0, 3, 0).tolist() == [2, 4, 8]
