"""Random streams keyed by purpose, seed, round and client.

Every random draw of a run comes from a counter-based stream (NumPy's Philox). Draws therefore do not depend on the
order in which clients run, on how they are packed into batches, or on which process runs them. No state of a
generator needs to be saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Purpose", "first_weights", "stream", "torch_seed"]


class Purpose(IntEnum):
    """What a stream is for. The numbers decide every random draw, so they must never change."""

    BATCHES = 1
    COHORT = 2
    STEPS = 3
    PARTITION = 4
    DATA = 5
    MODEL = 6
    DROPOUT = 7
    AUGMENTATION = 8
    JITTER = 9
    VALIDATION = 10
    TRANSFORM = 11
    ORDER = 12
    MEMBER = 13
    ROUND = 14


def stream(seed: int, purpose: Purpose, round: int = 0, client: int = 0, number: int = 0) -> np.random.Generator:
    """Return the generator keyed by (seed, purpose, round, client); `number` tells several of them apart.

    Examples:
        >>> a = stream(0, Purpose.BATCHES, round=3, client=7).integers(0, 100, 5)
        >>> b = stream(0, Purpose.BATCHES, round=3, client=7).integers(0, 100, 5)
        >>> bool((a == b).all())
        True
    """
    key = np.array([seed, purpose + 256 * number], dtype=np.uint64)  # purposes are below 256
    # the low two words of the counter count blocks within the stream, the high two identify the stream
    counter = np.array([0, 0, client, round], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(_Key(key), counter=counter))  # type: ignore[arg-type]


class _Key(ISeedSequence):
    """The key of a stream. Given as `key=`, Philox would ask the system for a seed that it then ignores."""

    def __init__(self, key: npt.NDArray[np.uint64]) -> None:
        self.key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> npt.NDArray[Any]:
        """Return the key itself, which is two 64-bit words."""
        return self.key


def torch_seed(seed: int, purpose: Purpose, round: int = 0, client: int = 0) -> int:
    """Return a seed for `torch.manual_seed` with the same keys."""
    return int(stream(seed, purpose, round, client).integers(0, 2**63 - 1))


@contextlib.contextmanager
def first_weights(seed: int) -> Iterator[None]:
    """Run a block in which new modules draw their weights from the run's seed.

    The caller's random state is restored afterwards.
    """
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(torch_seed(seed, Purpose.MODEL))
        yield
