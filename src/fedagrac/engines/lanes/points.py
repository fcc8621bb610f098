"""Points beside the models of lanes at which gradients are taken, parameter by parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.core.local import Plan
    from fedagrac.models.vector import VectorModel

__all__ = ["Points", "per_lane"]


class Points(NamedTuple):
    """Where gradients are taken: at scale o (x + p), at x + rho g / |g|, or at x and x~.

    Attributes:
        beside: p, one block [m, ...] for each parameter; None for 0.
        scale: the scale, like p; None for 1.
        ascent: rho of each lane, [m]; None for 0.
        anchor: x~, like p, whose gradient is subtracted; None for none.
    """

    beside: list[Tensor] | None = None
    scale: list[Tensor] | None = None
    ascent: Tensor | None = None
    anchor: list[Tensor] | None = None

    @classmethod
    def of(cls, plan: Plan, rows: Tensor, model: VectorModel, centers: Tensor) -> Points | None:
        """Return the points of some rows of a plan; None if gradients are those at x."""
        if plan.at_x:
            return None
        beside, scale = (
            None if values is None else list(model.row_views(values[rows]).values())
            for values in (plan.beside, plan.scale)
        )
        ascent = None
        if plan.ascent is not None:
            ascent = torch.as_tensor(plan.ascent, dtype=model.dtype).to(rows.device)[rows]
        anchor = list(model.row_views(centers.contiguous()).values()) if plan.anchored else None
        return cls(beside, scale, ascent, anchor)

    def lanes(self, which: slice | Tensor) -> Points:
        """Return the points of some lanes."""
        beside, scale, anchor = (
            None if blocks is None else [block[which] for block in blocks]
            for blocks in (self.beside, self.scale, self.anchor)
        )
        return Points(beside, scale, None if self.ascent is None else self.ascent[which], anchor)


def per_lane(values: Tensor, rows: Tensor) -> Tensor:
    """Return one number per lane, shaped to multiply rows [m, ...].

    Examples:
        >>> per_lane(torch.tensor([1.0, 2.0]), torch.zeros(2, 3, 4)).shape
        torch.Size([2, 1, 1])
    """
    return values.reshape(-1, *[1] * (rows.ndim - 1))
