"""The samples that a client uses in each step.

They come from a stream keyed by (seed, round, client). So a client gets the same batches in every engine, in any
order and beside any other clients, and its first k batches do not depend on how many follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from fedagrac.core.streams import Purpose, stream

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Sampling", "batch_positions", "epoch_steps"]

Sampling = Literal["replacement", "shuffle"]


def epoch_steps(sizes: npt.NDArray[np.int64], batch_size: int | None) -> npt.NDArray[np.int64]:
    """Return the steps of one local epoch, ceil(n_i / batch size); 1 with full batches.

    Examples:
        >>> epoch_steps(np.array([10, 20, 21]), 10).tolist()
        [1, 2, 3]
    """
    return np.ones_like(sizes) if batch_size is None else -(-sizes // batch_size)


def batch_positions(
    samples: int, steps: int, batch_size: int | None, sampling: Sampling, seed: int, round: int, client: int
) -> npt.NDArray[np.int64]:
    """Return positions among the client's own samples, [steps, batch].

    "replacement" draws `batch_size` samples independently in every step. "shuffle" walks through reshuffled epochs
    and drops the short batch at an epoch's end; a client with fewer samples than a batch uses all of them in every
    step. Without a batch size every step uses all samples.

    Examples:
        >>> batch_positions(5, 2, None, "replacement", seed=0, round=0, client=0).tolist()
        [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    """
    if batch_size is None or (sampling == "shuffle" and samples <= batch_size):
        return np.broadcast_to(np.arange(samples), (steps, samples))
    generator = stream(seed, Purpose.BATCHES, round, client)
    if sampling == "replacement":
        return generator.integers(0, samples, (steps, batch_size))
    per_epoch = samples // batch_size
    epochs = [
        generator.permutation(samples)[: per_epoch * batch_size].reshape(per_epoch, batch_size)
        for _ in range(-(-steps // per_epoch))
    ]
    return np.concatenate(epochs)[:steps]
