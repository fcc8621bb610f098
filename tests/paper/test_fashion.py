"""Recipes on Fashion-MNIST: Table 1, the figure of lambda and the figure of estimators."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

import fedagrac as fg
from fedagrac.data.locating import locate
from fedagrac.paper import RECIPES, TrialRecord, figure_estimators, figure_lambda, table1
from fedagrac.paper.runner import Deadline, run_simulations

ROOT = Path(__file__).parents[2]
TARGETS = ROOT.parent / "shared" / "paper" / "targets.toml"
LAMBDA, ESTIMATORS, TABLE1 = RECIPES["figure-lambda"], RECIPES["figure-estimators"], RECIPES["table1"]
needs_data = pytest.mark.skipif(
    locate("fashion-mnist") is None, reason="Fashion-MNIST is not here: fedagrac data fetch"
)


def record(final, finished=True, status="finished", seed=None):
    outcome = {"final": final, "accuracy": [final / 2, final], "rounds": 2, "finished": finished, "status": status}
    return TrialRecord("x", {} if seed is None else {"seed": seed}, outcome, {})


def made(recipe, value, seeds=6):
    """Records of a recipe with more seeds than it runs; value gives the final accuracy by name and seed."""
    firsts = [trial.name.removesuffix("0") for trial in recipe.trials("paper") if trial.settings["seed"] == 0]
    return {f"{n}{seed}": record(value(f"{n}{seed}", seed), seed=seed) for n in firsts for seed in range(seeds)}


def verdict(recipe, records, words):
    (one,) = [v for v in recipe.claims(records) if words in v.claim]
    return one


def test_table1_has_all_readings():
    trials = {trial.name: trial.settings for trial in TABLE1.trials("paper")}
    assert len(trials) == 4 * 3 * (3 + 10 + 10) + 2 * 3 * (10 + 10)
    one = trials["cnn/dirichlet-0.1/linear/seed2"]
    assert one["data"] == {
        "seed": 1234, "name": "fashion-mnist", "clients": 10,
        "partition": {"kind": "dirichlet", "alpha": 0.1, "balance": True, "least": 10},
    }  # fmt: skip
    assert (one["seed"], one["algorithm"]) == (2, {"name": "fedavg", "lr": 0.03})
    assert (one["target"], one["rounds"], one["smooth"]) == (0.8, 1000, 5)
    steps = {kind: trials[f"lr-0.01/shards-2/{kind}/seed9"]["steps"] for kind in ("constant", "linear", "uniform")}
    assert steps == {
        "constant": {"kind": "constant", "steps": 100},
        "linear": {"kind": "linear", "first": 250, "increment": 150},
        "uniform": {"kind": "uniform", "lo": 100, "hi": 400, "mode": "fixed"},
    }
    assert fg.Linear(250, 150).counts(0, 10, 0).tolist() == [100 + 150 * i for i in range(1, 11)]
    two, three = trials["lr-0.01/shards-2/uniform/seed9"], trials["lr-0.001/dirichlet-0.3/uniform/seed9"]
    assert two["data"]["partition"] == {"kind": "shards", "classes": 2}
    assert three["data"]["partition"] == {"kind": "dirichlet", "alpha": 0.3}
    assert two["data"]["seed"] == three["data"]["seed"] == 9  # drawn anew for every seed
    assert (two["algorithm"]["lr"], three["algorithm"]["lr"]) == (0.01, 0.001)


def test_table1_runs_logistic_regression_on_the_authors_own_split_and_on_redrawn_ones():
    trials = {trial.name: trial.settings for trial in TABLE1.trials("paper")}
    own, again = trials["lr-0.001/authors/uniform/seed9"], trials["lr-0.01/dirichlet-0.1-redrawn/linear/seed9"]
    assert own["data"]["partition"] == {"kind": "authors-dirichlet", "alpha": 0.1}
    assert (own["data"]["seed"], own["seed"], own["rounds"], own["smooth"]) == (1234, 9, 1000, 5)
    assert again["data"]["partition"] == {"kind": "dirichlet", "alpha": 0.1, "balance": True, "least": 10}
    assert again["data"]["seed"] == 9
    assert not [name for name in trials if name.startswith(("cnn/authors", "cnn/dirichlet-0.1-redrawn"))]


def test_table1_runs_the_authors_split_first():
    first = [trial.name for trial in TABLE1.trials("paper")][:3]
    assert first == [f"cnn/dirichlet-0.1/{kind}/seed0" for kind in ("constant", "linear", "uniform")]


def reached(trial, rounds):
    """A run whose mean over 5 rounds is at 80 % in this round, or never."""
    curve = [0.5] * 1000 if rounds is None else [0.72] * (rounds - 1) + [0.8] + [0.92] * 4
    return TrialRecord(trial.name, trial.settings, {"rounds": len(curve), "accuracy": curve, "finished": True}, {})


def test_the_table_and_verdicts_of_table1():
    rounds = {
        "cnn/iid/constant": 20, "cnn/iid/linear": 8, "cnn/dirichlet-0.1/constant": 260,
        "cnn/dirichlet-0.1/linear": 340, "cnn/dirichlet-0.1/uniform": 255, "lr-0.01/dirichlet-0.1/constant": None,
    }  # fmt: skip
    records = {}
    for trial in TABLE1.trials("paper"):
        row = trial.name.rpartition("/")[0]
        if row in rounds:
            slope = {"constant": 1, "linear": 2, "uniform": 0}[row.split("/")[2]] + 3 * ("iid" in row)
            records[trial.name] = reached(trial, rounds[row] and rounds[row] + slope * trial.settings["seed"])
    assert verdict(TABLE1, records, "cnn, eta 0.03: with equal data, K = 250").verdict == "holds"
    assert verdict(TABLE1, records, "cnn, eta 0.03: with equal data, K ~ Uni").verdict == "not decided"
    assert verdict(TABLE1, records, "cnn, eta 0.03, Dirichlet(0.1): unequal").verdict == "holds"
    assert verdict(TABLE1, records, "cnn, eta 0.03, Dirichlet(0.1): K = 250").verdict == "holds"
    assert verdict(TABLE1, records, "cnn, eta 0.03, Dirichlet(0.1): K ~ Uni").verdict == "does not hold"
    assert verdict(TABLE1, records, "cnn, eta 0.03, Dirichlet(0.3): unequal").verdict == "not decided"
    rows = {row[:2]: row[2:] for row in TABLE1.table(records, "paper").rows}
    assert rows["Dirichlet(0.1)", "K = 250 to 1600"] == (
        "342.0 +- 5.0 (3 seeds) / 339", "- / > 1000", "- / > 1000",
    )  # fmt: skip
    assert rows["Dirichlet(0.1)", "K = 100"][2] == "> 1000 (10 seeds) / 91"
    assert rows["iid", "K = 100"] == ("24.0 +- 9.9 (3 seeds) / 20", "- / 2", "- / 2")
    assert rows["2 classes each", "K ~ Uniform(100, 400)"] == ("- / 339", "- / > 1000", "- / > 1000")


@pytest.mark.skipif(not TARGETS.exists(), reason="the paper's figures as data are not beside this checkout")
def test_the_papers_figures_of_lambda():
    theirs = tomllib.loads(TARGETS.read_text())["figure_lambda"]
    ours = {key.removeprefix("lambda="): value for key, value in figure_lambda.PAPER.items()}
    assert {key: value for key, (value, _) in ours.items()} == theirs["constant_steps"]
    assert {key: spread for key, (_, spread) in ours.items()} == theirs["plus_minus"]


def test_lambda_at_the_papers_counts():
    trials = {trial.name: trial.settings for trial in LAMBDA.trials("paper")}
    assert len(trials) == 3 * (9 + 9 + 8 + 9)
    assert all("init" not in settings["algorithm"] for settings in trials.values())  # from gradients
    one = trials["constant/fedagrac/increase/seed2"]
    assert one["algorithm"]["calibration"] == {"0": 0.1, "50": 0.5, "150": 1.0}
    assert (one["rounds"], one["seed"], one["data"]["seed"], one["algorithm"]["lr"]) == (200, 2, 1234, 0.03)
    assert one["data"]["partition"] == {"kind": "dirichlet", "alpha": 0.1, "balance": True, "least": 10}
    assert one["steps"] == {"kind": "constant", "steps": 100}
    text = trials["linear/fedagrac-text/lambda=0.05/seed0"]
    assert text["algorithm"]["first_steps"] == 1
    assert text["steps"] == {"kind": "linear", "first": 250, "increment": 150}
    assert trials["uniform/fedagrac/lambda=1/seed0"]["steps"]["kind"] == "uniform"
    quick = {trial.name: trial.settings for trial in LAMBDA.trials("quick")}
    assert quick["linear/fedagrac/increase/seed0"]["algorithm"] == {
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
    records = made(LAMBDA, lambda name, seed: peaks.get(name.split("/")[2], 0.70) + 0.001 * seed)
    assert {v.verdict for v in LAMBDA.claims(records)} == {"holds"}
    assert "best: lambda=0.05" in verdict(LAMBDA, records, "better than lambda=0").numbers
    rows = {row[0]: row for row in LAMBDA.table(records, "paper").rows}
    assert rows["lambda=0.05"] == (
        "lambda=0.05",
        "80.25 +- 0.20 (6 seeds) / 78.23 +- 0.5",
        *["80.25 +- 0.20 (6 seeds)"] * 3,
    )
    assert rows["lambda=0"][3] == "70.25 +- 0.20 (6 seeds)"  # the text's reading has no run of its own

    rising = made(LAMBDA, lambda name, seed: 0.9 if "lambda=1/" in name else 0.5 if "=0.001" in name else 0.6)
    against = {v.claim: v.verdict for v in LAMBDA.claims(rising)}
    assert against.pop("constant steps: lambda 0.05 or 0.1 is better than lambda=0") == "not decided"  # level
    assert set(against.values()) == {"does not hold"}

    noisy = made(LAMBDA, lambda name, seed: 0.7 + (0.02 * seed if "increase" in name else 0.04))
    assert verdict(LAMBDA, noisy, "Increase is best").verdict == "not decided"
    del records["constant/fedagrac/lambda=1/seed0"]
    assert verdict(LAMBDA, records, "Increase is best").verdict == "holds"  # the other seeds are left
    few = made(LAMBDA, lambda name, seed: peaks.get(name.split("/")[2], 0.70) + 0.001 * seed, seeds=3)
    assert verdict(LAMBDA, few, "Increase is best").verdict == "not decided"  # one of three seeds chose
    for seed in range(6):
        del records[f"linear/fedagrac/lambda=1/seed{seed}"]
    assert verdict(LAMBDA, records, "K = 250 to 1600: lambda=1").verdict == "not decided"
    assert verdict(LAMBDA, records, "K = 250 to 1600: a lambda between").verdict == "not decided"


def test_the_picture_of_lambda():
    records = made(LAMBDA, lambda name, seed: 0.7 + 0.01 * seed)
    left, right = LAMBDA.picture(records, "paper").axes
    assert {t.get_text() for t in left.get_legend().get_texts()} == {
        "paper", "paper: Increase", "ours", "ours: Increase",
    }  # fmt: skip
    assert len(right.get_legend().get_texts()) == 6
    assert left.get_ylabel() == "test accuracy after 200 rounds (%)"
    alone, empty = LAMBDA.picture({}, "quick").axes
    assert len(alone.get_legend().get_texts()) == 2
    assert empty.get_legend() is None


def test_estimators_at_the_papers_counts():
    trials = {trial.name: trial.settings for trial in ESTIMATORS.trials("paper")}
    assert len(trials) == 3 * (2 * (6 + 7 + 7) + 5)
    lr, cnn = trials["lr-linear/fedagrac-first/one/seed1"], trials["cnn-constant/fedagrac-reverse/epoch/seed0"]
    assert lr["algorithm"] == {"lr": 0.001, "name": "fedagrac-first", "calibration": 1.0, "first_steps": 1}
    assert cnn["algorithm"] == {
        "lr": 0.03, "name": "fedagrac-reverse", "calibration": 0.05, "first_steps": "epoch",
    }  # fmt: skip
    assert lr["rounds"] == cnn["rounds"] == 200
    assert "lr-constant/fedagrac/one/seed0" not in trials  # nobody is fast: the same as with the epoch's


def test_the_panel_of_the_authors_code_comes_last_and_only_at_the_papers_counts():
    trials = ESTIMATORS.trials("paper")[-15:]
    assert {trial.name.split("/")[0] for trial in trials} == {"authors-lr"}
    assert not any("authors" in t.name for scale in ("quick", "medium") for t in ESTIMATORS.trials(scale))
    first, one = trials[0].settings, trials[4].settings
    assert first["data"] == {
        "name": "fashion-mnist", "clients": 10, "seed": 1234,
        "partition": {"kind": "authors-dirichlet", "alpha": 0.1},
    }  # fmt: skip
    assert first["sampling"] == one["sampling"] == "cyclic"
    assert first["steps"] == {"kind": "explicit", "table": [[243, 337, 125, 160, 385, 243, 176, 295, 183, 397]]}
    assert first["algorithm"] == {
        "lr": 0.001, "name": "fedagrac", "calibration": 1.0, "first_steps": "pass", "init": "zeros",
    }  # fmt: skip
    assert one["algorithm"] == {"lr": 0.001, "name": "scaffold", "option": "I"}


def test_verdicts_of_estimators():
    ahead = made(ESTIMATORS, lambda name, seed: 0.8 if "fedagrac/" in name else 0.795)
    assert {v.verdict for v in ESTIMATORS.claims(ahead)} == {"holds"}
    numbers = verdict(ESTIMATORS, ahead, "lr-constant, first epoch's").numbers
    assert numbers.startswith("the farthest apart: 80.00 against 79.50: difference 0.50 [")
    behind = made(ESTIMATORS, lambda name, seed: 0.6 if "fedagrac/" in name else 0.8)
    assert {v.verdict for v in ESTIMATORS.claims(behind)} == {"does not hold"}
    noisy = made(ESTIMATORS, lambda name, seed: 0.7 + (0.05 * seed if "fedagrac/" in name else 0.04))
    assert verdict(ESTIMATORS, noisy, "cnn-constant, one step's").verdict == "not decided"
    assert verdict(
        ESTIMATORS, noisy, "lr-linear, one step's gradient: FedaGrac is ahead of fedagrac-avg"
    ).verdict == ("not decided")
    ahead = {name: one for name, one in ahead.items() if "fedagrac-avg" not in name}
    for words in (
        "cnn-constant, one step's",
        "cnn-linear, one step's gradient: FedaGrac is ahead of fedagrac-avg",
    ):
        assert verdict(ESTIMATORS, ahead, words).verdict == "not decided"
    rows = {row[:2]: row[2:] for row in ESTIMATORS.table(ahead, "paper").rows}
    assert rows["cnn-linear", "one step's gradient"] == (
        "80.00 +- 0.00 (6 seeds)",
        "-",
        *["79.50 +- 0.00 (6 seeds)"] * 2,
        "",
    )
    assert rows["authors-lr", "authors' code"] == (
        "80.00 +- 0.00 (6 seeds)",
        "-",
        *["79.50 +- 0.00 (6 seeds)"] * 3,
    )


def test_the_picture_of_estimators():
    records = made(ESTIMATORS, lambda name, seed: 0.7 + 0.01 * seed)
    figure = ESTIMATORS.picture(records, "paper")
    assert [len(axes.get_lines()) for axes in figure.axes] == [4] * 12
    assert figure.axes[3].get_title() == "2-layer CNN\nK = 250 to 1600"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(figure_estimators.ALGORITHMS)
    assert [len(axes.get_lines()) for axes in ESTIMATORS.picture({}, "quick").axes] == [0] * 12


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
@pytest.mark.parametrize(
    "name",
    [
        "lr-linear/fedagrac/epoch/seed0",
        "cnn-constant/fedagrac-first/one/seed0",
        "authors-lr/fedagrac/pass/seed0",
        "authors-lr/scaffold-one/pass/seed0",
    ],
)
def test_one_round_of_estimators_on_real_data(name):
    trials = [*ESTIMATORS.trials("quick"), *ESTIMATORS.trials("paper")]
    settings = next(trial.settings for trial in trials if trial.name == name)
    (outcome,) = run_simulations([{**settings, "rounds": 1}], Deadline(None))
    assert outcome["rounds"] == len(outcome["accuracy"]) == 1
    assert outcome["final"] > 0.11  # better than guessing


@needs_data
def test_increase_runs_on_real_data():
    settings = next(c.settings for c in LAMBDA.trials("quick") if c.name == "linear/fedagrac/increase/seed0")
    (outcome,) = run_simulations([{**settings, "rounds": 1}], Deadline(None))
    assert outcome["status"] == "finished"
    assert outcome["rounds_to_target"] is None


def test_table1_says_its_target():
    assert TABLE1.table({}, "paper").columns[2:] == (
        "cnn eta 0.03 to 80% ours / paper",
        "lr eta 0.001 to 80% ours / paper",
        "lr eta 0.01 to 80% ours / paper",
    )
    assert {trial.settings["target"] for trial in TABLE1.trials("quick")} == {
        target for _, _, target in table1.COUNTS["quick"].values()
    }
