"""Loss and accuracy of a module over samples, in one pass and for each group of samples.

The loss is an opaque mean. The means of chunks are weighted by what they average over, so that a result does not
depend on the chunks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from fedagrac.data.trees import map_leaves
from fedagrac.engines.lanes.pools import TilingPools
from fedagrac.rounds.metrics import class_dimension, hits

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedagrac.engines.workload import Workload

__all__ = ["CHUNKS", "LossFacts", "Measurement", "Samples", "bound", "joined", "measure"]

CHUNKS = {"cpu": 512, "cuda": 4096}
"""Samples per batch. On a CPU, 512 fit its caches and take half the time of 4096 for a small CNN."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples to measure a model on, one group after another.

    Attributes:
        load: returns the module's inputs and the targets of samples start..stop, on the device.
        sizes: the samples of each group. The groups are clients, or the whole set is one group.
    """

    load: Callable[[int, int], tuple[Any, Any]]
    sizes: npt.NDArray[np.int64]

    def group(self, number: int) -> Samples:
        """Return the samples of one group."""
        first = int(self.sizes[:number].sum())
        return Samples(lambda start, stop: self.load(first + start, first + stop), self.sizes[number : number + 1])


@dataclass(frozen=True, eq=False)
class LossFacts:
    """What is known of a loss.

    Attributes:
        ignore_index: the target of positions that do not count; None if all count.
        weight: the weight of each class in the mean; None for equal ones.
        from_torch: whether it is a loss of torch, whose classes are dimension 1 of the output.
        terms: the loss of each position, of which the mean is taken; None if only the mean is known.

    Examples:
        >>> LossFacts.of(functools.partial(cross_entropy, ignore_index=0)).ignore_index
        0
        >>> LossFacts.of(nn.CrossEntropyLoss()).ignore_index
        -100
        >>> LossFacts.of(lambda output, target: output.mean()).ignore_index
    """

    ignore_index: int | None = None
    weight: Tensor | None = None
    from_torch: bool = False
    terms: Callable[[Tensor, Tensor], Tensor] | None = None

    @classmethod
    def of(cls, loss: Any) -> LossFacts:
        """Return the facts of a loss: cross-entropy, NLL, a partial of these, their modules, or any other."""
        function: Any = loss
        options: dict[str, Any] = {}
        known = True
        if isinstance(loss, functools.partial):
            function, options, known = loss.func, loss.keywords, not loss.args
        elif isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
            function = cross_entropy if isinstance(loss, nn.CrossEntropyLoss) else nll_loss
            options = {name: getattr(loss, name) for name in ("ignore_index", "weight", "reduction")}
            if isinstance(loss, nn.CrossEntropyLoss):
                options["label_smoothing"] = loss.label_smoothing
            known = type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss)  # another class may compute something else
        if function not in (cross_entropy, nll_loss):
            return cls()
        terms = None
        if known and options.get("reduction", "mean") == "mean":
            terms = functools.partial(function, **{**options, "reduction": "none"})
        return cls(options.get("ignore_index", -100), options.get("weight"), from_torch=True, terms=terms)

    def masses(self, target: Any) -> Tensor | None:
        """Return how much each sample weighs in the mean of the loss, [n]; None if all weigh the same."""
        if self.ignore_index is None or not isinstance(target, Tensor) or target.is_floating_point():
            return None
        counted = target != self.ignore_index
        if self.weight is None:
            return _by_sample(counted).double()
        return _by_sample(self.weight[torch.where(counted, target, 0)].double() * counted)

    def scores(self, output: Any, target: Any) -> tuple[Tensor, Tensor] | None:
        """Return how many positions of each sample are right and how many count; None without classes."""
        dim = class_dimension(output, target, self.from_torch)
        if dim is None:
            return None
        right, counted = hits(output, target, self.ignore_index, 1, dim)
        return _by_sample(right), _by_sample(counted)


def _by_sample(values: Tensor) -> Tensor:
    """Return the sum of each sample's values, [n]."""
    return values.flatten(1).sum(1) if values.ndim > 1 else values


@dataclass(frozen=True, eq=False)
class Measurement:
    """The sums of a pass over samples, by group.

    Attributes:
        samples: the samples of each group.
        losses: the sum of the loss over what it averages.
        masses: what the loss averages over: samples, or the positions that count.
        right, counted: the positions that are right and those that count; None if the task is not classification.
        outputs: the output and the target of every chunk, if kept.
    """

    samples: npt.NDArray[np.int64]
    losses: npt.NDArray[np.float64]
    masses: npt.NDArray[np.float64]
    right: npt.NDArray[np.int64] | None
    counted: npt.NDArray[np.int64] | None
    outputs: list[tuple[Any, Any]]

    @property
    def loss(self) -> float | None:
        """The mean loss over all groups; None if nothing counts."""
        mass = float(self.masses.sum())
        return float(self.losses.sum()) / mass if mass else None

    @property
    def accuracy(self) -> float | None:
        """The accuracy over all groups; None if nothing counts or the task is not classification."""
        if self.right is None or self.counted is None or not self.counted.any():
            return None
        return int(self.right.sum()) / int(self.counted.sum())

    @property
    def group_losses(self) -> npt.NDArray[np.float64]:
        """The mean loss of each group; NaN if nothing counts."""
        return _ratios(self.losses, self.masses)

    @property
    def group_accuracies(self) -> npt.NDArray[np.float64] | None:
        """The accuracy of each group, NaN if nothing counts; None if the task is not classification."""
        return None if self.right is None or self.counted is None else _ratios(self.right, self.counted)


def joined(parts: Sequence[Measurement]) -> Measurement:
    """Return the groups of several measurements as one measurement, without outputs."""
    classified = any(part.right is not None for part in parts)

    def counts(values: npt.NDArray[np.int64] | None, groups: int) -> npt.NDArray[np.int64]:
        return np.zeros(groups, np.int64) if values is None else values

    right, counted = (
        np.concatenate([counts(getattr(part, name), len(part.samples)) for part in parts])
        for name in ("right", "counted")
    )
    return Measurement(
        samples=np.concatenate([part.samples for part in parts]),
        losses=np.concatenate([part.losses for part in parts]),
        masses=np.concatenate([part.masses for part in parts]),
        right=right if classified else None,
        counted=counted if classified else None,
        outputs=[],
    )


def _ratios(parts: npt.NDArray[Any], wholes: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return parts / wholes, NaN where the whole is 0."""
    ratios = np.full(len(wholes), np.nan)
    np.divide(parts, wholes, out=ratios, where=wholes > 0)
    return ratios


@contextlib.contextmanager
def bound(workload: Workload, x: Tensor, buffers: Tensor | None = None) -> Iterator[None]:
    """Run a block with the module at x, with these moving buffers, in evaluation mode and without autograd."""
    workload.model.bind(x)
    workload.model.buffers.put(buffers)
    workload.model.eval()
    pools = TilingPools() if x.device.type == "cpu" else contextlib.nullcontext()
    with torch.inference_mode(), pools:
        yield


def measure(workload: Workload, samples: Samples, keep: bool = False) -> Measurement:
    """Run the bound module over samples, and return the sums of each group.

    The module runs once over each chunk. The loss is taken of each group's part of the output; of a loss of torch,
    in one call for all groups. A part without a position that counts is left out.

    Args:
        workload: the problem.
        samples: the samples and their groups.
        keep: whether to keep the outputs.
    """
    facts = LossFacts.of(workload.loss)
    ends = np.cumsum(samples.sizes)
    total, chunk = int(ends[-1]), CHUNKS.get(workload.model.device.type, 4096)
    kept: list[tuple[Any, Any]] = []
    # numbers stay on the device until the end, because reading one would wait for every chunk
    losses, cuts, masses, scores = [], [0], [], []
    for start in range(0, total, chunk):
        stop = min(start + chunk, total)
        inputs, targets = samples.load(start, stop)
        output = workload.call(inputs)
        inside = ends[np.searchsorted(ends, start, "right") : np.searchsorted(ends, stop, "left")]
        pieces = np.unique([start, *inside, stop]) - start
        masses.append(facts.masses(targets))
        losses.append(_piece_losses(workload.loss, facts.terms, output, targets, masses[-1], pieces))
        cuts += (start + pieces[1:]).tolist()
        scores.append(facts.scores(output, targets))
        if keep:
            kept.append((output, targets))
    return _summed(samples.sizes, losses, np.array(cuts), masses, scores, kept)


def _piece_losses(
    loss: Callable[[Any, Any], Tensor],
    terms: Callable[[Tensor, Tensor], Tensor] | None,
    output: Any,
    targets: Any,
    masses: Tensor | None,
    cuts: npt.NDArray[np.int64],
) -> Tensor:
    """Return the mean loss of each piece of a chunk, which is cut into pieces at `cuts`."""
    if len(cuts) > 2 and terms is not None and masses is not None:  # one call, however many pieces
        sizes = torch.from_numpy(np.diff(cuts)).to(masses.device)
        piece = torch.repeat_interleave(torch.arange(len(sizes), device=masses.device), sizes)
        sums = torch.zeros(2, len(sizes), dtype=torch.float64, device=masses.device)
        losses = _by_sample(terms(output, targets).double())
        sums.index_add_(1, piece, torch.stack([losses, masses]))
        return sums[0] / sums[1]
    means = []
    for a, b in itertools.pairwise(cuts.tolist()):
        cut = functools.partial(_cut, start=a, stop=b, of=int(cuts[-1]))
        part = (output, targets) if len(cuts) == 2 else map_leaves(cut, (output, targets))
        means.append(loss(*part).detach().double().reshape(1))
    return torch.cat(means)


def _cut(leaf: Any, start: int, stop: int, of: int) -> Any:
    """Return rows of a leaf that has one row for each of a chunk's samples; any other leaf is left as it is."""
    rows = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == of
    return leaf[start:stop] if rows else leaf


def _summed(
    sizes: npt.NDArray[np.int64],
    losses: list[Tensor],
    cuts: npt.NDArray[np.int64],
    masses: list[Tensor | None],
    scores: list[tuple[Tensor, Tensor] | None],
    kept: list[tuple[Any, Any]],
) -> Measurement:
    """Return the sums of each group.

    Args:
        sizes: the samples of each group.
        losses: the mean loss of each part of a chunk that belongs to one group.
        cuts: where the parts begin, and the end of the last one.
        masses: how much each sample of a chunk weighs in the loss.
        scores: the positions of each sample of a chunk that are right, and those that count.
        kept: the output and the target of every chunk.
    """
    ends = np.cumsum(sizes)

    def per_group(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        sums = np.concatenate([[0], np.cumsum(values)])
        return np.diff(sums[np.concatenate([[0], ends])])

    known = [mass for mass in masses if mass is not None]
    weighs = torch.cat(known).cpu().numpy() if known else np.ones(int(ends[-1]))
    part_masses = np.diff(np.concatenate([[0.0], np.cumsum(weighs)])[cuts])
    part_losses = torch.cat(losses).cpu().numpy() if losses else np.zeros(0)
    group_losses = np.zeros(len(sizes))
    counts = part_masses > 0
    groups = np.searchsorted(ends, cuts[:-1], "right")[counts]
    np.add.at(group_losses, groups, (part_losses[counts] * part_masses[counts]))
    right = counted = None
    found = [score for score in scores if score is not None]
    if found and len(found) == len(scores):
        right, counted = (
            per_group(torch.cat(values).cpu().numpy().astype(np.int64)) for values in zip(*found, strict=True)
        )
    return Measurement(np.asarray(sizes), group_losses, per_group(weighs), right, counted, kept)
