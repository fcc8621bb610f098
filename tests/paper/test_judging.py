"""Verdicts from paired seeds: intervals, sign tests for unknown numbers, Holm's correction, held-out seeds."""

import math
import re

import pytest

from fedagrac.paper import TrialRecord
from fedagrac.paper.grid import GridPoint, at_target, choice, fewest_rounds, reading
from fedagrac.paper.judging import (
    Evidence,
    agreed,
    all_within,
    compare_means,
    compare_rounds,
    decide_all,
    nearly_as_high,
    within,
)
from fedagrac.paper.runner import first_round

CUT = "cut"
"""A run that was cut off early."""


def runs(*reached, limit=200, chosen_by=None):
    """A setting's runs with the seeds 0, 1, ...: their rounds to 70 %, None, "diverged", or (CUT, last round)."""
    records = []
    for seed, rounds in enumerate(reached):
        status, finished, end = "finished", True, limit
        if rounds == "diverged":
            status, curve = "diverged", [0.1, 0.1]
        elif isinstance(rounds, tuple):
            finished, curve = False, [0.5] * rounds[1]
        elif rounds is None:
            curve = [0.5] * end
        else:
            curve = [0.62] * (rounds - 1) + [0.7] + [0.82] * 4
        outcome = {
            "accuracy": curve,
            "rounds": len(curve),
            "finished": finished,
            "status": status,
            "best": max(curve),
        }
        outcome |= {"rounds_to_target": None, "final": None if status == "diverged" else curve[-1]}
        records.append(TrialRecord("x", {"seed": seed, "target": 0.7, "rounds": limit}, outcome, {}))
    return GridPoint("s", tuple(records), chosen_by=chosen_by)


def finals(*values, chosen_by=None):
    """A setting's runs with these accuracies at the end; None diverged."""
    outcomes = [{"final": v, "status": "finished" if v is not None else "diverged"} for v in values]
    return GridPoint("s", tuple(TrialRecord("x", {"seed": i}, o, {}) for i, o in enumerate(outcomes)), chosen_by)


# --- when a run reached its target ---


def test_the_target_is_read_over_whole_windows():
    """Means over 5 rounds by hand: 0.40, 0.52, 0.62, 0.70, 0.704 at rounds 3 to 7."""
    curve = [0.1, 0.2, 0.71, 0.3, 0.69, 0.70, 0.71, 0.70, 0.72]
    assert (first_round(curve, 0.7), first_round(curve, 0.7, 5)) == (3, 7)
    assert first_round(curve[:8], 0.7, 5) is None  # round 7 has one round after it
    assert first_round([0.7] * 10 + [0.79, 0.81, 0.81], 0.8, 5) is None  # the end window is not shortened
    assert first_round([0.7, 0.9, 0.9], 0.8, 5) == 2  # rounds 1 to 3 average 0.83, but round 1 is at 0.7
    assert first_round([0.6, 0.69, 0.69, 0.69, 0.8, 0.8, 0.8], 0.7, 5) == 5  # window of 4 averages 0.734, raw is 5


def test_rounds_are_read_from_the_curve_and_not_from_what_was_recorded():
    settings = {"target": 0.7, "rounds": 200, "seed": 0}
    curve = [0.5] * 61 + [0.704]  # a run that stopped in its first round at the target
    outcome = {"accuracy": curve, "rounds": 62, "rounds_to_target": 62}
    record = TrialRecord("x", settings, outcome, {})
    read = reading(record)
    assert (read.reached, read.until, read.raw) == (None, 60, 62)
    assert GridPoint("s", (record,)).rounds() == "> 60 (ended at 62, its first round at the target)"
    assert fewest_rounds(record) == 2 - 62e-6  # the choosing seed is read without averaging
    whole = TrialRecord("x", settings, {"accuracy": [0.5] * 200, "rounds": 200}, {})
    assert reading(whole).until == 200
    assert reading(runs("diverged").records[0]).until == math.inf


def test_other_targets_are_read_from_the_curves():
    point = runs(10)
    assert (point.rounds(), at_target(point, 0.72).rounds(), at_target(point, 0.95).rounds()) == (
        "10",
        "11",
        "> 12",
    )


def test_the_text_of_rounds_says_what_is_not_known():
    assert runs(10, 11, 12).rounds() == "11.0 +- 2.5 (3 seeds)"
    assert runs(10, None, 14).rounds() == "10 to 14 by 2 of 3 seeds, the others > 200"
    assert (
        runs(10, (CUT, 50), "diverged").rounds()
        == "10 by 1 of 3 seeds, the others > 48 (cut off; diverged with 1)"
    )
    assert runs("diverged", "diverged").rounds() == "diverged (2 seeds)"


# --- rounds ---


def test_rounds_are_compared_seed_by_seed():
    """Differences 10, 11, 9: mean 10, half width 4.3027 / sqrt 3."""
    apart = compare_rounds("fewer", runs(50, 80, 60), runs(60, 91, 69))
    assert apart.verdict == "holds"
    assert apart.numbers == "63.3 against 73.3 rounds: difference -10.0 [-12.5, -7.5], p = 0.0033, 3 seeds"
    assert compare_rounds("fewer", runs(60, 91, 69), runs(50, 80, 60)).verdict == "does not hold"
    close = compare_rounds("fewer", runs(50, 80, 60), runs(60, 70, 65))
    assert close.verdict == "not decided"
    assert re.search(r"about \d+ seeds would decide", close.numbers)
    two = compare_rounds("fewer", runs(50, 80), runs(60, 91))
    assert (two.verdict, two.numbers.split("; ")[1]) == ("not decided", "about 3 seeds would decide")
    assert (
        compare_rounds("fewer", runs(5), runs(9)).numbers == "5 against 9: one seed; at least 3 seeds are needed"
    )


def test_runs_that_did_not_reach_the_target_are_judged_by_the_sign_test():
    """10 of 10: p = 2 / 2^10. The ends of the runs that were cut off say nothing but a lower bound."""
    slow = runs(*[(CUT, 162 + 30 * seed) for seed in range(10)])
    fast = runs(*range(100, 110))
    verdict = compare_rounds("fewer", fast, slow)
    assert verdict.verdict == "holds"
    assert verdict.brief == "sooner in 10 of 10 seeds, sign test p = 0.002, by at least 60 rounds"  # 160 - 100
    assert compare_rounds("fewer", slow, fast).verdict == "does not hold"


def test_five_seeds_cannot_decide_a_sign_test():
    never = compare_rounds("fewer", runs(*[50] * 5), runs(*[None] * 5))
    assert never.verdict == "not decided"
    assert "sooner in 5 of 5 seeds, sign test p = 0.062" in never.numbers
    assert never.numbers.endswith("about 6 seeds would decide")
    assert compare_rounds("fewer", runs(*[50] * 6), runs(*[None] * 6)).verdict == "holds"


def test_only_seeds_whose_order_is_known_count():
    """Six seeds are cut off before the other reached the target; the four others are not enough."""
    slow = runs(*[(CUT, 30)] * 6, None, None, None, None)
    verdict = compare_rounds("fewer", runs(*[50] * 10), slow)
    assert verdict.verdict == "not decided"
    assert "sooner in 4 of 10 seeds, 6 equal or unknown, sign test p = 0.12" in verdict.numbers
    assert compare_rounds("fewer", runs(*[None] * 6), runs(*[None] * 6)).verdict == "not decided"
    at_once = compare_rounds("fewer", runs(*[50] * 6), runs(*[(CUT, 52)] * 6))  # known not to be there by 50
    assert at_once.verdict == "holds"


def test_a_run_that_diverged_never_reaches_the_target():
    ok, gone = runs(*[62] * 6), runs(*["diverged"] * 6)
    assert compare_rounds("fewer", ok, gone).verdict == "holds"
    assert compare_rounds("fewer", gone, ok).verdict == "does not hold"
    assert compare_rounds("fewer", gone, gone).verdict == "not decided"
    assert compare_rounds("fewer", runs(*[None] * 6), gone).verdict == "not decided"  # neither is there


def test_equal_differences_have_no_interval():
    same = compare_rounds("fewer", runs(*[1] * 10), runs(*[4] * 10))
    assert same.brief == "sooner in 10 of 10 seeds, sign test p = 0.002, by at least 3 rounds"
    assert compare_rounds("fewer", runs(1, 1, 1), runs(4, 4, 4)).verdict == "not decided"


# --- accuracies ---


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (finals(0.80, 0.81, 0.82), finals(0.70, 0.71, 0.73), "holds"),
        (finals(0.70, 0.71, 0.72), finals(0.80, 0.82, 0.83), "does not hold"),
        (finals(0.80, 0.81), finals(0.70, 0.7101), "not decided"),  # two seeds
        (finals(0.70), finals(0.80), "not decided"),
        (finals(0.80, 0.84, 0.82), finals(0.81, 0.81, 0.82), "not decided"),  # closer than the spread
        (finals(*[0.7] * 6), finals(*[None] * 6), "holds"),
        (finals(*[None] * 6), finals(*[0.7] * 6), "does not hold"),
        (finals(*[0.7] * 5), finals(*[None] * 5), "not decided"),
        (finals(None, None, None), finals(None, None, None), "not decided"),
        (None, finals(0.80, 0.80), "not decided"),
    ],
)
def test_means_are_compared_with_their_spread(a, b, expected):
    assert compare_means("higher", a, b).verdict == expected


def test_diverged_runs_are_counted_and_not_averaged():
    some = finals(0.755, None, None)
    assert some.percent() == "diverged with 2 of 3 seeds"
    verdict = compare_means("higher", finals(0.81, 0.80, 0.82), some)
    assert verdict.numbers.startswith(
        "81.00 +- 2.48 (3 seeds) against diverged with 2 of 3 seeds: higher in 3 of 3"
    )
    assert verdict.verdict == "not decided"


def test_the_means_are_those_of_the_seeds_that_judge():
    """Seed 0 chose a setting with a lucky 0.95; without it the two are 0.2 points apart."""
    lucky, other = finals(0.95, 0.80, 0.81, 0.82, chosen_by=0), finals(0.70, 0.798, 0.809, 0.817)
    verdict = compare_means("higher", lucky, other)
    first, second, difference = (float(n) for n in re.findall(r"-?[\d.]+", verdict.numbers)[:3])
    assert (first, second) == (81.0, 80.8)
    assert difference == pytest.approx(first - second, abs=1e-9)
    assert verdict.numbers.endswith("3 seeds") or "3 seeds;" in verdict.numbers
    alone = compare_means("higher", finals(0.95, chosen_by=0), finals(0.7))
    assert (alone.verdict, alone.numbers.startswith("95.00 against 70.00: one seed")) == ("not decided", True)


def test_the_seed_that_chose_is_left_out_even_if_the_other_setting_lacks_it():
    """Seed 0 chose; the rival has seeds 1 to 4 only, and all four judge."""
    chosen = runs(9, 60, 61, 62, 70, chosen_by=0)
    rival = GridPoint("s", runs(9, 50, 52, 50, 61).records[1:])
    assert compare_rounds("fewer", chosen, rival).numbers.startswith("63.2 against 53.2 rounds")
    assert "4 seeds" in compare_rounds("fewer", chosen, rival).numbers


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (finals(0.80, 0.81, 0.82), finals(0.802, 0.812, 0.8225), "holds"),
        (finals(0.80, 0.81, 0.82), finals(0.83, 0.84, 0.851), "does not hold"),
        (finals(0.80, 0.81, 0.82), finals(0.805, 0.83, 0.82), "not decided"),
        (finals(0.80, 0.81), finals(0.80, 0.8101), "not decided"),  # two seeds
        (finals(*[0.80] * 6), finals(*[None] * 6), "does not hold"),
        (None, finals(0.80, 0.80), "not decided"),
    ],
)
def test_settings_are_alike_where_the_whole_interval_is_within_the_limit(a, b, expected):
    verdict = within("within 1 point", a, b, 0.01)
    assert verdict.verdict == expected
    if expected == "not decided" and a is not None:
        assert re.search(r"about \d+ seeds would decide", verdict.numbers)


def test_a_setting_is_not_compared_with_itself():
    one = finals(0.8, 0.81, 0.82)
    evidence, numbers = nearly_as_high(one, choice(finals(0.80, 0.811, 0.8205), 5), 0.005)
    assert evidence.seeds == 2  # the seed that chose the rival does not judge
    assert evidence.decided == 0
    assert numbers == "81.50 against 81.58"


# --- claims about several comparisons ---


def test_claims_about_several_comparisons_are_corrected():
    """Holm: with 20 comparisons a single p of 0.02 decides nothing, one of 0.002 does."""
    weak, strong, none = (Evidence(sign, p, 10, "", 30) for sign, p in ((-1, 0.02), (-1, 0.002), (1, 0.5)))
    parts = {f"part {i}": none for i in range(19)}
    assert decide_all("c", {**parts, "last": weak}, "n").verdict == "not decided"
    assert decide_all("c", {**parts, "last": strong}, "n").verdict == "does not hold"
    assert decide_all("c", {"only": weak}, "n").verdict == "does not hold"
    good = Evidence(1, 0.001, 10, "")
    assert decide_all("c", {"a": good, "b": good}, "n").verdict == "holds"
    assert decide_all("c", {"a": good, "b": good}, "n", whole=3).verdict == "not decided"
    assert decide_all("c", {"a": good, "b": none}, "n").numbers == "n; about 30 seeds would decide b"
    few = Evidence(1, 0.0, 2, "", 2)
    assert decide_all("c", {"a": few}, "n").numbers == "n; about 3 seeds would decide a"


def test_all_pairs_must_be_within_the_limit():
    near = {"a": finals(0.80, 0.81, 0.82), "b": finals(0.8005, 0.8107, 0.8206), "c": finals(0.80, 0.8101, 0.8202)}
    assert all_within("alike", near, 0.01).verdict == "holds"
    far = {**near, "c": finals(0.75, 0.7601, 0.7702)}
    verdict = all_within("alike", far, 0.01)
    assert verdict.verdict == "does not hold"
    assert verdict.numbers.startswith("the farthest apart: 81.06 against 76.01")


def test_seeds_that_agree_are_judged_by_the_sign_test():
    from fedagrac.paper import Verdict

    yes, no = Verdict("c", "holds", "n"), Verdict("c", "does not hold", "m")
    assert agreed([yes] * 3).verdict == "not decided"
    assert agreed([yes] * 6).verdict == "holds"
    assert agreed([no] * 6).verdict == "does not hold"
    assert agreed([yes] * 6 + [no]).verdict == "not decided"
