"""Recipes of the paper: records, verdicts, tables, and one of them on real data."""

import json
import tomllib
from pathlib import Path

import pytest

from fedagrac.cli.app import main
from fedagrac.data.locating import locate
from fedagrac.paper import RECIPES, Records, Trial, TrialRecord, run_trials, table1, table_models, table_variance
from fedagrac.paper.page import page
from fedagrac.paper.recipe import compare_rounds
from fedagrac.paper.runner import Deadline, run_simulations

ROOT = Path(__file__).parents[2]
TARGETS = ROOT.parent / "shared" / "paper" / "targets.toml"


def outcome(rounds, reached, finished=True):
    return {"rounds": rounds, "rounds_to_target": reached, "finished": finished, "best": 0.5}


def test_a_record_belongs_to_its_settings(tmp_path):
    records = Records(tmp_path)
    trial = Trial("a/b c", {"lr": 0.1, "data": {"name": "x"}})
    assert records.get("table1", trial) is None
    records.put("table1", trial, outcome(3, 2), {"torch": "2"})
    found = records.get("table1", Trial("a/b c", {"data": {"name": "x"}, "lr": 0.1}))  # the order does not matter
    assert found.outcome["rounds_to_target"] == 2
    assert records.get("table1", Trial("a/b c", {"lr": 0.2, "data": {"name": "x"}})) is None
    records.path("table1", trial).write_text('{"trial": ')
    assert records.get("table1", trial) is None


def test_what_is_recorded_is_not_run_again_and_what_was_cut_off_is(tmp_path):
    records, ran = Records(tmp_path), []
    trials = [Trial(name, {"name": name}) for name in "abc"]
    records.put("r", trials[0], outcome(5, 5), {})
    records.put("r", trials[1], outcome(5, None, finished=False), {})

    def run(group, deadline):
        ran.extend(settings["name"] for settings in group)
        return [outcome(9, 9) for _ in group]

    assert run_trials("r", trials, records, run)
    assert ran == ["b", "c"]
    assert run_trials("r", trials, records, run)
    assert ran == ["b", "c"]
    assert [records.get("r", trial).outcome["rounds"] for trial in trials] == [5, 9, 9]


def test_the_time_budget_ends_cleanly(tmp_path):
    records = Records(tmp_path)
    trials = [Trial(name, {"name": name}) for name in "ab"]

    def run(group, deadline):
        return [outcome(4, None, finished=False) for _ in group]  # the clock ran out in the middle

    assert not run_trials("r", trials, records, run, time_budget=1000)
    assert not records.get("r", trials[0]).finished
    nothing = Records(tmp_path / "new")
    assert not run_trials("r", trials, nothing, run, time_budget=-1)
    assert nothing.get("r", trials[0]) is None


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ((56, 56), (83, 83), "holds"),
        ((83, 83), (56, 56), "does not hold"),
        ((55, 55), (55, 55), "does not hold"),
        ((56, 56), (200, None), "holds"),
        ((200, None), (56, 56), "does not hold"),
        ((200, None), (200, None), "not decided"),
        ((56, 56), (30, None), "not decided"),  # the other was cut off before it could have lost
        ((30, None), (56, 56), "not decided"),
    ],
)
def test_verdicts(a, b, verdict):
    runs = [TrialRecord("x", {}, outcome(*numbers), {}) for numbers in (a, b)]
    assert compare_rounds("fewer", *runs).verdict == verdict
    assert compare_rounds("fewer", None, runs[1]).verdict == "not decided"


@pytest.mark.skipif(not TARGETS.exists(), reason="the paper's figures as data are not beside this checkout")
def test_the_papers_figures():
    targets = tomllib.loads(TARGETS.read_text())

    def numbers(values):
        return tuple(None if value == float("inf") else value for value in values)

    columns = ("neither", "step_async", "non_iid", "both")
    for row, ours in table1.PAPER.items():
        assert numbers(targets["table1"][row][column] for column in columns) == ours
    for row, ours in table_variance.PAPER.items():
        name = f"{row.replace('-', '_')}_{table_variance.TARGETS[row] * 100:.0f}"
        for column, figures in ours.items():
            assert numbers(targets["table_variance"][name][column.replace("-", "_")]) == figures
    for name in ("alexnet", "vgg19"):
        theirs = targets[f"table_{name}"]
        assert table_models.PAPER[name] == (theirs["conv"], theirs["dense"], theirs["total_millions"])


def test_every_recipe_has_settings_at_every_scale():
    for recipe in RECIPES.values():
        for scale in ("quick", "medium", "paper"):
            trials = recipe.trials(scale)
            assert len({trial.name for trial in trials}) == len({trial.key for trial in trials}) == len(trials)
            assert recipe.table({}, scale).columns
            assert recipe.run is not None or not trials
        assert all(v.verdict == "not decided" for v in recipe.claims({})) or recipe.run is None
        assert recipe.assumptions


def test_the_page_in_the_docs_is_that_of_the_records():
    assert (ROOT / "docs" / "reproduction.md").read_text() == page(Records(ROOT / "docs" / "reproduction"))


@pytest.mark.skipif(locate("fashion-mnist") is None, reason="Fashion-MNIST is not here: fedagrac data fetch")
def test_table1_cut_down_on_real_data(tmp_path, capsys):
    """Equal data: logistic regression reaches 76 % (round 7). The second call runs nothing."""
    for _ in range(2):
        with pytest.raises(SystemExit) as done:
            main(["reproduce", "table1", "--only", "lr/neither", "--out", str(tmp_path / "kept"), "--json"])
        assert done.value.code == 0
        (printed,) = json.loads(capsys.readouterr().out)
        ours = printed["table"][0]["lr to 76% ours / paper"]
        assert ours.endswith("/ 2")
        assert int(ours.split()[0]) in range(5, 11)
    assert len(list((tmp_path / "kept").rglob("*.json"))) == 1
    assert {claim["verdict"] for claim in printed["claims"]} == {"not decided"}


def test_wrong_names_are_said(capsys):
    for arguments in (["tabel1"], ["table1", "--scale", "big"], ["table1", "--time-budget", "0"]):
        with pytest.raises(SystemExit) as done:
            main(["reproduce", *arguments])
        assert done.value.code == 2
        assert "expected" in capsys.readouterr().err


def test_cells_that_differ_in_the_algorithm_alone_run_side_by_side(tmp_path):
    asked = []

    def settings(model, lr, seed=0):
        return {"model": {"name": model}, "algorithm": {"name": "fedavg", "lr": lr}, "seed": seed}

    def run(group, deadline):
        asked.append([one["algorithm"]["lr"] for one in group])
        deadline.seen()
        return [outcome(2, None) for _ in group]

    trials = [Trial(f"lr{i}", settings("logistic", i, seed=i % 2)) for i in range(5)]
    trials += [Trial(f"alexnet{i}", settings("alexnet", i)) for i in range(2)]
    seen = []
    assert run_trials("r", trials, Records(tmp_path), run, seen=lambda: seen.append(1))
    assert asked == [[0, 2, 4], [1, 3], [0], [1]]  # large models one after another
    assert len(seen) == 4
    records = Records(tmp_path)
    assert [records.get("r", trial).outcome["together"] for trial in trials] == [3, 2, 3, 2, 3, 1, 1]


@pytest.mark.skipif(locate("a9a") is None, reason="a9a is not here: fedagrac data fetch")
def test_a_grid_from_plain_settings():
    """Two settings side by side, one with a schedule; the one cut off by the clock says so."""
    base = {
        "data": {"name": "a9a", "clients": 4, "partition": {"kind": "dirichlet", "alpha": 0.3}, "seed": 0},
        "model": {"name": "logistic", "features": 123, "classes": 2},
        "steps": {"kind": "linear", "first": 2, "increment": 3},
        "batch_size": 20,
        "rounds": 3,
        "seed": 0,
        "target": 0.99,
    }
    grid = [
        {**base, "algorithm": {"name": "fedagrac", "lr": 0.01, "calibration": {"0": 0.1, "2": 1.0}}},
        {**base, "algorithm": {"name": "fedprox", "lr": 0.01, "mu": 0.1}},
    ]
    together = run_simulations(grid, Deadline(None))
    alone = [run_simulations([settings], Deadline(None))[0] for settings in grid]
    for one, other in zip(together, alone, strict=True):
        assert one["rounds"] == 3
        assert one["finished"]
        assert one["rounds_to_target"] is None
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-3)  # kept to four digits
    assert together[0]["train_loss"] != together[1]["train_loss"]
    cut = run_simulations(grid, Deadline(0.0))
    assert [(o["rounds"], o["finished"]) for o in cut] == [(1, False), (1, False)]
