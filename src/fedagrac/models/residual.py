"""Residual networks for pictures of 32 x 32 (He et al. 2016), with group or batch normalisation.

Convolutions have no bias and start as in `he_normal`. The first one is 3 x 3 with stride 1, and no pooling follows
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from fedagrac.errors import InputError, count, one_of
from fedagrac.models.networks import MOST_CLASSES, he_normal

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NORMS", "ResNet", "resnet18", "resnet20"]

NORMS = ("group", "batch")
"""The kinds of normalisation."""


def resnet18(classes: int = 10, norm: str = "group", groups: int = 8) -> nn.Module:
    """Return ResNet-18 for CIFAR-10, 11.17 million parameters: 4 stages of 2 blocks, 64 to 512 channels.

    Where the shape changes, the shortcut is a 1 x 1 convolution and a norm (option B).

    Args:
        classes: the number of classes.
        norm: group for GroupNorm, batch for BatchNorm with running statistics.
        groups: the groups of GroupNorm, the same in every layer.

    Examples:
        >>> sum(p.numel() for p in resnet18().parameters())
        11173962
    """
    return ResNet((64, 128, 256, 512), 2, classes, norm, groups, projected=True)


def resnet20(classes: int = 10, norm: str = "group", groups: int = 8) -> nn.Module:
    """Return ResNet-20 for CIFAR-10, 0.27 million parameters: 3 stages of 3 blocks, 16 to 64 channels.

    Where the shape changes, the shortcut takes every second pixel and adds channels of zeros (option A).

    Args:
        classes: the number of classes.
        norm: group for GroupNorm, batch for BatchNorm with running statistics.
        groups: the groups of GroupNorm, the same in every layer.

    Examples:
        >>> sum(p.numel() for p in resnet20().parameters())
        269722
    """
    return ResNet((16, 32, 64), 3, classes, norm, groups, projected=False)


class ResNet(nn.Module):
    """A residual network: a convolution, stages of blocks, the mean over all pixels, and a linear layer.

    Every stage but the first halves the height and width of the picture.
    """

    def __init__(
        self, widths: tuple[int, ...], blocks: int, classes: int, norm: str, groups: int, projected: bool
    ) -> None:
        super().__init__()
        count("classes", classes, least=2, most=MOST_CLASSES)
        one_of("norm", norm, NORMS)
        if widths[0] % count("groups", groups):
            raise InputError("groups", groups, f"a divisor of {widths[0]}, the channels of the first layers")
        self.stem = nn.Sequential(
            _convolution(3, widths[0], 3), _normalisation(widths[0], norm, groups), nn.ReLU()
        )
        channels, stages = widths[0], []
        for stage, width in enumerate(widths):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                stages.append(_Block(channels, width, stride, norm, groups, projected))
                channels = width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the logits of the classes."""
        logits: Tensor = self.head(self.stages(self.stem(pictures)).mean(dim=(2, 3)))
        return logits


class _Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut past them."""

    def __init__(self, channels: int, width: int, stride: int, norm: str, groups: int, projected: bool) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            _convolution(channels, width, 3, stride),
            _normalisation(width, norm, groups),
            nn.ReLU(),
            _convolution(width, width, 3),
            _normalisation(width, norm, groups),
        )
        self.shortcut: nn.Module = nn.Identity()
        if (channels, stride) != (width, 1):
            self.shortcut = _ZeroPadded(width - channels, stride)
            if projected:
                self.shortcut = nn.Sequential(
                    _convolution(channels, width, 1, stride), _normalisation(width, norm, groups)
                )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.branch(x) + self.shortcut(x))


class _ZeroPadded(nn.Module):
    """A shortcut without parameters: every second pixel, and channels of zeros on both sides of the others."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.before, self.after, self.stride = channels // 2, channels - channels // 2, stride

    def forward(self, x: Tensor) -> Tensor:
        picked = x[:, :, :: self.stride, :: self.stride]
        return nn.functional.pad(picked, (0, 0, 0, 0, self.before, self.after))


def _convolution(channels: int, width: int, size: int, stride: int = 1) -> nn.Conv2d:
    return he_normal(nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False))


def _normalisation(channels: int, norm: str, groups: int) -> nn.Module:
    return nn.GroupNorm(groups, channels) if norm == "group" else nn.BatchNorm2d(channels)
