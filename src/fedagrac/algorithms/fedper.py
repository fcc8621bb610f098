"""FedPer and FedBN: every client keeps some layers to itself, and the others are averaged.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", 2019 (FedPer). Li,
Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.

A client trains all layers together. It starts from the server's model, with the personal layers that it had at the
end of its last round; in its first round these are those of x_1. Nothing else depends on K_i, so under unequal
steps fast clients weigh more in the shared layers, as in FedAvg.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from fedagrac.algorithms.base import Algorithm, Cost, Rows, State, Traits, average, known_layout
from fedagrac.core.local import Plan, Result
from fedagrac.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.core.cohort import Cohort, Population
    from fedagrac.core.layout import Layout
    from fedagrac.core.robust import Aggregation

__all__ = ["FedBN", "FedPer", "PersonalLayers"]

log = logging.getLogger("fedagrac")


@dataclass(frozen=True)
class PersonalLayers(Algorithm):
    """The base class of algorithms in which some coordinates of x are each client's own."""

    @abstractmethod
    def own_coordinates(self, layout: Layout) -> Tensor:
        """Return which coordinates are personal, [d]."""

    @property
    def traits(self) -> Traits:
        """The server keeps each client's last model, of which only the personal layers are used."""
        return Traits(rows=("own",), personal=True)

    def check_model(self, layout: Layout, aggregate: Aggregation | None) -> None:
        """Refuse names that no layer has."""
        self.own_coordinates(layout)

    def start(self, x: Tensor, population: Population) -> State:
        """Return the model, whose personal layers stay those of x_1. Warn if no layer, or every layer, is."""
        share = self._personal(x, population.layout).double().mean().item()
        if share == 0:
            log.warning("%s: no layer of the model is personal, so this is FedAvg", self.name)
        elif share == 1:
            log.warning("%s: every layer of the model is personal, so clients share nothing", self.name)
        return {"x": x}

    def _personal(self, x: Tensor, layout: Layout | None) -> Tensor:
        """Return which coordinates are personal, on the device of x."""
        return self.own_coordinates(known_layout(layout, x)).to(x.device)

    def enter(self, state: State, cohort: Cohort) -> Rows:
        """Return the server's model, whose personal layers are those of x_1, for each client."""
        return {"own": state["x"].repeat(len(cohort), 1)}

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan that starts from the shared layers of x and the client's own personal layers."""
        plan = Plan.of(cohort.steps, self.lr_in(cohort), local=self.local)
        personal = self._personal(state["x"], cohort.layout)
        return replace(plan, start=torch.where(personal, rows["own"], state["x"])) if personal.any() else plan

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return the weighted mean in the shared coordinates, and every client's own model."""
        shared = ~self._personal(state["x"], cohort.layout)
        if shared.all():
            return {"x": average(cohort, result)}, {"own": result.models}
        x = state["x"].clone()
        if shared.any():
            x[shared] = cohort.sum(cohort.weights, result.models[:, shared])
        return {"x": x}, {"own": result.models}

    def own_models(self, state: State, rows: Rows, layout: Layout) -> Tensor:
        """Return the shared layers of x with each client's personal layers, [m, d]."""
        return torch.where(self._personal(state["x"], layout), rows["own"], state["x"])

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the shared layers down, and up; the whole model if the layout is not known."""
        if cohort.layout is None:
            return Cost.of(cohort, down=1, up=1)
        shared = int((~self.own_coordinates(cohort.layout)).sum()) * cohort.number_bytes
        return Cost.of(cohort, down_bytes=shared, up_bytes=shared)


@dataclass(frozen=True)
class FedPer(PersonalLayers):
    """Start from x~ with own personal layers; x = sum_i omega_i x_i in the shared layers.

    Attributes:
        personal: names of the personal parameters or layers, such as "head" or "blocks.*.norm"; None for
            the last layer. Without any, FedPer is FedAvg.

    Examples:
        >>> from fedagrac.core.layout import Layout, Parameter
        >>> layout = Layout((Parameter("body.weight", (1, 2), "Linear"), Parameter("head.weight", (1,), "Linear")))
        >>> FedPer(lr=0.1).own_coordinates(layout).tolist()
        [False, False, True]
    """

    personal: tuple[str, ...] | None = None

    cites: ClassVar[tuple[str, ...]] = ("fedper",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "fedper"

    def check(self) -> None:
        """Check the names of personal layers. A single name may be given as a text."""
        if isinstance(self.personal, str):
            object.__setattr__(self, "personal", (self.personal,))
        names: object = self.personal
        if names is None:
            return
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) and name for name in names):
            raise InputError("personal", names, 'names of parameters or layers, such as ("head",), or None')
        object.__setattr__(self, "personal", tuple(names))

    def own_coordinates(self, layout: Layout) -> Tensor:
        """Return the coordinates of the layers named, or of the last layer, [d]."""
        names = (layout.layers[-1] or layout.parameters[-1].name,) if self.personal is None else self.personal
        return layout.matching("personal", names)


@dataclass(frozen=True)
class FedBN(PersonalLayers):
    """Start from x~ with own batch normalization; x = sum_i omega_i x_i in the other layers.

    Weights, biases and moving statistics of batch normalization are each client's own. Without such layers FedBN
    is FedAvg.

    Examples:
        >>> FedBN(lr=0.1).traits.own_buffers
        True
    """

    cites: ClassVar[tuple[str, ...]] = ("fedbn",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "fedbn"

    @property
    def traits(self) -> Traits:
        """The server keeps each client's last model, and its moving statistics."""
        return replace(super().traits, own_buffers=True)

    def check(self) -> None:
        """Check nothing: there are no settings."""

    def own_coordinates(self, layout: Layout) -> Tensor:
        """Return the coordinates of batch normalization, [d]."""
        return layout.of_kind("BatchNorm") | layout.of_kind("SyncBatchNorm")
