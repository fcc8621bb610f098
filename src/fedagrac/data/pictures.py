"""Pictures: stored as bytes, normalised on the device, cropped and flipped by numbers from keyed streams."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from fedagrac.core.streams import Purpose, stream
from fedagrac.errors import InputError, count, positive

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

__all__ = ["Images", "crop_and_flip", "draw_shifts"]


@dataclass(frozen=True)
class Images:
    """How stored bytes [n, C, H, W] become inputs: (byte / 255 - mean) / std per channel.

    Attributes:
        mean, std: those of each channel, for bytes scaled to [0, 1]; a number for pictures of one channel.
        padding: training pictures are cropped at random out of a frame of this many pixels on every side, and half
            of them are flipped; 0 for no augmentation.

    Examples:
        >>> Images(mean=(0.5,), std=(0.25,))(torch.tensor([[[[255]]]], dtype=torch.uint8), torch.float32)
        tensor([[[[2.]]]])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    padding: int = 0

    def __post_init__(self) -> None:
        for field in ("mean", "std"):
            value = getattr(self, field)
            values = tuple(value) if isinstance(value, Iterable) else (value,)
            above = 0.0 if field == "std" else -math.inf
            object.__setattr__(self, field, tuple(positive(f"Images.{field}", v, above) for v in values))
        if len(self.mean) != len(self.std):
            raise InputError("Images.std", self.std, f"one number per channel, as in mean = {self.mean}")
        count("Images.padding", self.padding, least=0)

    def __call__(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the normalised pictures."""
        mean, std = _constants(self, dtype, pixels.device)
        return (pixels.to(dtype) / 255 - mean) / std


@functools.lru_cache(maxsize=16)
def _constants(images: Images, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation on the device; cached, because a recorded step may not copy to it."""
    mean, std = (torch.tensor(v, dtype=dtype, device=device)[:, None, None] for v in (images.mean, images.std))
    return mean, std


def draw_shifts(steps: int, batch: int, padding: int, seed: int, round: int, client: int) -> npt.NDArray[np.int64]:
    """Return for each picture of each step the shift down, the shift right and whether to flip, [steps, batch, 3].

    The stream is the client's own, so every engine gives the client the same augmented batches.

    Examples:
        >>> draw_shifts(2, 5, padding=4, seed=0, round=0, client=0).shape
        (2, 5, 3)
    """
    generator = stream(seed, Purpose.AUGMENTATION, round, client)
    return generator.integers(0, [2 * padding + 1, 2 * padding + 1, 2], (steps, batch, 3))


def crop_and_flip(pixels: Tensor, shifts: Tensor, padding: int) -> Tensor:
    """Return pictures [n, C, H, W], each cut out of its black frame at its own place and flipped if asked.

    Examples:
        >>> picture = torch.arange(4, dtype=torch.uint8).reshape(1, 1, 2, 2)
        >>> crop_and_flip(picture, torch.tensor([[1, 1, 1]]), padding=1)   # in place, mirrored
        tensor([[[[1, 0],
                  [3, 2]]]], dtype=torch.uint8)
    """
    n, channels, height, width = pixels.shape
    framed = functional.pad(pixels, [padding] * 4)
    device = pixels.device
    rows = shifts[:, 0, None] + torch.arange(height, device=device)
    columns = torch.arange(width, device=device).expand(n, width)
    columns = shifts[:, 1, None] + torch.where(shifts[:, 2, None] == 1, width - 1 - columns, columns)
    picture = torch.arange(n, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    return framed[picture, channel, rows[:, None, :, None], columns[:, None, None, :]]
