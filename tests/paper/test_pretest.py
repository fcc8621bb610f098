"""The figure of the pretest: the problem, how paths are measured, verdicts, and real runs (they take a second)."""

import numpy as np
import pytest

from fedagrac.paper import RECIPES, TrialRecord, figure_pretest
from fedagrac.paper.figure_pretest import ALGORITHMS, PROBLEMS, Trip, run_path
from fedagrac.paper.runner import Deadline

RECIPE = RECIPES["figure-pretest"]
GOALS = {panel: figure_pretest.minimiser(problem) for panel, problem in PROBLEMS.items()}


def made_up(turn, names=tuple(ALGORITHMS)):
    """Every path goes to its minimiser in two legs; turn says how far aside the first one ends, by algorithm."""
    records = {}
    for trial in RECIPE.trials("quick"):
        panel, name = trial.name.split("-start")[0], trial.name.split("/")[1]
        start, goal = np.array(trial.settings["start"]), GOALS[panel]
        way = goal - start
        middle = start + way / 2 + turn.get(name, 0.0) * np.array([-way[1], way[0]])
        if name in names:
            records[trial.name] = TrialRecord(
                trial.name, {}, {"path": [start.tolist(), middle.tolist(), goal.tolist()]}, {}
            )
    return records


def verdicts(records):
    return {v.claim: v for v in RECIPE.claims(records)}


@pytest.mark.parametrize("panel", PROBLEMS)
def test_the_minimiser_is_that_of_least_squares(panel):
    clients = figure_pretest.client_points(PROBLEMS[panel])
    x, y = np.concatenate([x for x, _ in clients]), np.concatenate([y for _, y in clients])
    assert GOALS[panel] == pytest.approx(np.polyfit(x, y, 1))
    for (x, y), a, b in zip(clients, PROBLEMS[panel]["slopes"], PROBLEMS[panel]["intercepts"], strict=True):
        assert np.polyfit(x, y, 1) == pytest.approx([a, b], abs=0.25)  # noise 0.3 in 40 points


def test_a_path_is_measured_in_parts_of_its_way():
    around = Trip.of(np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 5.0]]), np.array([1.0, 5.0]))
    assert (around.left, around.off, around.past) == (0, 0, 0)
    past = Trip.of(np.array([[0.0, 0.0], [5.0, 0.0], [4.0, 1.0]]), np.array([4.0, 0.0]))
    assert (past.left, past.off, past.past, past.stray) == pytest.approx((0.25, 0.25, 0.25, 0.25))


def test_the_claim_holds_where_only_fedagrac_is_straight():
    said = verdicts(made_up(dict.fromkeys(ALGORITHMS, 0.2) | {"fedagrac": 0.01}))
    assert {v.verdict for v in said.values()} == {"holds"}
    assert "20.00% off" in said["same-x: fednova does not keep the direction to the minimiser"].numbers


def test_the_claim_does_not_hold_where_another_is_straight_too():
    said = verdicts(made_up(dict.fromkeys(ALGORITHMS, 0.2) | {"fedagrac": 0.01, "fedlin": 0.0}))
    only = said["shifted-x: of the five only FedaGrac keeps it"]
    assert (only.verdict, only.numbers) == ("does not hold", "kept by fedlin and fedagrac, all 8 starts")
    assert said["shifted-x: fedlin does not keep the direction to the minimiser"].verdict == "does not hold"


def test_one_missing_start_decides_nothing():
    paths = made_up({})
    del paths["same-x-start3/fedagrac"]
    said = verdicts(paths)
    assert said["same-x: fedagrac keeps the direction to the minimiser"].verdict == "not decided"
    assert said["same-x: of the five only FedaGrac keeps it"].verdict == "not decided"
    assert said["shifted-x: fedagrac keeps the direction to the minimiser"].verdict == "holds"
    rows = {row[:2]: row[2:] for row in RECIPE.table(paths, "quick").rows}
    assert rows["same-x", "fedagrac"] == ("-",) * 4
    assert rows["shifted-x", "fedagrac"] == ("0.00%",) * 4


def test_fedlin_moves_as_far_as_the_others():
    assert ALGORITHMS["fedlin"]["lr"] == pytest.approx(9 * ALGORITHMS["fedavg"]["lr"])  # Kbar of 2, 5, 20


def test_one_round_of_fedavg_is_that_of_numpy():
    trial = next(c for c in RECIPE.trials("quick") if c.name == "shifted-x-start0/fedavg")
    outcome = run_path({**trial.settings, "rounds": 1}, Deadline(None))
    models = []
    for (x, y), steps in zip(figure_pretest.client_points(trial.settings["problem"]), [2, 5, 20], strict=True):
        a, b = trial.settings["start"]
        for _ in range(steps):
            error = a * x + b - y
            a, b = a - 0.05 * 2 * (error * x).mean(), b - 0.05 * 2 * error.mean()
        models.append([a, b])
    assert outcome["path"][0] == trial.settings["start"]
    assert outcome["path"][1] == pytest.approx(np.mean(models, axis=0), rel=1e-7)


def test_fedagrac_arrives_and_fedavg_does_not():
    ends = {}
    for trial in RECIPE.trials("quick"):
        panel, name = trial.name.split("/")
        if panel == "same-x-start0" and name in ("fedavg", "fedagrac"):
            path = run_path(trial.settings, Deadline(None))["path"]
            ends[name] = Trip.of(np.array(path), GOALS["same-x"]).left
    assert ends["fedagrac"] < 1e-3
    assert ends["fedavg"] > 0.1


def test_the_picture_has_a_path_for_every_algorithm():
    figure = RECIPE.picture(made_up({"fedavg": 0.3}), "quick")
    for axes in figure.axes[2:]:
        assert len(axes.get_lines()) == len(ALGORITHMS)
    words = {text.get_text() for text in figure.axes[0].texts}
    assert {"global minimiser", "start", "client 3, K = 20"} <= words
    assert len(RECIPE.picture({}, "quick").axes[2].get_lines()) == 0
