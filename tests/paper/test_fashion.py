"""Recipes on Fashion-MNIST: Table 1, the figure of lambda and the figure of estimators."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

import fedagrac as fg
from fedagrac.data.locating import locate
from fedagrac.paper import RECIPES, Records, TrialRecord, figure_estimators, figure_lambda, records_of, table1
from fedagrac.paper.grid import GridPoint, compare_means
from fedagrac.paper.runner import Deadline, run_simulations

ROOT = Path(__file__).parents[2]
TARGETS = ROOT.parent / "shared" / "paper" / "targets.toml"
LAMBDA, ESTIMATORS, TABLE1 = RECIPES["figure-lambda"], RECIPES["figure-estimators"], RECIPES["table1"]
needs_data = pytest.mark.skipif(
    locate("fashion-mnist") is None, reason="Fashion-MNIST is not here: fedagrac data fetch"
)


def record(final, finished=True, status="finished"):
    outcome = {"final": final, "accuracy": [final / 2, final], "rounds": 2, "finished": finished, "status": status}
    return TrialRecord("x", {}, outcome, {})


def point(*finals, **options):
    return GridPoint("s", tuple(record(final, **options) for final in finals))


def made(recipe, value):
    """Records of a recipe at the paper's counts; value gives the final accuracy by the trial's name and seed."""
    return {trial.name: record(value(trial.name, trial.settings["seed"])) for trial in recipe.trials("paper")}


def verdict(recipe, found, words):
    (one,) = [v for v in recipe.claims(found) if words in v.claim]
    return one


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (point(0.80, 0.81), point(0.70, 0.71), "holds"),
        (point(0.70), point(0.80), "does not hold"),
        (point(0.80), point(0.80), "does not hold"),
        (point(0.80, 0.84), point(0.81, 0.81), "not decided"),  # closer than the spread
        (point(0.80, finished=False), point(0.70), "not decided"),
        (point(0.70), point(0.80, status="diverged"), "holds"),
        (point(0.70, status="diverged"), point(0.80, status="diverged"), "not decided"),
        (None, point(0.80), "not decided"),
    ],
)
def test_means_are_compared_with_their_spread(a, b, expected):
    assert compare_means("higher", a, b).verdict == expected


def test_the_records_of_table1_are_still_its_cells():
    found = records_of(TABLE1, "paper", Records(ROOT / "docs" / "reproduction"))
    kept = {json.loads(path.read_text())["trial"] for path in (ROOT / "docs/reproduction/table1").glob("*.json")}
    assert {"lr/neither", "lr/step-async", "lr/non-iid", "lr/both"} <= kept
    assert set(found) == kept


def test_table1_has_all_readings_of_unequal_data():
    trials = {trial.name: trial.settings for trial in TABLE1.trials("paper")}
    assert len(trials) == 16
    for row, rate in (("lr", 0.001), ("cnn", 0.03)):
        for column in ("non-iid", "both"):
            one, two = trials[f"{row}/{column}"], trials[f"{row}/{column}-dp2"]
            assert trials[f"{row}/{column}-two"]["data"]["partition"] == {"kind": "shards", "classes": 2}
            assert one["data"]["partition"] == {"kind": "dirichlet", "alpha": 0.3}
            assert two["data"]["partition"] == {"kind": "shards", "classes": 5}
            assert {**one, "data": None} == {**two, "data": None}
            assert one["algorithm"] == {"name": "fedavg", "lr": rate}
            assert (one["target"], one["rounds"]) == (0.8, 1000)
    assert trials["lr/both"]["steps"] == {"kind": "linear", "first": 100, "increment": 150}

    def reached(rounds):
        return TrialRecord("x", {}, {"rounds": 9, "rounds_to_target": rounds, "finished": True}, {})

    found = {"cnn/neither": reached(2), "cnn/non-iid-dp2": reached(7), "cnn/both-dp2": reached(5)}
    assert verdict(TABLE1, found, "cnn, 5 classes each: unequal data").verdict == "holds"
    assert verdict(TABLE1, found, "cnn, 5 classes each: with unequal").verdict == "does not hold"
    assert verdict(TABLE1, found, "cnn, Dirichlet(0.3): unequal").verdict == "not decided"
    rows = {row[0]: row[1:] for row in TABLE1.table(found, "paper").rows}
    assert rows["non-iid-dp2"] == ("5 classes each", "no", "- / 91", "7 / 265")
    assert rows["non-iid"] == ("Dirichlet(0.3)", "no", "- / 91", "- / 265")
    assert rows["both-two"] == ("2 classes each", "yes", "- / > 1000", "- / 339")
    assert rows["neither"][:2] == ("iid", "no")


@pytest.mark.skipif(not TARGETS.exists(), reason="the paper's figures as data are not beside this checkout")
def test_the_papers_figures_of_lambda():
    theirs = tomllib.loads(TARGETS.read_text())["figure_lambda"]
    ours = {key.removeprefix("lambda="): value for key, value in figure_lambda.PAPER.items()}
    assert {key: value for key, (value, _) in ours.items()} == theirs["constant_steps"]
    assert {key: spread for key, (_, spread) in ours.items()} == theirs["plus_minus"]


def test_lambda_at_the_papers_counts():
    trials = {trial.name: trial.settings for trial in LAMBDA.trials("paper")}
    assert len(trials) == 9 * 3 + 9 + 8
    assert all("init" not in settings["algorithm"] for settings in trials.values())  # from gradients
    one = trials["constant/fedagrac/increase/seed2"]
    assert one["algorithm"]["calibration"] == {"0": 0.1, "50": 0.5, "150": 1.0}
    assert (one["rounds"], one["seed"], one["data"]["seed"], one["algorithm"]["lr"]) == (200, 2, 2, 0.03)
    assert one["steps"] == {"kind": "constant", "steps": 100}
    text = trials["async/fedagrac-text/lambda=0.05/seed0"]
    assert text["algorithm"]["first_steps"] == 1
    assert text["steps"] == {"kind": "linear", "first": 100, "increment": 150}
    quick = {trial.name: trial.settings for trial in LAMBDA.trials("quick")}
    assert quick["async/fedagrac/increase/seed0"]["algorithm"] == {
        "lr": 0.03, "name": "fedagrac", "calibration": {"0": 0.1, "2": 0.5, "6": 1.0}, "first_steps": 9,
        "init": "zeros",
    }  # fmt: skip


@pytest.mark.parametrize("recipe", [LAMBDA, ESTIMATORS], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("scale", ["quick", "medium", "paper"])
def test_runs_of_a_panel_and_seed_differ_by_the_algorithm_alone(recipe, scale):
    panels = {}
    for trial in recipe.trials(scale):
        rest = json.dumps({**trial.settings, "algorithm": None}, sort_keys=True)
        panels.setdefault((trial.name.split("/")[0], trial.settings["seed"]), set()).add(rest)
    assert {len(settings) for settings in panels.values()} == {1}


def test_verdicts_of_lambda():
    peaks = {"lambda=0.05": 0.80, "lambda=0.1": 0.79, "increase": 0.85, "lambda=1": 0.60}
    found = made(LAMBDA, lambda name, seed: peaks.get(name.split("/")[2], 0.70) + 0.001 * seed)
    assert {v.verdict for v in LAMBDA.claims(found)} == {"holds"}
    assert "best: lambda=0.05" in verdict(LAMBDA, found, "better than lambda=0").numbers
    rows = {row[0]: row for row in LAMBDA.table(found, "paper").rows}
    assert rows["lambda=0.05"] == ("lambda=0.05", "80.10 +- 0.10 / 78.23 +- 0.5", "80.00", "80.00")
    assert rows["lambda=0"][3] == "70.00"  # the text's reading has no run of its own

    rising = made(LAMBDA, lambda name, seed: 0.9 if "lambda=1/" in name else 0.5 if "=0.001" in name else 0.6)
    against = [v.verdict for v in LAMBDA.claims(rising)]
    assert against == ["does not hold"] * len(against)

    noisy = made(LAMBDA, lambda name, seed: 0.7 + 0.05 * seed + 0.01 * ("increase" in name))
    assert verdict(LAMBDA, noisy, "Increase is best").verdict == "not decided"
    del found["constant/fedagrac/lambda=1/seed0"]
    assert verdict(LAMBDA, found, "Increase is best").verdict == "holds"  # two seeds are left
    del found["async/fedagrac/lambda=1/seed0"]
    assert verdict(LAMBDA, found, "step async: lambda=1").verdict == "not decided"
    assert verdict(LAMBDA, found, "step async: a lambda between").verdict == "not decided"


def test_the_picture_of_lambda():
    found = made(LAMBDA, lambda name, seed: 0.7 + 0.01 * seed)
    left, right = LAMBDA.picture(found, "paper").axes
    assert {t.get_text() for t in left.get_legend().get_texts()} == {
        "paper", "paper: Increase", "ours", "ours: Increase",
    }  # fmt: skip
    assert len(right.get_legend().get_texts()) == 4
    assert left.get_ylabel() == "test accuracy after 200 rounds (%)"
    alone, empty = LAMBDA.picture({}, "quick").axes
    assert len(alone.get_legend().get_texts()) == 2
    assert empty.get_legend() is None


def test_estimators_at_the_papers_counts():
    trials = {trial.name: trial.settings for trial in ESTIMATORS.trials("paper")}
    assert len(trials) == 3 * (6 + 6 + 7) + 7
    lr, cnn = trials["lr-async/fedagrac-first/one/seed1"], trials["cnn-constant/fedagrac-reverse/epoch/seed0"]
    assert lr["algorithm"] == {"lr": 0.001, "name": "fedagrac-first", "calibration": 1.0, "first_steps": 1}
    assert cnn["algorithm"] == {
        "lr": 0.03, "name": "fedagrac-reverse", "calibration": 0.05, "first_steps": "epoch",
    }  # fmt: skip
    assert lr["rounds"] == cnn["rounds"] == 200
    assert "lr-constant/fedagrac/one/seed0" not in trials  # nobody is fast: the same as with the epoch's


def test_verdicts_of_estimators():
    ahead = made(ESTIMATORS, lambda name, seed: 0.8 if "fedagrac/" in name else 0.795)
    assert {v.verdict for v in ESTIMATORS.claims(ahead)} == {"holds"}
    assert verdict(ESTIMATORS, ahead, "lr-constant, first epoch's").numbers == "largest gap 0.50 points"
    behind = made(ESTIMATORS, lambda name, seed: 0.6 if "fedagrac/" in name else 0.8)
    assert {v.verdict for v in ESTIMATORS.claims(behind)} == {"does not hold"}
    noisy = made(ESTIMATORS, lambda name, seed: 0.7 + 0.05 * seed + 0.02 * ("fedagrac/" in name))
    assert verdict(ESTIMATORS, noisy, "cnn-constant, one step's").verdict == "not decided"
    assert verdict(
        ESTIMATORS, noisy, "lr-async, one step's gradient: FedaGrac is ahead of fedagrac-avg"
    ).verdict == ("not decided")
    ahead = {name: one for name, one in ahead.items() if "fedagrac-avg" not in name}
    for words in ("cnn-constant, one step's", "cnn-async, one step's gradient: FedaGrac is ahead of fedagrac-avg"):
        assert verdict(ESTIMATORS, ahead, words).verdict == "not decided"
    rows = {row[:2]: row[2:] for row in ESTIMATORS.table(ahead, "paper").rows}
    assert rows["cnn-async", "one step's gradient"] == ("80.00", "-", "79.50", "79.50")


def test_the_picture_of_estimators():
    found = made(ESTIMATORS, lambda name, seed: 0.7 + 0.01 * seed)
    figure = ESTIMATORS.picture(found, "paper")
    assert [len(axes.get_lines()) for axes in figure.axes] == [4] * 8
    assert figure.axes[3].get_title() == "2-layer CNN, step async"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(figure_estimators.ALGORITHMS)
    assert [len(axes.get_lines()) for axes in ESTIMATORS.picture({}, "quick").axes] == [0] * 8


def test_which_estimates_are_one_algorithm():
    """What the recipes take for granted where they leave runs out, on a small federation in float64."""
    fed = fg.Federation.load("digits", clients=4, partition=fg.Dirichlet(0.3), seed=0)
    model = fg.models.build("logistic", features=64, classes=10).double()

    def end(name, steps, **options):
        chosen = fg.algorithm(name, lr=0.05, **options)
        return fg.simulate(model, fed, chosen, rounds=3, steps=steps, batch_size=5, engine="serial").vector.numpy()

    constant, uneven = fg.Constant(6), fg.Linear(2, 30)
    assert min(fed.sizes) > 6 * 5  # every local epoch is longer than the round
    one = end("fedagrac", constant)
    for name in figure_estimators.ALGORITHMS:
        assert end(name, constant) == pytest.approx(one, abs=1e-12)
    assert np.array_equal(end("fedagrac", constant, first_steps=1), one)
    assert np.array_equal(end("fedagrac-avg", uneven, first_steps=1), end("fedagrac-avg", uneven))
    assert np.array_equal(end("fedagrac", uneven, calibration=0.0), end("fedavg", uneven))
    for name in ("fedagrac", "fedagrac-first", "fedagrac-reverse"):  # and where it does matter
        assert abs(end(name, uneven, first_steps=1) - end(name, uneven, first_steps=2)).max() > 1e-6
    assert abs(end("fedagrac-first", constant, first_steps=1) - one).max() > 1e-6


@needs_data
@pytest.mark.parametrize("name", ["lr-async/fedagrac/epoch/seed0", "cnn-constant/fedagrac-first/one/seed0"])
def test_one_round_of_estimators_on_real_data(name):
    settings = next(trial.settings for trial in ESTIMATORS.trials("quick") if trial.name == name)
    (outcome,) = run_simulations([{**settings, "rounds": 1}], Deadline(None))
    assert outcome["rounds"] == len(outcome["accuracy"]) == 1
    assert outcome["final"] > 0.11  # better than guessing


@needs_data
def test_increase_runs_on_real_data():
    settings = next(c.settings for c in LAMBDA.trials("quick") if c.name == "async/fedagrac/increase/seed0")
    (outcome,) = run_simulations([{**settings, "rounds": 1}], Deadline(None))
    assert outcome["status"] == "finished"
    assert outcome["rounds_to_target"] is None


def test_table1_says_its_target():
    assert TABLE1.table({}, "paper").columns[3:] == ("lr to 80% ours / paper", "cnn to 80% ours / paper")
    assert {trial.settings["target"] for trial in TABLE1.trials("quick")} == {
        target for _, _, target in table1.COUNTS["quick"].values()
    }
