"""Verdicts: what runs with the same seeds say about a claim.

Two settings are compared by the differences between their runs with the same seed. A claim is decided only where
the 95 % interval of the mean difference excludes zero and at least three seeds judge it. Where a run did not reach
its target or diverged, its number is not known, and the exact sign test over the seeds takes the interval's place.
A claim about several comparisons is decided with Holm's correction.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedagrac.paper.grid import GridPoint, Reading, final_accuracy, reading
from fedagrac.paper.intervals import Interval, holm, p_value, seeds_to_decide, sign_test, signs_to_decide
from fedagrac.paper.recipe import Verdict

__all__ = [
    "LEAST_SEEDS",
    "Evidence",
    "accuracy_evidence",
    "agreed",
    "all_within",
    "compare_means",
    "compare_rounds",
    "decide",
    "decide_all",
    "judge",
    "nearly_as_high",
    "of_differences",
    "of_signs",
    "p_text",
    "pairs_of",
    "within",
    "without_p",
]

LEAST_SEEDS = 3
"""Fewer seeds decide nothing."""

LEVEL = 0.05


@dataclass(frozen=True)
class Evidence:
    """What the seeds say about a claim.

    Attributes:
        sign: 1 for it, -1 against it, 0 neither.
        p: the two-sided p-value.
        seeds: how many seeds judge.
        numbers: the difference with its interval, or the counts of the sign test, as text.
        needed: how many seeds would decide with a chance of 80 %, or None if unknown.
    """

    sign: int
    p: float
    seeds: int
    numbers: str
    needed: int | None = None

    @property
    def decided(self) -> int:
        """The sign if it is decided, otherwise 0."""
        return self.sign if self.seeds >= LEAST_SEEDS and self.p < LEVEL else 0

    @property
    def wanted(self) -> str:
        """How many seeds would decide, as text."""
        if self.seeds == 0:
            return ""
        if self.needed is None:
            least = f"at least {LEAST_SEEDS} seeds are needed"
            return least if self.seeds < LEAST_SEEDS else "no number of seeds that we could run would decide"
        return f"about {max(LEAST_SEEDS, self.needed)} seeds would decide"


NOTHING = Evidence(0, 1.0, 0, "no seed in common")


def p_text(p: float) -> str:
    """Return a p-value as text.

    Examples:
        >>> p_text(0.0123), p_text(1e-9)
        ('p = 0.012', 'p < 0.0001')
    """
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.2g}"


def without_p(numbers: str) -> str:
    """Return numbers without their p-value, which is about zero, where a margin is judged.

    Examples:
        >>> without_p("difference 1.00 [0.50, 1.50], p = 0.012, 3 seeds")
        'difference 1.00 [0.50, 1.50], 3 seeds'
    """
    return re.sub(r", p [=<] [0-9.e-]+", "", numbers)


def of_differences(
    differences: Sequence[float], threshold: float = 0.0, unit: float = 1.0, digits: int = 2
) -> Evidence:
    """Return what paired differences say about their mean being above a threshold.

    Args:
        differences: one per seed.
        threshold: what the mean is claimed to exceed.
        unit: differences are shown multiplied by this.
        digits: and with so many decimals.

    Examples:
        >>> of_differences([1.0, 1.1, 1.2]).numbers
        'difference 1.10 [0.85, 1.35], p = 0.0027, 3 seeds'
    """
    if not differences:
        return NOTHING
    mean = statistics.fmean(differences)
    sign = (mean > threshold) - (mean < threshold)
    if len(differences) == 1:
        return Evidence(sign, 1.0, 1, "one seed")
    interval = Interval.of([unit * difference for difference in differences])
    p = p_value([difference - threshold for difference in differences])
    text = f"difference {interval.mean:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"
    numbers = f"{text}, {p_text(p)}, {len(differences)} seeds"
    return Evidence(sign, p, len(differences), numbers, seeds_to_decide(differences, threshold))


def of_signs(wins: int, losses: int, seeds: int, word: str) -> Evidence:
    """Return what the sign test says: how many seeds are for a claim, how many against it, of how many.

    Examples:
        >>> of_signs(10, 0, 10, "sooner").numbers
        'sooner in 10 of 10 seeds, sign test p = 0.002'
        >>> of_signs(1, 6, 9, "sooner").numbers
        'sooner in 1 of 9 seeds, 2 equal or unknown, sign test p = 0.12'
        >>> of_signs(5, 0, 5, "sooner").decided, of_signs(6, 0, 6, "sooner").decided
        (0, 1)
    """
    if seeds == 0:
        return NOTHING
    p, unknown = sign_test(wins, losses), seeds - wins - losses
    needed = signs_to_decide(wins, losses) if wins + losses else None
    if needed is not None and unknown:
        needed = math.ceil(needed * seeds / (wins + losses))
    text = f"{word} in {wins} of {seeds} seeds" + (f", {unknown} equal or unknown" if unknown else "")
    return Evidence((wins > losses) - (wins < losses), p, seeds, f"{text}, sign test {p_text(p)}", needed)


def decide(claim: str, evidence: Evidence, numbers: str) -> Verdict:
    """Return the verdict on a claim; `numbers` says what was compared.

    Examples:
        >>> decide("a is above b", of_differences([1.0, 1.1, 1.2]), "a against b").verdict
        'holds'
        >>> decide("a is above b", of_differences([1.0, 1.1]), "a against b").numbers
        'a against b: difference 1.05 [0.41, 1.69], p = 0.03, 2 seeds; about 3 seeds would decide'
        >>> decide("a is above b", of_differences([1.0]), "a against b").numbers
        'a against b: one seed; at least 3 seeds are needed'
    """
    numbers = f"{numbers}: {evidence.numbers}"
    if evidence.decided:
        return Verdict(claim, "holds" if evidence.decided > 0 else "does not hold", numbers)
    return Verdict(claim, "not decided", f"{numbers}; {evidence.wanted}".rstrip("; "))


def decide_all(claim: str, parts: Mapping[str, Evidence], numbers: str, whole: int | None = None) -> Verdict:
    """Judge that a claim holds in all of its parts, with Holm's correction over them.

    One part that is decided against the claim decides against all.

    Args:
        claim: what is claimed.
        parts: the evidence by part.
        numbers: what was compared, as text.
        whole: how many parts there should be; with fewer the claim cannot hold.

    Examples:
        >>> good, bad = Evidence(1, 0.01, 5, ""), Evidence(-1, 0.03, 5, "", 9)
        >>> decide_all("c", {"a": good, "b": good}, "").verdict
        'holds'
        >>> decide_all("c", {"a": good, "b": bad}, "two").verdict  # a is rejected first, then b at 0.05
        'does not hold'
        >>> decide_all("c", {"a": bad, "b": bad}, "two").numbers  # 0.03 > 0.05 / 2
        'two; about 9 seeds would decide b'
    """
    names = list(parts)
    adjusted = holm([parts[name].p for name in names])
    corrected = {name: replace(parts[name], p=p) for name, p in zip(names, adjusted, strict=True)}
    if any(part.decided < 0 for part in corrected.values()):
        return Verdict(claim, "does not hold", numbers)
    left = [name for name in names if corrected[name].decided == 0]
    if names and not left and len(names) >= (whole or 1):
        return Verdict(claim, "holds", numbers)
    wanted = {name: parts[name].needed for name in left}
    known = {name: needed for name, needed in wanted.items() if needed is not None}
    if not known:
        return Verdict(claim, "not decided", numbers)
    hardest = max(known, key=lambda name: (known[name], name))
    seeds = max(LEAST_SEEDS, known[hardest])
    return Verdict(claim, "not decided", f"{numbers}; about {seeds} seeds would decide {hardest}")


def judge(
    claim: str, differences: Sequence[float], numbers: str, threshold: float = 0.0, unit: float = 1.0
) -> Verdict:
    """Judge that the mean of paired differences is above a threshold; see `of_differences` and `decide`."""
    return decide(claim, of_differences(differences, threshold, unit), numbers)


def pairs_of(a: GridPoint, b: GridPoint) -> tuple[GridPoint, GridPoint]:
    """Return the runs with the seeds that judge: those in common, without the seeds that chose the settings.

    Where only a seed that chose is there, it stays, so that its numbers can be shown; alone it decides nothing.
    """
    common = sorted(a.by_seed().keys() & b.by_seed().keys())
    seeds = [seed for seed in common if seed not in (a.chosen_by, b.chosen_by)] or common[:1]
    return a.with_seeds(seeds), b.with_seeds(seeds)


def agreed(verdicts: Sequence[Verdict]) -> Verdict:
    """Return what several seeds say of one claim, by the sign test over those that decide.

    Examples:
        >>> yes, no = Verdict("c", "holds", "5 of 6"), Verdict("c", "does not hold", "3 of 6")
        >>> agreed([yes] * 6).verdict, agreed([yes] * 6).numbers
        ('holds', '5 of 6: so in 6 of 6 seeds, sign test p = 0.031')
        >>> agreed([yes, no]).verdict, agreed([yes] * 3).numbers
        ('not decided', '5 of 6: so in 3 of 3 seeds, sign test p = 0.25; about 6 seeds would decide')
        >>> agreed([yes]).numbers
        '5 of 6: one seed; about 6 seeds would decide'
    """
    numbers = "; ".join(dict.fromkeys(verdict.numbers for verdict in verdicts))
    said = [verdict.verdict for verdict in verdicts]
    wins, losses = said.count("holds"), said.count("does not hold")
    if wins + losses == 0:
        return Verdict(verdicts[0].claim, "not decided", numbers)
    evidence = of_signs(wins, losses, len(said), "so")
    if len(said) == 1:
        evidence = replace(evidence, numbers="one seed")
    return decide(verdicts[0].claim, evidence, numbers)


def accuracy_evidence(higher: GridPoint, lower: GridPoint) -> tuple[Evidence, str]:
    """Return what the seeds say about one setting ending above another, and the means of the same seeds as text.

    A run that diverged is below one that did not; then the sign test judges.
    """
    a, b = pairs_of(higher, lower)
    pairs = [(final_accuracy(x), final_accuracy(y)) for x, y in zip(a.records, b.records, strict=True)]
    known = [(x, y) for x, y in pairs if x is not None and y is not None]
    if pairs and len(known) == len(pairs):
        means = [f"{100 * statistics.fmean(side):.2f}" for side in zip(*known, strict=True)]
        return of_differences([x - y for x, y in known], unit=100), " against ".join(means)
    signs = [_order(x, y) for x, y in pairs]
    evidence = of_signs(signs.count(1), signs.count(-1), len(pairs), "higher")
    if len(pairs) == 1:
        evidence = replace(evidence, numbers="one seed", needed=None)
    return evidence, f"{a.percent()} against {b.percent()}"


def nearly_as_high(one: GridPoint, best_other: GridPoint, limit: float) -> tuple[Evidence, str]:
    """Return what the seeds say about one setting ending at most a limit below another, and their means as text.

    Examples:
        >>> from fedagrac.paper.records import TrialRecord
        >>> runs = [TrialRecord("", {}, {"final": f}, {}) for f in (0.8, 0.81, 0.82, 0.801, 0.812, 0.823)]
        >>> nearly_as_high(GridPoint("", tuple(runs[:3])), GridPoint("", tuple(runs[3:])), 0.01)[0].decided
        1
    """
    evidence, numbers = accuracy_evidence(one, best_other)
    a, b = pairs_of(one, best_other)
    finals = [(final_accuracy(x), final_accuracy(y)) for x, y in zip(a.records, b.records, strict=True)]
    known = [x - y for x, y in finals if x is not None and y is not None]
    if len(known) < len(finals) or not known:
        return evidence, numbers
    return replace(of_differences(known, threshold=-limit), numbers=without_p(evidence.numbers)), numbers


def _order(a: float | None, b: float | None) -> int:
    """Return 1 where a is above b, -1 where it is below; None is below all numbers."""
    if a is None or b is None:
        return (a is not None) - (b is not None)
    return (a > b) - (a < b)


def _shown(point: GridPoint | None) -> str:
    return "-" if point is None else point.percent()


def compare_means(claim: str, higher: GridPoint | None, lower: GridPoint | None) -> Verdict:
    """Judge that one setting ends at a higher accuracy than another.

    Examples:
        >>> from fedagrac.paper.records import TrialRecord
        >>> runs = [TrialRecord("", {}, {"final": f}, {}) for f in (0.8, 0.82, 0.81, 0.7, 0.71, 0.72)]
        >>> a, b = GridPoint("", tuple(runs[:3])), GridPoint("", tuple(runs[3:]))
        >>> compare_means("a is above b", a, b).numbers
        '81.00 against 71.00: difference 10.00 [7.52, 12.48], p = 0.0033, 3 seeds'
        >>> compare_means("b is above a", b, a).verdict, compare_means("a is above c", a, None).verdict
        ('does not hold', 'not decided')
    """
    if higher is None or lower is None:
        return Verdict(claim, "not decided", f"{_shown(higher)} against {_shown(lower)}")
    if not (higher.finished and lower.finished):
        return Verdict(claim, "not decided", f"{_shown(higher)} against {_shown(lower)} (cut off)")
    evidence, numbers = accuracy_evidence(higher, lower)
    return decide(claim, evidence, numbers)


def _within_evidence(a: GridPoint, b: GridPoint, limit: float) -> tuple[Evidence, str]:
    """Return what the seeds say about two settings ending within a limit, and the numbers of the same seeds.

    The limit on the side of the mean has to be excluded: from inside, or from outside to decide against. A run
    that diverged beside one that did not is not within the limit, and then the sign test judges.
    """
    evidence, numbers = accuracy_evidence(a, b)
    first, second = pairs_of(a, b)
    finals = [(final_accuracy(x), final_accuracy(y)) for x, y in zip(first.records, second.records, strict=True)]
    known = [x - y for x, y in finals if x is not None and y is not None]
    if len(known) < len(finals):
        apart = sum((x is None) != (y is None) for x, y in finals)
        near = sum(abs(difference) < limit for difference in known)
        return of_signs(near, apart + len(known) - near, len(finals), "within"), numbers
    if not known:
        return NOTHING, numbers
    side = math.copysign(1.0, statistics.fmean(known))
    against = of_differences([-side * difference for difference in known], threshold=-limit)
    interval = Interval.of(known)
    if against.sign > 0 and max(abs(interval.low), abs(interval.high)) >= limit:
        against = replace(against, p=max(against.p, LEVEL))  # the other side is not excluded
    return replace(against, numbers=without_p(evidence.numbers)), numbers


def within(claim: str, a: GridPoint | None, b: GridPoint | None, limit: float) -> Verdict:
    """Judge that two settings end within so many points of each other (a limit of 0.01 is one point).

    It holds where the whole 95 % interval of the difference is inside the limits, and does not where the interval
    is outside.
    """
    if a is None or b is None or not (a.finished and b.finished):
        return Verdict(claim, "not decided", f"{_shown(a)} against {_shown(b)}")
    return decide(claim, *_within_evidence(a, b, limit))


def all_within(claim: str, points: Mapping[str, GridPoint], limit: float) -> Verdict:
    """Judge that all settings end within so many points of each other, with Holm's correction over the pairs."""
    pairs = {
        f"{one} against {other}": _within_evidence(points[one], points[other], limit)
        for one, other in itertools.combinations(points, 2)
    }
    known = {name: point.mean() or 0.0 for name, point in points.items()}
    names = sorted(
        [max(known, key=lambda name: known[name]), min(known, key=lambda name: known[name])],
        key=list(points).index,
    )
    farthest = pairs.get(" against ".join(names)) or next(iter(pairs.values()))
    numbers = f"the farthest apart: {farthest[1]}: {farthest[0].numbers}"
    return decide_all(claim, {name: evidence for name, (evidence, _) in pairs.items()}, numbers)


def _sooner(a: Reading, b: Reading) -> int:
    """Return 1 where a reached its target before b, -1 where after it, 0 where that is not known."""
    if a.reached is not None and (a.reached < b.until or (b.reached is None and a.reached == b.until)):
        return 1
    if b.reached is not None and (b.reached < a.until or (a.reached is None and b.reached == a.until)):
        return -1
    return 0


def compare_rounds(claim: str, fewer: GridPoint | None, more: GridPoint | None) -> Verdict:
    """Judge that one setting needs fewer rounds to the target than another.

    If all runs reached it, the differences judge. Where a run was cut off or never reached it, the sign test
    counts the seeds whose order is known: one of the two reached the target before the other was cut off. A run
    that diverged never reaches it. Where all differences are equal, they have no spread, and the sign test judges.
    """
    if fewer is None or more is None:
        return Verdict(
            claim, "not decided", " against ".join("-" if p is None else p.rounds() for p in (fewer, more))
        )
    a, b = pairs_of(fewer, more)
    read = [(reading(x), reading(y)) for x, y in zip(a.records, b.records, strict=True)]
    reached = [(x.reached, y.reached) for x, y in read if x.reached is not None and y.reached is not None]
    differences = [float(y - x) for x, y in reached]
    if read and len(reached) == len(read) and len(set(differences)) != 1:
        means = " against ".join(f"{statistics.fmean(side):.1f}" for side in zip(*reached, strict=True))
        text = of_differences([-difference for difference in differences], digits=1).numbers
        return decide(claim, replace(of_differences(differences), numbers=text), f"{means} rounds")
    numbers = f"{a.rounds()} against {b.rounds()}"
    if len(read) == 1:
        return decide(claim, Evidence(0, 1.0, 1, "one seed"), numbers)
    signs = [_sooner(x, y) for x, y in read]
    evidence = of_signs(signs.count(1), signs.count(-1), len(read), "sooner")
    evidence = replace(evidence, numbers=evidence.numbers + _lead(read, evidence.sign))
    return replace(decide(claim, evidence, numbers), brief=evidence.numbers)


def _lead(read: Sequence[tuple[Reading, Reading]], sign: int) -> str:
    """Return by how many rounds the sooner side leads at least, in every seed that it wins."""
    ordered = [(x, y) if sign > 0 else (y, x) for x, y in read]
    leads = [y.until - x.reached for x, y in ordered if x.reached is not None and _sooner(x, y) > 0]
    finite = [lead for lead in leads if lead != math.inf]
    return f", by at least {min(finite):g} rounds" if sign and finite else ""
