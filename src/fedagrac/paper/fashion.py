"""What Table 1 and the figures of lambda and of the estimators share: Fashion-MNIST on 10 clients."""

from __future__ import annotations

from typing import Any, Literal

from fedagrac.paper.authors import SEED, uniform_steps
from fedagrac.paper.recipe import Scale

__all__ = [
    "ASSUMPTIONS",
    "AUTHORS_SPLIT",
    "AUTHORS_STEPS",
    "MORE_SPLITS",
    "PRESPLIT",
    "SPLITS",
    "STEPS",
    "fashion",
    "first_epoch",
    "start_of",
    "step_counts",
]

PRESPLIT = "dirichlet-0.1"
"""The authors' code cuts Fashion-MNIST into these shares beforehand."""

SPLITS: dict[str, dict[str, Any]] = {
    PRESPLIT: {"partition": {"kind": "dirichlet", "alpha": 0.1, "balance": True, "least": 10}, "seed": 1234},
    "iid": {"partition": {"kind": "iid"}},
    "shards-2": {"partition": {"kind": "shards", "classes": 2}},
    "dirichlet-0.3": {"partition": {"kind": "dirichlet", "alpha": 0.3}},
}
"""How the data are split; where no seed is named, the run's seed decides the split."""

AUTHORS_SPLIT: dict[str, Any] = {"partition": {"kind": "authors-dirichlet", "alpha": 0.1}, "seed": SEED}
"""The authors' own Dirichlet(0.1), sample by sample."""

MORE_SPLITS: dict[str, dict[str, Any]] = {
    "authors": AUTHORS_SPLIT,
    "dirichlet-0.1-redrawn": {"partition": SPLITS[PRESPLIT]["partition"]},
}
"""Splits that tell whether the one split of `PRESPLIT` is special: the authors' own, and one for every seed."""

AUTHORS_STEPS = uniform_steps(100, 400, clients=10)
"""The authors' own draw of K_i ~ Uniform(100, 400)."""

STEPS = {"constant": "K = 100", "linear": "K = 250 to 1600", "uniform": "K ~ Uniform(100, 400)"}
"""The step counts by name: constant ones and two kinds of step asynchronism."""

RATES = {"lr": 0.001, "cnn": 0.03}
"""The paper's learning rates by model."""

EPOCH = 240
"""Steps in a local epoch of average length: 60,000 pictures, 10 clients, batches of 25."""

ASSUMPTIONS = (
    "10 clients and batches of 25 (not stated for Fashion-MNIST)",
    "non-iid data: Dirichlet(0.1) as the authors' code splits Fashion-MNIST beforehand: a client that holds its "
    "equal share gets nothing more, and every client holds at least as many samples as there are classes. The "
    "partition's seed is 1234 for every run, as in their code, but our generator is another one, so the shares "
    "are not theirs sample by sample (those are rebuilt for the panel authors-lr of figure-estimators and for "
    "rows of table1). So these intervals do not include how splits differ. The runs' seeds vary the batches, "
    "the first model of the CNN (logistic regression starts at zero) and K_i where they are drawn: with "
    "logistic regression and K = 100 or 250 to 1600 the batches alone",
    "step asynchronism: K_i = 100 + 150 i for i = 1 to 10 (a line that is commented out in the paper's source), "
    "and K_i ~ Uniform(100, 400) drawn once per client, as the authors' code offers",
)


def step_counts(kind: str, part: int = 1) -> dict[str, Any]:
    """Return the step counts of a name in `STEPS`, divided by `part`.

    Examples:
        >>> step_counts("linear"), step_counts("constant", part=5)
        ({'kind': 'linear', 'first': 250, 'increment': 150}, {'kind': 'constant', 'steps': 20})
        >>> step_counts("uniform")
        {'kind': 'uniform', 'lo': 100, 'hi': 400, 'mode': 'fixed'}
    """
    if kind == "linear":
        return {"kind": "linear", "first": 250 // part, "increment": 150 // part}
    if kind == "uniform":
        return {"kind": "uniform", "lo": 100 // part, "hi": 400 // part, "mode": "fixed"}
    return {"kind": "constant", "steps": 100 // part}


def first_epoch(part: int = 1) -> int | Literal["epoch"]:
    """Return how many steps the first gradient averages: a local epoch, divided as the step counts are.

    Examples:
        >>> first_epoch(), first_epoch(5)
        ('epoch', 48)
    """
    return "epoch" if part == 1 else EPOCH // part


def start_of(model: str, scale: Scale) -> dict[str, str]:
    """Return how nu starts: at quick the CNN's starts at zero, because full gradients cost more than its rounds.

    Examples:
        >>> start_of("cnn", "quick"), start_of("cnn", "paper")
        ({'init': 'zeros'}, {})
    """
    return {"init": "zeros"} if (model, scale) == ("cnn", "quick") else {}


def fashion(
    model: str, split: str, steps: dict[str, Any], rounds: int, algorithm: dict[str, Any]
) -> dict[str, Any]:
    """Return the settings of a run of "lr" or "cnn", at the paper's learning rate unless the algorithm names one.

    `seeded` adds the seeds.
    """
    return {
        "data": {"name": "fashion-mnist", "clients": 10, **(SPLITS | MORE_SPLITS)[split]},
        "model": {"name": "logistic", "features": 784, "classes": 10} if model == "lr" else {"name": "cnn"},
        "algorithm": {"lr": RATES[model], **algorithm},
        "steps": steps,
        "batch_size": 25,
        "rounds": rounds,
        "tf32": model == "cnn",
    }
