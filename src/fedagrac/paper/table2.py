"""Table 2: how much of one fast device FedNova and FedaGrac can use beside nine slow ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedagrac.heterogeneity import DEVICES
from fedagrac.paper.grid import GridPoint, seeded
from fedagrac.paper.judging import agreed, compare_means, decide, of_signs
from fedagrac.paper.recipe import Recipe, Scale, Table, TrialRecords, Verdict
from fedagrac.paper.records import Trial, TrialRecord, key_of
from fedagrac.paper.runner import SMOOTH, Deadline, first_round, one_by_one, run_simulations

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["RECIPE", "in_time", "search"]

PAPER = {  # utilization in percent, rounds to 60 %, accuracy in percent after 100 rounds; the slowest device first
    "raspberry-pi-4": {"fednova": (25, 49, 66.18), "fedagrac": (100, 25, 72.07)},
    "jetson-nano": {"fednova": (50, 50, 64.39), "fedagrac": (100, 21, 72.93)},
    "gtx-1080-ti": {"fednova": (100, 40, 69.77), "fedagrac": (100, 30, 72.00)},
    "rtx-2080-ti": {"fednova": (100, 29, 72.11), "fedagrac": (100, 36, 72.13)},
}
METHODS: dict[str, dict[str, Any]] = {
    "fednova": {"name": "fednova"},
    "fedagrac": {"name": "fedagrac", "calibration": 0.05, "first_steps": "epoch"},
}
FAST = "rtx-3080-ti"

CNN = {"model": {"name": "cnn"}, "lr": 0.03}
LR = {"model": {"name": "logistic", "features": 784, "classes": 10}, "lr": 0.005}
COUNTS: dict[Scale, dict[str, Any]] = {
    # slow: steps of a slow device; boards: what the ratios to the two boards are divided by
    "quick": {**LR, "slow": 2, "boards": 1, "shares": [100, 50, 25, 10], "give_up": 10, "rounds": 20},
    "medium": {**CNN, "slow": 5, "boards": 10, "shares": [100, 75, 50, 25, 10, 5], "give_up": 50, "rounds": 100},
    "paper": {**CNN, "slow": 5, "boards": 1, "shares": list(range(100, 0, -5)), "give_up": 50, "rounds": 100},
}


SEEDS = (0, 1, 2)
"""The seeds at the paper's counts; the smaller scales run the first."""


def _fast_steps(device: str, slow: int, boards: int) -> int:
    """Return how many steps the fast device can make while the slow ones make theirs."""
    ratio = (DEVICES[FAST].flops or 1.0) / (DEVICES[device].flops or 1.0)
    return round(slow * ratio / (boards if ratio > 100 else 1))


def _trials(scale: Scale) -> list[Trial]:
    counts = COUNTS[scale]
    trials = []
    for device in PAPER:
        fast = _fast_steps(device, counts["slow"], counts["boards"])
        split = {"kind": "dirichlet", "alpha": 0.3}
        shared = {
            "data": {"name": "fashion-mnist", "clients": 10, "partition": split},
            "model": counts["model"],
            "steps": {"kind": "extreme", "slow": counts["slow"], "fast": fast},
            "shares": counts["shares"],
            "batch_size": 25,
            "rounds": counts["rounds"],
            "give_up": counts["give_up"],
            "target": 0.6,
            "tf32": counts["model"]["name"] == "cnn",
        }
        for name, method in METHODS.items():
            settings = {**shared, "algorithm": {**method, "lr": counts["lr"]}}
            trials += seeded(f"{device}/{name}", settings, SEEDS if scale == "paper" else SEEDS[:1])
    return sorted(trials, key=lambda trial: int(trial.settings["seed"]))


def search(settings: dict[str, Any], deadline: Deadline, data_dir: Path | None = None) -> dict[str, Any]:
    """Try shares of the fast device's capacity, the largest first, until one reaches the target in time.

    A run that has not reached the target after `give_up` rounds ends. The first that reaches it runs to its last
    round. Shares that an earlier call has tried to their end are not tried again.

    Returns:
        The outcome of the last run, with the "utilization" it stands for (None: no share was small enough) and,
        under "tried", every share in percent with its rounds to the target and its best accuracy.
    """
    steps, tried = settings["steps"], _tried_before(deadline.earlier.get(key_of(settings), {}))
    for share in settings["shares"][len(tried) :]:
        fast = max(1, round(steps["fast"] * share / 100))
        (outcome,) = run_simulations([{**settings, "steps": {**steps, "fast": fast}}], deadline, data_dir)
        reached = in_time(outcome, settings)
        tried.append({"share": share, "steps": fast, "rounds_to_target": reached, "best": outcome["best"]})
        if reached is not None or not outcome["finished"]:
            break
    return {**outcome, "utilization": None if reached is None else share, "tried": tried}


def _tried_before(outcome: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the shares that a search which was cut off has tried to their end: all except the last one."""
    return [] if outcome.get("finished", True) else list(outcome.get("tried", [])[:-1])


def in_time(outcome: dict[str, Any], settings: dict[str, Any]) -> int | None:
    """Return the round at which the mean accuracy over 5 rounds reached the target; None after `give_up`.

    Examples:
        >>> late, soon = {"accuracy": [0.5] * 9 + [0.7] * 5}, {"accuracy": [0.5] * 3 + [0.7] * 5}
        >>> in_time(late, {"target": 0.6, "give_up": 8}), in_time(soon, {"target": 0.6, "give_up": 8})
        (None, 4)
    """
    reached = first_round(outcome["accuracy"], settings["target"], SMOOTH)
    return reached if reached is not None and reached <= settings["give_up"] else None


def _share(record: TrialRecord) -> tuple[int, int | None]:
    """Return the largest share that can have reached the target in time, and the round (None: not known).

    Records of before the accuracy was averaged stopped at a share whose average may reach the target too late.
    Then the share is below that one.
    """
    share, shares = record.outcome["utilization"], record.settings["shares"]
    if share is None:
        return 0, None
    reached = in_time(record.outcome, record.settings)
    if reached is None:
        return max((other for other in shares if other < share), default=0), None
    return share, reached


def _seeds(records: TrialRecords) -> list[int]:
    """Return the seeds that have records."""
    return sorted({record.settings["seed"] for record in records.values()})


def _utilization(record: TrialRecord) -> str:
    """Return the utilization with the rounds to the target."""
    outcome = record.outcome
    if not record.finished:
        return f"cut off at {outcome['tried'][-1]['share']} %"
    share, reached = _share(record)
    if reached is None:
        return f"below {outcome['utilization'] or outcome['tried'][-1]['share']} %"
    return f"{share} % ({reached})"


def _point(records: TrialRecords, device: str, name: str) -> GridPoint | None:
    """Return the runs of a method beside a device that reached the target in time."""
    runs = [run for seed in _seeds(records) if (run := records.get(f"{device}/{name}/seed{seed}")) is not None]
    reached = [run for run in runs if run.finished and run.outcome["utilization"] is not None]
    return GridPoint("", tuple(reached)) if reached else None


def _table(records: TrialRecords, scale: Scale) -> Table:
    rows = []
    for device, methods in PAPER.items():
        for name, (share, rounds, accuracy) in methods.items():
            runs = [
                run for seed in _seeds(records) if (run := records.get(f"{device}/{name}/seed{seed}")) is not None
            ]
            ours = ", ".join(map(_utilization, runs)) or "-"
            point = _point(records, device, name)
            final = "-" if point is None else point.percent()
            rows.append((device, name, f"{ours} / {share} % ({rounds})", f"{final} / {accuracy:.2f}"))
    columns = ("nine of", "method", "utilization (rounds) ours / paper", "accuracy % ours / paper")
    return Table(columns, tuple(rows))


def _claims(records: TrialRecords) -> list[Verdict]:
    parts = []
    for seed in _seeds(records):
        end = f"/seed{seed}"
        whole = {name.removesuffix(end): r for name, r in records.items() if name.endswith(end) and r.finished}
        if whole:
            parts.append(whole)
    verdicts = [agreed([judge_one(part) for part in parts or [{}]]) for judge_one in (_full_use, _falls)]
    for device in PAPER:
        verdicts += _beside(records, device)
    return verdicts


def _beside(records: TrialRecords, device: str) -> list[Verdict]:
    """Judge utilization and accuracy beside one device, seed by seed."""
    runs = [
        [records.get(f"{device}/{name}/seed{seed}") for name in ("fedagrac", "fednova")]
        for seed in _seeds(records)
    ]
    shares = [(_share(a)[0], _share(b)[0]) for a, b in runs if a and b and a.finished and b.finished]
    more, less = sum(a > b for a, b in shares), sum(a < b for a, b in shares)
    claim = f"{device}: FedaGrac can use more of the fast device than FedNova"
    texts = [(_utilization(a), _utilization(b)) for a, b in runs if a and b and a.finished and b.finished]
    numbers = " against ".join(", ".join(pair[k].partition(" (")[0] for pair in texts) or "-" for k in (0, 1))
    ours, theirs = (_point(records, device, name) for name in ("fedagrac", "fednova"))
    ends = f"{device}: FedaGrac ends with a better accuracy than FedNova"
    return [decide(claim, of_signs(more, less, len(shares), "more"), numbers), compare_means(ends, ours, theirs)]


def _shares(records: TrialRecords, method: str) -> dict[str, int]:
    """Return the utilization on every device with a record; 0 where no share was small enough."""
    runs = {device: records.get(f"{device}/{method}") for device in PAPER}
    return {device: _share(run)[0] for device, run in runs.items() if run is not None}


def _full_use(records: TrialRecords) -> Verdict:
    claim = "FedaGrac reaches 60 % in time at 100 % utilization beside every device"
    shares = _shares(records, "fedagrac")
    numbers = ", ".join(f"{device}: {share} %" for device, share in shares.items()) or "-"
    if any(share != 100 for share in shares.values()):
        return Verdict(claim, "does not hold", numbers)
    return Verdict(claim, "holds" if len(shares) == len(PAPER) else "not decided", numbers)


def _falls(records: TrialRecords) -> Verdict:
    claim = "FedNova's utilization falls as the nine devices get slower"
    shares = _shares(records, "fednova")
    numbers = ", ".join(f"{device}: {share} %" for device, share in shares.items()) or "-"
    if len(shares) < len(PAPER):
        return Verdict(claim, "not decided", numbers)
    values = list(shares.values())
    good = values == sorted(values) and values[0] < values[-1]
    return Verdict(claim, "holds" if good else "does not hold", numbers)


RECIPE = Recipe(
    name="table2",
    title="How much of one RTX 3080 Ti is of use beside nine slower devices: Fashion-MNIST, 2-layer CNN",
    assumptions=(
        "the paper does not state throughputs. Here they are the vendors' peaks in single precision, so an RTX "
        "3080 Ti makes 710 steps while a Raspberry Pi 4 makes one (Jetson Nano 144, GTX 1080 Ti 3.0, RTX 2080 "
        "Ti 2.5)",
        "slow devices run 5 steps a round, so that 60 % takes some tens of rounds beside the GTX cards, as in the "
        "paper; with 1 step it was not reached in 50",
        "a share of the fast device's capacity is that share of its steps",
        "heterogeneous data: Dirichlet(0.3) over labels; batch size 25",
        "FedaGrac: lambda = 0.05 (lambda = 1 diverged with 710 steps on the fast device and 1 on the others), "
        "first gradient over a local epoch",
        f"60 % counts as reached when the mean accuracy over {SMOOTH} rounds reaches it, within 50 rounds. The "
        "records so far stopped at the first share with a single round at 60 % in time; where the mean is later, "
        "the utilization is below that share, and no smaller one was tried",
        "accuracy: mean of the last 10 of 100 rounds at the share where the search stopped. 3 seeds; claims about "
        "several devices are judged by the sign test over the seeds, which three cannot decide; the smaller "
        "scales run one",
        "quick: logistic regression with eta 0.005 in place of the CNN, 2 steps on slow devices, 60 % within 10 "
        "rounds, accuracy after 20, shares 100, 50, 25, 10 %. FedNova's share depends on that limit: at 100 % "
        "it first reaches 60 % in round 11 beside the Raspberry Pi and in round 10 beside the Jetson Nano",
        "medium: the ratios to the two boards divided by 10 (71 and 14), shares 100, 75, 50, 25, 10, 5 %",
    ),
    trials=_trials,
    table=_table,
    claims=_claims,
    run=one_by_one(search),
)
