"""Sweeps: the grid, the best setting of each algorithm, and the files."""

import functools
import json
import signal
import tomllib
from dataclasses import replace

import pytest
import tomli_w

import fedagrac as fg
from fedagrac.callbacks import Checkpoints
from fedagrac.callbacks.progress import Progress
from fedagrac.cli.app import main
from fedagrac.errors import InputError
from fedagrac.experiments.overrides import apply_settings
from fedagrac.experiments.run import prepare
from fedagrac.experiments.schema import Experiment
from fedagrac.experiments.sweep import Choice, Point, Sweep, at_the_edge, best_choices, read_axes, with_setting
from fedagrac.report.heatmaps import HeatMap, plot_heat_maps
from fedagrac.rounds.api import simulate, simulate_many
from fedagrac.storage.checkpoints import read_checkpoint

TABLE = {
    "name": "mini",
    "rounds": 3,
    "seed": 5,
    "data": {"name": "digits", "clients": 4, "partition": {"kind": "dirichlet", "alpha": 0.3}, "batch_size": 10},
    "steps": {"kind": "linear", "first": 2, "increment": 4},
    "algorithm": [{"name": "fedavg", "lr": 0.1}, {"name": "fedprox", "lr": 0.1, "label": "prox"}],
}


def choice(value, *results, status="finished", algorithm="a", key="lr"):
    """Return a point whose seeds ended with these (accuracy, rounds to target, loss)."""
    rows = tuple(
        {"status": status, "final_accuracy": a, "rounds_to_target": r, "final_test_loss": loss}
        for a, r, loss in results
    )
    return Choice(Point(algorithm, f"{algorithm} {key}={value}", {key: value}, {}), rows)


def test_a_sweep_is_an_experiment_with_every_point():
    sweep = Sweep.of(TABLE, ["algorithm.lr=0.1,0.5", "algorithm.prox.mu=1,0.1"], seeds=2)
    assert [point.label for point in sweep.points] == [
        "fedavg lr=0.1",
        "fedavg lr=0.5",
        "prox lr=0.1 mu=1",
        "prox lr=0.1 mu=0.1",
        "prox lr=0.5 mu=1",
        "prox lr=0.5 mu=0.1",
    ]
    assert [e.seed for e in sweep.experiments] == [5, 6]
    entry = sweep.experiments[1].algorithm[5]
    assert (entry.name, entry.lr, entry.model_extra) == ("fedprox", 0.5, {"mu": 0.1})


def test_values_may_be_words_numbers_or_tables():
    table = {"algorithm": [{"name": "fedagrac", "lr": 1}]}
    axes = read_axes(
        table,
        [
            "algorithm.init=full,zeros",
            'algorithm.first_steps="epoch",1',
            "algorithm.calibration=1.0,{0=0.1, 5=1.0}",
        ],
    )
    assert [axis.values for axis in axes] == [("full", "zeros"), ("epoch", 1), (1.0, {"0": 0.1, "5": 1.0})]


@pytest.mark.parametrize(
    ("grid", "word"),
    [
        ("lr=0.1,0.2", "algorithm.KEY"),
        ("algorithm.lr=", "algorithm.KEY"),
        ("algorithm.lr", "algorithm.KEY"),
        ("steps.variance=0,1", "`set`"),
        ("algorithm.nu=1,2", "did you mean 'mu'"),
        ("algorithm.fedavg.mu=1,2", "one of local, lr"),
        ("algorithm.fednova.lr=1,2", "fedavg, prox"),
        ("algorithm.lr=0.1,0.1", "different values"),
        ("algorithm.lr=0.1,,0.2", "different values"),
        ("algorithm.lr=-1,2", "above 0"),
    ],
)
def test_bad_grids_are_refused_before_any_work(grid, word):
    with pytest.raises(InputError, match=word):
        Sweep.of(TABLE, [grid], 1)


def test_a_setting_is_given_once():
    with pytest.raises(InputError, match="once per algorithm"):
        Sweep.of(TABLE, ["algorithm.lr=1,2", "algorithm.prox.lr=3"], 1)


def test_the_best_by_accuracy_rounds_and_loss():
    low = choice(0.1, (0.7, 20, 0.9), (0.8, None, 0.7))
    high = choice(0.2, (0.74, 30, 0.5), (0.75, 40, 0.6))
    assert best_choices([low, high], "accuracy")["a"] is low
    assert best_choices([low, high], "rounds")["a"] is high  # every seed arrives
    assert best_choices([low, high], "loss")["a"] is high
    assert low.mean("accuracy") == pytest.approx(0.75)
    assert low.spread("accuracy") == pytest.approx(0.0707, abs=1e-4)
    assert low.mean("rounds") is None
    other = choice(0.3, (0.1, 1, 0.1), algorithm="b")
    assert set(best_choices([low, other, high], "accuracy")) == {"a", "b"}


def test_what_diverged_is_never_the_best():
    lost = choice(0.9, (0.99, 1, 0.01), status="diverged")
    assert best_choices([lost, choice(0.1, (0.2, None, 3.0))], "accuracy")["a"].point.setting == {"lr": 0.1}
    assert lost.mean("accuracy") is None


def test_the_edge_of_a_grid():
    grid = [choice(value, (0.5, None, 1.0)) for value in (0.1, 0.2)]
    assert at_the_edge(grid[0], grid) == []  # two values have no inside
    words = [choice(value, (0.5, None, 1.0), key="init") for value in ("full", "zeros", "other")]
    assert at_the_edge(words[0], words) == []


def test_heat_maps_show_every_number_and_frame_the_best():
    values = ((70.0, None), (80.25, 60.0))
    figure = plot_heat_maps([HeatMap("fedprox", "lr", ("0.1", "0.2"), "mu", ("1", "0.1"), values, "accuracy")])
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["70.0", "-", "80.2", "60.0"]
    (frame,) = [patch for patch in axes.patches if patch.get_linewidth() == 1.6]
    assert frame.get_xy() == (-0.5, 0.5)
    smallest = HeatMap("x", "lr", ("0.1", "0.2"), "", ("",), ((5.0,), (3.0,)), "rounds", larger_is_better=False)
    figure = plot_heat_maps([smallest])
    (frame,) = [patch for patch in figure.axes[0].patches if patch.get_linewidth() == 1.6]
    assert frame.get_xy() == (-0.5, 0.5)


def test_the_command(tmp_path, capsys):
    """Points have the numbers of a plain run; best.toml is the experiment with the best settings."""
    file = tmp_path / "mini.toml"
    import tomli_w

    file.write_text(tomli_w.dumps(TABLE))
    out = tmp_path / "out"
    arguments = ["sweep", str(file), "--grid", "algorithm.lr=0.02,0.3", "--grid", "algorithm.mu=1,0.1"]
    with pytest.raises(SystemExit) as done:
        main([*arguments, "--seeds", "2", "--out", str(out), "--json"])
    assert done.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["by"], printed["seeds"], len(printed["points"])) == ("accuracy", [5, 6], 6)
    assert [p["algorithm"] for p in printed["points"] if p["best"]] == ["fedavg", "prox"]
    for name in ("sweep.png", "sweep.pdf", "report.html", "seed-6/prox-lr-0.3-mu-0.1/model.safetensors"):
        assert (out / name).stat().st_size > 0
    best = tomllib.loads((out / "best.toml").read_text())
    chosen = {p["algorithm"]: p["setting"] for p in printed["points"] if p["best"]}
    assert [entry["lr"] for entry in best["algorithm"]] == [chosen["fedavg"]["lr"], chosen["prox"]["lr"]]
    assert best["algorithm"][1]["mu"] == chosen["prox"]["mu"]
    alone = prepare(Experiment.of({**TABLE, "algorithm": [{"name": "fedprox", "lr": 0.3, "mu": 0.1}]}))
    result = simulate(alone.module, alone.federation, alone.entries[0].algorithm, **alone.options())
    (point,) = [p for p in printed["points"] if p["setting"] == {"lr": 0.3, "mu": 0.1}]
    assert point["runs"][0]["test_loss"] == pytest.approx(result.history.last("test_loss"), rel=1e-5)
    assert [run["seed"] for run in point["runs"]] == [5, 6]
    assert point["runs"][0]["test_loss"] != point["runs"][1]["test_loss"]


def test_the_table_says_what_is_at_the_edge_and_what_diverged(tmp_path, capsys):
    import tomli_w

    file = tmp_path / "mini.toml"
    file.write_text(tomli_w.dumps(TABLE))
    out = str(tmp_path / "out")
    with pytest.raises(SystemExit) as done:
        main(["sweep", str(file), "--grid", "algorithm.fedavg.lr=0.001,0.01,0.1,1e300", "--out", out])
    assert done.value.code == 0
    printed = capsys.readouterr().out
    assert "lr=0.1 is at the edge" not in printed
    assert "fedavg lr=1e+300 diverged" in printed
    assert "best.toml" in printed
    with pytest.raises(SystemExit) as done:
        main(["sweep", str(file), "--grid", "algorithm.lr=0.1,0.2", "--out", out])
    assert done.value.code == 2
    assert "holds other files" in capsys.readouterr().err
    with pytest.raises(SystemExit) as done:
        main(["sweep", str(file), "--grid", "algorithm.lr=0.1,0.2", "--by", "rounds"])
    assert done.value.code == 2
    assert "neither target nor stop.accuracy" in capsys.readouterr().err


def test_an_interrupted_sweep_resumes(tmp_path, capsys, monkeypatch):
    """SIGTERM arrives in round 2 of the second of two seeds, with four points each."""
    file = tmp_path / "mini.toml"
    file.write_text(tomli_w.dumps({**TABLE, "checkpoint_every": 1000}))
    arguments = [str(file), "--grid", "algorithm.lr=0.1,0.5", "--seeds", "2", "--json"]

    def command(*more):
        with pytest.raises(SystemExit) as done:
            main(["sweep", *arguments, *map(str, more)])
        return done.value.code

    assert command("--out", tmp_path / "whole") == 0
    whole = json.loads(capsys.readouterr().out)
    rounds = []

    def on_round(self, run, record):
        rounds.append(record["round"])
        if len(rounds) == 4 * 3 + 4 + 2:
            signal.raise_signal(signal.SIGTERM)

    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(Progress, "on_round", on_round)
        assert command("--out", out) == 143
    errors = " ".join(capsys.readouterr().err.split())
    again = f"resume with: fedagrac sweep {file} --grid algorithm.lr=0.1,0.5 --seeds 2 --out {out} --resume"
    assert again in errors
    assert len(list(out.glob("seed-5/*/status.json"))) == 4
    assert len(list(out.glob("seed-6/*/checkpoint/round-00000002.safetensors"))) == 4
    untouched = (out / "seed-5" / "fedavg-lr-0.1" / "history.jsonl").stat().st_mtime_ns
    assert command("--out", out) == 2  # not without --resume
    assert command("--resume") == 2
    capsys.readouterr()
    assert command("--out", out, "--resume") == 0
    resumed = json.loads(capsys.readouterr().out)
    assert (out / "seed-5" / "fedavg-lr-0.1" / "history.jsonl").stat().st_mtime_ns == untouched

    def timeless(outcome):
        for point in outcome["points"]:
            for run in point["runs"]:
                del run["wall_time"], run["folder"]
        return outcome["points"]

    assert timeless(resumed) == timeless(whole)
    arguments[2] = "algorithm.lr=0.1,0.7"
    assert command("--out", out, "--resume") == 2
    assert "changed" in capsys.readouterr().err


def test_runs_side_by_side_resume_after_the_same_round(tmp_path):
    prepared = prepare(Experiment.of(TABLE))
    algorithms = [entry.algorithm for entry in prepared.entries]
    shared = {**prepared.options(), "device": "cpu"}
    checkpoints = [Checkpoints(tmp_path / str(i), every=2) for i in range(2)]
    run = functools.partial(simulate_many, prepared.module, prepared.federation, algorithms)
    whole = run(callbacks=[[callback] for callback in checkpoints], **shared)
    stored = [
        replace(read_checkpoint(callback.folder), history=w.history[:2])
        for callback, w in zip(checkpoints, whole, strict=True)
    ]
    again = run(resume=stored, **shared)
    assert [a.vector.tolist() for a in again] == [w.vector.tolist() for w in whole]
    with pytest.raises(InputError, match="after the same round"):
        run(resume=[stored[0], None], **shared)


# settings inside tables

NESTED = {
    **TABLE,
    "lr": {"kind": "exponential", "first": 0.1, "factor": 0.9},
    "algorithm": [
        {"name": "fedavg"},
        {"name": "fedprox", "local": {"kind": "adam"}, "lr": 0.3},
        {"name": "fedavgm", "inner": {"name": "fedagrac"}, "local": {"momentum": 0.5}},
    ],
}


def made(grid):
    """Return the algorithms of every point of a grid, by label."""
    (experiment,) = Sweep.of(NESTED, grid, seeds=1).experiments
    return {entry.label: entry.build(experiment.lr) for entry in experiment.algorithm}


def test_fields_of_local_optimizers_vary_where_the_optimizer_has_them():
    points = made(["algorithm.local.momentum=0,0.9"])
    assert list(points) == [
        "fedavg local.momentum=0", "fedavg local.momentum=0.9", "fedprox",
        "fedavgm local.momentum=0", "fedavgm local.momentum=0.9",
    ]  # fmt: skip
    assert points["fedavg local.momentum=0.9"].local == fg.SGD(momentum=0.9)
    assert points["fedprox"].local == fg.Adam()
    only = made(["algorithm.fedprox.local.eps=1e-4,1e-3"])
    assert [point.local for label, point in only.items() if "eps" in label] == [
        fg.Adam(eps=1e-4),
        fg.Adam(eps=1e-3),
    ]
    kinds = made(["algorithm.fedavg.local.kind=sgd,adamw", "algorithm.fedavg.lr=0.1"])
    assert [point.local for point in kinds.values()][:2] == [fg.SGD(), fg.AdamW()]


def test_fields_of_schedules_vary_where_the_step_size_has_them():
    """FedAvg and FedAvgM have the schedule of the experiment, FedProx a number."""
    points = made(["algorithm.lr.factor=0.5,0.8"])
    assert points["fedavg lr.factor=0.5"].lr == fg.schedule.Exponential(0.1, 0.5)
    assert points["fedavgm lr.factor=0.8"].lr == fg.schedule.Exponential(0.1, 0.8)
    assert points["fedprox"].lr == 0.3


def test_settings_of_an_algorithm_inside_another_vary():
    points = made(["algorithm.inner.calibration=0.1,1", "algorithm.fedavgm.momentum=0,0.5"])
    assert len(points) == 2 + 4
    assert points["fedavgm inner.calibration=0.1 momentum=0.5"].inner.calibration == 0.1


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ("algorithm.local.momentm=0,1", "did you mean 'momentum'"),
        ("algorithm.local.momentum.x=1", "local.momentum is none"),
        ("algorithm.fedprox.lr.factor=1", "lr is none"),
        ("algorithm.fedavg.inner.mu=1", "inner is none"),
        ("algorithm.fedagv.local.momentum=1", "did you mean 'fedavg'"),
        ("algorithm..lr=1", "algorithm.KEY=VALUE"),
        ("algorithm.local.momentum=2", r"local.momentum = 2"),
    ],
)
def test_axes_inside_tables_that_do_not_exist_are_refused(axis, message):
    with pytest.raises(InputError, match=message):
        made([axis])


def test_settings_reach_into_the_tables_of_all_algorithms():
    settings = ["algorithm.local.clip=1.0", "algorithm.lr.factor=0.5"]
    with pytest.raises(InputError, match="lr is a value"):
        apply_settings(NESTED, settings)
    table = {**NESTED, "algorithm": [NESTED["algorithm"][0], NESTED["algorithm"][2]]}
    plain, around = (entry.build() for entry in Experiment.of(apply_settings(table, settings)).algorithm)
    assert (plain.local, around.local) == (fg.SGD(clip=1.0), fg.SGD(momentum=0.5, clip=1.0))
    assert plain.lr == around.lr == fg.schedule.Exponential(0.1, 0.5)


def test_the_best_point_of_a_nested_axis_is_written_as_an_experiment():
    best = with_setting(NESTED["algorithm"][0], {"local.momentum": 0.9, "lr.factor": 0.5}, NESTED["lr"])
    built = Experiment.of({**NESTED, "algorithm": [best]}).algorithm[0].build()
    assert built == fg.FedAvg(lr=fg.schedule.Exponential(0.1, 0.5), local=fg.SGD(momentum=0.9))
    assert NESTED["lr"]["factor"] == 0.9
