"""F - F* of logistic regression, the map of fleets, partial participation, and recipes in several processes."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import fedagrac as fg
from fedagrac.data.locating import locate
from fedagrac.paper import RECIPES, Records, Trial, TrialRecord, records_of, trials_of
from fedagrac.paper.__main__ import main
from fedagrac.paper.gaps import Objective, run_gaps
from fedagrac.paper.overview import HEADLINES, blank_rows, cost, headline_rows
from fedagrac.paper.page import page
from fedagrac.paper.regime_map import Advantage, advantage, two_speeds
from fedagrac.paper.runner import Deadline

ROOT = Path(__file__).parents[2]
MAP, PARTIAL = RECIPES["regime-map"], RECIPES["participation"]
needs_a9a = pytest.mark.skipif(locate("a9a") is None, reason="a9a is not here: fedagrac data fetch")
needs_records = pytest.mark.skipif(
    not (ROOT / "reproduction").exists(), reason="the records are not part of the source distribution"
)


def torch_objective(x, inputs, targets, weight_decay):
    width = inputs.shape[1]
    output = inputs @ x[: 2 * width].reshape(2, width).T + x[2 * width :]
    return torch.nn.functional.cross_entropy(output, targets) + weight_decay / 2 * x @ x


def test_the_minimum_is_that_of_another_solver():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    targets = (inputs[:, 0] + torch.randn(60, generator=generator, dtype=torch.float64) > 0).long()
    ours = Objective(inputs.numpy(), targets.numpy(), 0.01)
    x = torch.randn(12, generator=generator, dtype=torch.float64, requires_grad=True)
    assert ours.value(x.detach().numpy()) == pytest.approx(
        torch_objective(x, inputs, targets, 0.01).item(), rel=1e-12
    )
    solver = torch.optim.LBFGS([x], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure():
        solver.zero_grad()
        loss = torch_objective(x, inputs, targets, 0.01)
        loss.backward()
        return loss

    solver.step(closure)
    assert ours.minimum == pytest.approx(closure().item(), abs=1e-9)
    with pytest.raises(fg.InputError, match="two classes"):
        Objective(inputs.numpy(), np.arange(60) % 3, 0.01)


@needs_a9a
def test_a_trial_keeps_the_gaps_of_plain_simulations():
    trial = MAP.trials("quick")[0]
    chosen = {name: trial.settings["algorithms"][name] for name in ("scaffold/full/0.1", "hybrid/full/epoch/0.1")}
    settings = {**trial.settings, "algorithms": chosen, "at": [1, 2]}
    outcome = run_gaps(settings, Deadline(None))
    federation = fg.Federation.load("a9a", clients=20, partition=fg.Dirichlet(0.3), seed=0)
    inputs, targets = federation.inputs.double(), federation.targets.long()
    for name, algorithm in (
        ("scaffold/full/0.1", fg.Scaffold(lr=0.1, init="full")),
        ("hybrid/full/epoch/0.1", fg.FedaGrac(lr=0.1)),
    ):
        for rounds, gap in zip((1, 2), outcome["gaps"][name], strict=True):
            result = fg.simulate(
                fg.models.build("logistic"), federation, algorithm, rounds=rounds,
                steps=fg.Explicit(settings["steps"]["table"]), weight_decay=0.001, engine="lanes", compile=False,
            )  # fmt: skip
            value = float(torch_objective(result.vector.double(), inputs, targets, 0.001))
            assert gap == pytest.approx(value - outcome["minimum"], rel=1e-3)
    assert outcome["finished"]
    assert not run_gaps(settings, Deadline(0.0))["finished"]


def test_fleets_of_two_speeds_do_the_same_work():
    for ratio in (3, 10, 30, 100):
        for fast in (1, 4, 10, 16, 19):
            steps = two_speeds(ratio, fast, 100)
            assert len(steps) == 20
            assert len(set(steps)) == 2
            assert np.mean(steps) == pytest.approx(100, rel=0.04)


def test_an_advantage_is_a_ratio_of_gaps_with_an_interval():
    """Logs 0.1, 0.2, 0.3: mean 0.2, half width 4.3027 * 0.1 / sqrt 3 = 0.2484."""
    ahead = Advantage([0.1, 0.2, 0.3])
    assert ahead.sign == 0
    assert str(ahead) == f"{100 * math.expm1(-0.2):+.0f}% [{100 * math.expm1(-0.4484):+.0f}%, +5%]"
    assert Advantage([1.1, 1.2, 1.3]).sign == 1
    assert Advantage([-1.1, -1.2, -1.3]).sign == -1
    assert str(Advantage([])) == "-"


def fake(trial, gaps):
    """A record whose algorithms end at these gaps; those that are not named end at 1."""
    kept = {name: [2.0, gaps.get(name, 1.0)] for name in trial.settings["algorithms"]}
    accuracies = {name: [0.5, 0.6] for name in kept}
    outcome = {"gaps": kept, "accuracies": accuracies, "diverged": [], "rounds": 60, "seconds": 1.0}
    return TrialRecord(trial.name, trial.settings, outcome, {"torch": "2"})


def test_an_advantage_after_an_earlier_round_counts_runs_that_kept_it():
    """In the map half the gap after 20 rounds, twice the gap after 60; long runs keep round 20 alone."""
    trials = {trial.name: trial for trial in MAP.trials("paper")}
    short, long = trials["map/ratio10-fast10/seed0"], trials["long/ratio10-fast10/seed0"]
    records = {trial.name: fake(trial, {}) for trial in (short, long)}
    records[short.name].outcome["gaps"]["hybrid/full/epoch/0.1"] = [1.0, 2.0]
    pair = "ratio10-fast10", "hybrid/full/epoch/0.1", "scaffold/full/0.1"
    assert advantage(records, *pair, after=20).mean == pytest.approx(math.log(2))
    assert advantage(records, *pair).mean == pytest.approx(-math.log(2))
    assert advantage(records, *pair, after=30).seeds == 0


def test_a_map_says_where_an_estimate_is_ahead_and_where_behind():
    noise = [0.98, 1.0, 1.02]
    records = {}
    for trial in MAP.trials("paper"):
        part, fleet, seed = trial.name.split("/")
        if part == "map" and int(seed[4:]) < 3:
            factor = 0.5 if fleet == "ratio10-fast1" else 1.5
            records[trial.name] = fake(trial, {"hybrid/full/epoch/0.03": factor * noise[int(seed[4:])]})
    verdicts = {verdict.claim: verdict for verdict in MAP.claims(records)}
    verdict = verdicts[
        "eta 0.03: hybrid from full gradients is ahead of SCAFFOLD from full gradients in every fleet"
    ]
    assert verdict.verdict == "does not hold"
    assert verdict.numbers.startswith(
        "of 20 fleets ahead in 1, behind in 19, within 5% in 0, not decided in 0; best, 1 of 20 clients 10 times "
        "as fast: -50% [-52%, -47%], 3 seeds; worst"
    )
    rows = {row[:2]: row for row in MAP.table(records, "paper").rows}
    assert rows["10 x", "5 %"][6].startswith("-50%")
    assert rows["100 x", "50 %"][6].startswith("+50%")
    figure = MAP.picture(records, "paper")
    texts = {text.get_text() for axes in figure.axes for text in axes.texts}
    assert {"-50%", "+50%", "="} <= texts


def test_partial_participation_compares_pairs_of_seeds():
    records = {
        trial.name: fake(trial, {"cached-1/0.03": 0.5, "cohort-1/0.03": 2.0, "scaffold-full/0.03": 0.4})
        for trial in PARTIAL.trials("paper")
    }
    verdicts = {verdict.claim: verdict.verdict for verdict in PARTIAL.claims(records)}
    start = "K = 18 and 182, half each, eta 0.03: cached-1 is ahead of"
    assert verdicts[f"{start} cohort-1"] == "holds"
    assert verdicts[f"{start} scaffold-full"] == "does not hold"
    assert verdicts["K = 18 and 182, half each, eta 0.01: cached-1 is ahead of cohort-1"] == "not decided"
    (row,) = [row for row in PARTIAL.table(records, "paper").rows if row[0] == "cached-1"]
    assert row[2] == "5e+03 +- 0 (60.00 +- 0.00 %, 10 seeds)"


def test_several_processes_record_every_trial_once(tmp_path, capsys):
    arguments = ["figure-pretest", "--out", str(tmp_path), "--only", "same-x-start0", "--workers", "2"]
    main(arguments)
    store = Records(tmp_path)
    names = [trial.name for trial in RECIPES["figure-pretest"].trials("quick") if "same-x-start0" in trial.name]
    assert sorted(record.trial for record in store.all("figure-pretest").values()) == sorted(names)
    before = store.path("figure-pretest").stat().st_mtime_ns
    main(arguments)
    assert store.path("figure-pretest").stat().st_mtime_ns == before
    main(["figure-pretest", "--out", str(tmp_path / "late"), "--workers", "2", "--time-budget", "-1"])
    assert not Records(tmp_path / "late").all("figure-pretest")


@needs_records
def test_the_first_screen_shows_every_claim_that_it_names():
    store = Records(ROOT / "reproduction")
    recorded = {name: records_of(recipe, "paper", store) for name, recipe in RECIPES.items()}
    rows = headline_rows(recorded)[1:]
    assert [row[1] for row in rows] == [f"[{words}](#{name})" for name, _, words in HEADLINES]
    assert len(rows) <= 10
    trials = {name: trials_of(recipe, "paper", store) for name, recipe in RECIPES.items()}
    blanks = blank_rows(recorded, trials)[1:]
    for name in RECIPES:
        left = sum(int(row[2]) for row in blanks if row[0] == name)
        whole = [record for record in recorded[name].values() if record.finished]
        assert left == len(trials[name]) - len(whole)


@needs_records
def test_the_summary_fits_on_a_screen_of_160_columns():
    lines = page(Records(ROOT / "reproduction")).splitlines()
    summary = lines[: next(i for i, line in enumerate(lines) if line.startswith("## How to read"))]
    assert sum(max(1, -(-len(line) // 160)) for line in summary) <= 30


def test_what_is_blank_costs_its_rounds_times_its_steps():
    """1 ms a client-step: 10 clients x 100 steps x 1000 rounds, whatever the recorded runs stopped at."""
    settings = {
        "data": {"name": "x", "clients": 10}, "model": {"name": "logistic"}, "rounds": 1000, "seed": 0,
        "steps": {"kind": "constant", "steps": 100},
    }  # fmt: skip
    short = {"rounds": 20, "seconds": 40.0, "together": 2, "finished": True}
    gone = {"rounds": 1, "seconds": 40.0, "together": 2, "finished": True, "status": "diverged"}
    recorded = {
        "table1": {
            "lr/iid/constant/seed0": TrialRecord("a", settings, short, {}),
            "lr/iid/constant/seed1": TrialRecord("b", settings, gone, {}),
        }
    }
    seconds, machine = cost("table1", Trial("lr/iid/constant/seed2", settings), recorded)
    assert (seconds, machine) == (pytest.approx(1000.0), "a CPU core")
    other = Trial("alexnet/x/seed0", {**settings, "model": {"name": "alexnet"}, "rounds": 100})
    assert cost("table1", other, recorded) == (pytest.approx(86e-6 * 10 * 100 * 100), "NVIDIA H200")


def test_a_run_that_diverged_is_judged_by_the_sign_test():
    """A large F - F* for a diverged run would dominate the mean: five seeds ahead, five diverged."""
    mixed = Advantage([0.1] * 5 + [-12.0] * 5, diverged=True)
    assert mixed.sign == 0
    assert str(mixed).startswith("diverged with some seeds, ahead in 5 of 10 seeds")
    assert Advantage([-12.0] * 6, diverged=True).sign == -1
    assert Advantage([0.01, 0.0, -0.01]).level
    assert not Advantage([0.3, -0.3, 0.0]).level
