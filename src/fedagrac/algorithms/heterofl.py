"""HeteroFL: weak devices train narrower sub-networks of the same model.

Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients", ICLR 2021.

A client of width r holds the leading ceil(r n) of the n channels of every hidden layer. The module's input and its
output are whole; which layers read and make them follows from the forward pass (`Layout.flow`). A coordinate of
the global model becomes the weighted mean over the clients that hold it, and stays as it is if none does. While a
client trains, its hidden layers divide their output by r (the scaler), and the scores of classes that it does not
hold are 0 and do not train (the masked loss).

The sub-network is a mask over the vector of the whole model, so a narrow client costs this machine as much as a
wide one. The simulated clock counts the share of the coordinates that it holds. Under unequal steps, fast clients
weigh more in the mean, as in FedAvg.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from fedagrac.algorithms.base import Cost, Rows, State, Stateless, Traits, average, known_layout
from fedagrac.core.layout import INPUT, Flow, Layout, Parameter
from fedagrac.core.local import Plan, Result
from fedagrac.errors import InputError, flag, positive

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.core.cohort import Cohort
    from fedagrac.core.robust import Aggregation

__all__ = ["HeteroFL"]

PRODUCTS = ("Linear", "Conv1d", "Conv2d", "Conv3d")
"""Layers whose weight is [channels out, channels in, ...]."""

PER_CHANNEL = ("GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "PReLU")
"""Layers with numbers for each channel, or one for all."""

MIXING_LAYERS = (
    "LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm",
    *(f"InstanceNorm{dims}d with moving statistics" for dims in (1, 2, 3)),
    "Softmax", "Softmax2d", "LogSoftmax", "Softmin", "GLU", "ChannelShuffle", "PixelShuffle", "PixelUnshuffle",
)  # fmt: skip
"""Layers that mix channels, move them, or keep statistics of them: channels that a client lacks would count.

With parameters of their own, some are known all the same (`PER_CHANNEL`)."""

MIXING_FUNCTIONS = (
    "layer_norm", "rms_norm", "group_norm", "batch_norm", "softmax", "log_softmax", "softmin", "glu", "cat",
    "concat", "concatenate", "hstack", "channel_shuffle", "pixel_shuffle", "pixel_unshuffle",
)  # fmt: skip
"""Functions and methods that do so."""


@dataclass(frozen=True)
class HeteroFL(Stateless):
    """Start from m_i o x~ and train the coordinates in m_i; x_j = the mean of x_ij over those who hold j.

    Attributes:
        levels: the widths, above 0 and at most 1. Client i has the width levels[i mod n].
        scaler: whether hidden layers divide their output by the width while a client trains.
        masked_loss: whether classes that a client does not hold are left out of its loss.

    Examples:
        >>> from fedagrac.core.layout import Layout, Parameter
        >>> layout = Layout((Parameter("0.weight", (2, 1), "Linear"), Parameter("1.weight", (1, 2), "Linear")))
        >>> HeteroFL(lr=0.1).held(layout, width=0.5).tolist()
        [True, False, True, False]
    """

    levels: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    scaler: bool = True
    masked_loss: bool = True

    cites: ClassVar[tuple[str, ...]] = ("heterofl",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "heterofl"

    @property
    def traits(self) -> Traits:
        """The server keeps x alone. The masked loss needs the classes that clients hold."""
        return Traits(labels=self.masked_loss)

    def check(self) -> None:
        """Check every setting."""
        levels: object = self.levels
        if not isinstance(levels, tuple | list) or not levels:
            raise InputError("levels", levels, "widths above 0 and at most 1, such as (1.0, 0.5, 0.25)")
        for i, level in enumerate(levels):
            if positive(f"levels[{i}]", level) > 1:
                raise InputError(f"levels[{i}]", level, "a width above 0 and at most 1")
        object.__setattr__(self, "levels", tuple(float(level) for level in levels))
        flag("scaler", self.scaler)
        flag("masked_loss", self.masked_loss)

    def check_model(self, layout: Layout, aggregate: Aggregation | None) -> None:
        """Refuse robust rules, and layers whose sub-networks are not known."""
        if aggregate is not None:
            accepted = "no robust rule: different clients hold different coordinates, so they cannot be compared"
            raise InputError("aggregate", aggregate, accepted)
        if not self.masked_loss and min(self.levels) == 1:
            return
        if layout.frozen:
            accepted = "a model whose parameters all train: sub-networks and scores of frozen layers are not known"
            raise InputError(f"model parameter {layout.frozen[0]}", "frozen", accepted)
        if layout.tied:
            accepted = (
                "parameters of one layer each: a tied one would be cut along the channels of one of its layers"
            )
            raise InputError(f"model parameter {layout.tied[0]}", "shared with another layer", accepted)
        hidden = _Hidden.of(layout)
        for width in set(self.levels):
            self.held(layout, width)
        if layout.flow is not None:
            _refuse_apart(layout, layout.flow())
            if min(self.levels) < 1:
                _refuse_mixing(layout, layout.flow(), hidden)

    def width(self, client: int) -> float:
        """Return the width of a client."""
        return self.levels[int(client) % len(self.levels)]

    def held(self, layout: Layout, width: float) -> Tensor:
        """Return which coordinates a client of this width holds, [d]."""
        if width == 1:
            return torch.ones(layout.size, dtype=torch.bool)
        return _held(layout.parameters, _Hidden.of(layout), width)

    def masks(self, cohort: Cohort, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return m_i and the factors of the scaler for each member, [m, d]; None if all clients hold all.

        Processes that share a simulation decide alike, whichever members they run.
        """
        layout = known_layout(cohort.layout, x)
        widths = [self.width(client) for client in cohort.clients]
        held = {width: self.held(layout, width) for width in set(self.levels)}
        scores = self._scores(cohort, layout)
        if scores is None and all(bool(rows.all()) for rows in held.values()):
            return None
        mask = torch.ones((len(cohort), len(x)), dtype=torch.bool) if scores is None else scores
        for row, width in enumerate(widths):
            mask[row] &= held[width]
        factors, hidden = torch.ones(mask.shape, dtype=x.dtype), _Hidden.of(layout)
        inverse = (1 / torch.tensor(widths, dtype=torch.float64))[:, None].to(x.dtype)
        for parameter, span in layout.spans():
            if self.scaler and hidden.scales(parameter):
                factors[:, span] = inverse
        return mask.to(x.device, x.dtype), factors.to(x.device)

    def _scores(self, cohort: Cohort, layout: Layout) -> Tensor | None:
        """Return which coordinates do not make scores of absent classes, [m, d]; None if targets have none."""
        labels = None if cohort.labels is None or not self.masked_loss else cohort.labels(cohort.clients)
        if labels is None:
            return None
        last = _Hidden.of(layout).last
        sizes = {p.shape[0] for p in layout.parameters if p.layer in last}
        classes = sizes.pop() if len(sizes) == 1 else 1
        if classes == 1 or labels.shape[1] > classes:
            return None
        held = torch.zeros((len(cohort), classes), dtype=torch.bool)
        held[:, : labels.shape[1]] = torch.from_numpy(labels)
        kept = torch.ones((len(cohort), layout.size), dtype=torch.bool)
        for parameter, span in layout.spans():
            if parameter.layer in last:
                kept[:, span] = held.repeat_interleave(parameter.size // classes, dim=1)
        return kept

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan of sub-networks."""
        plan = Plan.of(cohort.steps, self.lr_in(cohort), local=self.local)
        masks = self.masks(cohort, state["x"])
        if masks is None:
            return plan
        mask, factors = masks
        scale = factors if self.scaler and bool((factors != 1).any()) else None
        return replace(plan, start=mask * state["x"], mask=mask, scale=scale)

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return the mean of every coordinate over the clients that hold it."""
        if plan.mask is None:
            return {"x": average(cohort, result)}, {}
        weight = cohort.sum(cohort.weights, plan.mask)
        total = cohort.sum(cohort.weights, plan.mask * result.models)
        return {"x": torch.where(weight > 0, total / weight, state["x"])}, {}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the sub-network down, and up. A step takes the share of the coordinates held.

        Without a layout it is that of the whole model. Scores of absent classes count as held.
        """
        if cohort.layout is None:
            return Cost.of(cohort, down=1, up=1)
        number = {width: int(self.held(cohort.layout, width).sum()) for width in set(self.levels)}
        held = np.array([number[self.width(client)] for client in cohort.clients])
        moved = held * cohort.number_bytes
        return Cost.of(cohort, down_bytes=moved, up_bytes=moved, step_work=held / cohort.layout.size)


@dataclass(frozen=True)
class _Hidden:
    """Which axes of a model's parameters are hidden channels: all but the input and the output.

    Attributes:
        whole: the layers that read whole channels: the module's input or its output.
        last: the layers that make the output.
    """

    whole: frozenset[str]
    last: frozenset[str]

    @classmethod
    def of(cls, layout: Layout) -> _Hidden:
        """Return the layers at the input and at the output; refuse a module that cannot be followed.

        In a layout without a module they are the first and the last layer with weights.
        """
        if layout.flow is not None:
            return _hidden(layout.flow())
        reading = [p.layer for p in layout.parameters if p.kind in (*PRODUCTS, "Embedding")]
        making = [p.layer for p in layout.parameters if p.kind in PRODUCTS]
        return cls(frozenset(reading[:1]), frozenset(making[-1:]))

    def scales(self, parameter: Parameter) -> bool:
        """Return whether the scaler divides the output of the parameter's layer."""
        return parameter.kind in (*PRODUCTS, "Embedding") and parameter.layer not in self.last

    def held(self, parameter: Parameter, width: float) -> Tensor:
        """Return which numbers of a parameter a client of this width holds, like the parameter."""
        held = torch.ones(parameter.shape, dtype=torch.bool)
        for axis, whole in self._axes(parameter).items():
            if not whole:
                held.narrow(axis, kept := _kept(parameter, axis, width), parameter.shape[axis] - kept).fill_(False)
        return held

    def _axes(self, parameter: Parameter) -> Mapping[int, bool]:
        """Return the axes of a parameter that are channels, and whether each is whole."""
        kind, dims = parameter.kind, len(parameter.shape)
        reads_whole, makes_output = parameter.layer in self.whole, parameter.layer in self.last
        if kind in PRODUCTS and dims == 1:
            return {0: makes_output}
        if kind in PRODUCTS and parameter.groups == 1:
            return {0: makes_output, 1: reads_whole}
        if kind in PRODUCTS and parameter.shape[1] == 1:  # a depthwise convolution
            return {0: makes_output}
        if kind == "Embedding":
            return {1: makes_output}
        if kind in PER_CHANNEL and dims == 1:
            return {0: reads_whole or parameter.shape[0] == 1}
        known = ", ".join((*PRODUCTS, "depthwise convolutions", "Embedding", *PER_CHANNEL))
        accepted = f"layers of which narrow sub-networks are known, {known}, or levels of 1.0 alone"
        raise InputError(f"model parameter {parameter.name}", kind, accepted)


@functools.lru_cache(maxsize=16)
def _hidden(flow: Flow) -> _Hidden:
    """Return the layers at the input and at the output of a module; refuse one that cannot be followed."""
    if flow.unknown:
        accepted = f"a module that torch.fx can trace, so that its output layer is known; it says: {flow.unknown}"
        raise InputError("model", "an unknown order of layers", accepted)
    ends, reads = flow.output | {INPUT}, dict[str, frozenset[str]]()
    for call in flow.calls:
        if call.layer is not None:
            reads[call.layer] = reads.get(call.layer, frozenset()) | call.reads
    return _Hidden(frozenset(layer for layer, read in reads.items() if read <= ends), flow.output - {INPUT})


def _refuse_apart(layout: Layout, flow: Flow) -> None:
    """Refuse a matrix of weights that the module uses outside its layer, such as tied weights in a function."""
    for parameter in layout.parameters:
        if parameter.name in flow.apart and len(parameter.shape) > 1:
            accepted = (
                f"weights that their own layer alone uses, such as {PRODUCTS[0]}: their channels are not known"
            )
            raise InputError(f"model parameter {parameter.name}", "used outside its layer", accepted)


def _refuse_mixing(layout: Layout, flow: Flow, hidden: _Hidden) -> None:
    """Refuse a module in which absent channels would count, or whole channels are read together with cut ones."""
    ends, with_parameters = hidden.last | {INPUT}, set(layout.layers)
    for call in flow.calls:
        field = "model" if call.layer is None else f"model layer {call.layer}"
        mixes = call.kind in (MIXING_FUNCTIONS if call.layer is None else MIXING_LAYERS)
        known = call.layer in with_parameters and call.kind in PER_CHANNEL
        if mixes and not known and not call.reads <= ends:
            accepted = (
                "layers that treat hidden channels one by one: channels that a client lacks would count here"
            )
            raise InputError(field, call.kind, accepted)
        if call.layer in with_parameters - hidden.whole and call.reads & ends:
            accepted = "layers that read hidden channels, or the module's input or output, but not both"
            raise InputError(field, f"{call.kind} of {', '.join(sorted(call.reads))}", accepted)


@functools.lru_cache(maxsize=16)
def _held(parameters: tuple[Parameter, ...], hidden: _Hidden, width: float) -> Tensor:
    """Return which coordinates a client of this width holds, [d]. All rounds share it; do not change it."""
    return torch.cat([hidden.held(parameter, width).reshape(-1) for parameter in parameters])


def _kept(parameter: Parameter, axis: int, width: float) -> int:
    """Return how many of the channels along an axis a client of this width holds: whole groups of them."""
    channels = parameter.shape[axis]
    kept = math.ceil(width * channels)
    in_group = channels // parameter.groups if parameter.kind == "GroupNorm" else 1
    if kept % in_group:
        accepted = f"widths at which {channels} channels in groups of {in_group} are cut between groups"
        raise InputError(f"levels of {parameter.layer}", width, accepted)
    return kept
