"""The samples that a client uses in each step.

They come from a stream keyed by (seed, round, client). So a client gets the same batches in every engine, in any
order and beside any other clients, and its first k batches do not depend on how many follow. "cyclic" batches
depend on the steps that the client made in earlier rounds. The caller knows them; nothing is remembered here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from fedagrac.core.streams import Purpose, stream

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["SAMPLINGS", "Sampling", "batch_lengths", "batch_positions", "epoch_steps", "pass_steps"]

Sampling = Literal["replacement", "shuffle", "cyclic"]

SAMPLINGS: tuple[Sampling, ...] = get_args(Sampling)


def epoch_steps(sizes: npt.NDArray[np.int64], batch_size: int | None) -> npt.NDArray[np.int64]:
    """Return the steps of one local epoch, ceil(n_i / batch size); 1 with full batches.

    Examples:
        >>> epoch_steps(np.array([10, 20, 21]), 10).tolist()
        [1, 2, 3]
    """
    return np.ones_like(sizes) if batch_size is None else -(-sizes // batch_size)


def pass_steps(
    sizes: npt.NDArray[np.int64], batch_size: int | None, before: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return how many steps end the pass that each client is in after `before` steps of "cyclic" sampling.

    It is 0 where the last step has just ended a pass: the next step begins another one.

    Examples:
        >>> pass_steps(np.full(4, 21), 10, before=np.array([0, 1, 3, 5])).tolist()
        [3, 2, 0, 1]
    """
    epoch = epoch_steps(sizes, batch_size)
    return np.where(before == 0, epoch, -before % epoch)


def batch_lengths(
    samples: int, steps: int, batch_size: int | None, sampling: Sampling, before: int = 0
) -> npt.NDArray[np.int64] | None:
    """Return how many samples each batch has, [steps], or None if all have as many.

    Only "cyclic" sampling has shorter ones: the last batch of a pass holds what is left.

    Examples:
        >>> batch_lengths(10, 4, 4, "cyclic").tolist()
        [4, 4, 2, 4]
    """
    if batch_size is None or sampling != "cyclic" or samples <= batch_size or samples % batch_size == 0:
        return None
    place = (before + np.arange(steps)) % -(-samples // batch_size)
    lengths = np.minimum(batch_size, samples - place * batch_size)
    return None if (lengths == batch_size).all() else lengths


def batch_positions(
    samples: int,
    steps: int,
    batch_size: int | None,
    sampling: Sampling,
    seed: int,
    round: int,
    client: int,
    before: int = 0,
) -> npt.NDArray[np.int64]:
    """Return positions among the client's own samples, [steps, batch].

    "replacement" draws `batch_size` samples independently in every step. "shuffle" walks through reshuffled epochs
    and drops the short batch at an epoch's end; a client with fewer samples than a batch uses all of them in every
    step. Without a batch size every step uses all samples.

    "cyclic" walks through the samples in an order that is drawn once for the whole run, and continues after the
    `before` steps that the client made in earlier rounds. The last batch of a pass is short where the batch size
    does not divide n_i: `batch_lengths` says how many of its positions count.

    Examples:
        >>> whole = batch_positions(5, 6, 2, "cyclic", seed=0, round=0, client=0)
        >>> later = batch_positions(5, 2, 2, "cyclic", seed=0, round=1, client=0, before=4)
        >>> bool((whole[4:] == later).all()), sorted(whole[:3].ravel()[:5].tolist())
        (True, [0, 1, 2, 3, 4])
        >>> batch_positions(5, 2, None, "replacement", seed=0, round=0, client=0).tolist()
        [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    """
    if batch_size is None or (sampling != "replacement" and samples <= batch_size):
        return np.broadcast_to(np.arange(samples), (steps, samples))
    if sampling == "cyclic":
        order = stream(seed, Purpose.ORDER, client=client).permutation(samples)
        first = (before + np.arange(steps)) % -(-samples // batch_size) * batch_size
        positions: npt.NDArray[np.int64] = order[(first[:, None] + np.arange(batch_size)) % samples]
        return positions
    generator = stream(seed, Purpose.BATCHES, round, client)
    if sampling == "replacement":
        return generator.integers(0, samples, (steps, batch_size))
    per_epoch = samples // batch_size
    epochs = [
        generator.permutation(samples)[: per_epoch * batch_size].reshape(per_epoch, batch_size)
        for _ in range(-(-steps // per_epoch))
    ]
    return np.concatenate(epochs)[:steps]
