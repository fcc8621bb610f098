"""Lanes whose batches have different lengths in one step: some of them are at the end of a pass over their data.

The loss is an opaque mean, so nothing can be padded. Lanes of one length run together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.engines.lanes.model import LaneModel
    from fedagrac.engines.lanes.points import Points

__all__ = ["ragged_gradient"]


def ragged_gradient(
    model: LaneModel,
    X: Tensor,
    samples: Tensor,
    shifts: Tensor | None,
    buffers: dict[str, Tensor] | None,
    generators: Sequence[torch.Generator] | None,
    lengths: npt.NDArray[np.int64] | None,
    points: Points | None = None,
    decayed: bool = True,
) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor | None]:
    """Return what `LaneModel.gradient` does, over the samples that count.

    `lengths` says how many samples of each lane count, [m]; None if all do. `points` are those beside X at which
    the gradients are taken.
    """
    if lengths is None or (lengths == samples.shape[1]).all():
        return model.gradient(X, samples, shifts, buffers, generators, points, decayed)
    parts, order = [], []
    for length in np.unique(lengths):
        lanes = np.flatnonzero(lengths == length)
        rows = torch.from_numpy(lanes).to(X.device)
        own = None if generators is None else [generators[lane] for lane in lanes.tolist()]
        before = None if buffers is None else {name: values[rows] for name, values in buffers.items()}
        frames = None if shifts is None else shifts[rows, :length]
        at = None if points is None else points.lanes(rows)
        parts.append(model.gradient(X[rows], samples[rows, :length], frames, before, own, at, decayed))
        order.append(rows)
    back = torch.argsort(torch.cat(order))
    losses, gradients, after, Y = zip(*parts, strict=True)
    moved = {name: torch.cat([one[name] for one in after])[back] for name in after[0]}
    return torch.cat(losses)[back], torch.cat(gradients)[back], moved, None if decayed else torch.cat(Y)[back]
