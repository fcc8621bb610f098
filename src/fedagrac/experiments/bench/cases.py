"""The workloads that are timed: networks, data and rounds.

The networks of other systems' published figures are written out here, because their libraries are not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fedagrac import models
from fedagrac.algorithms import FedaGrac, FedAvg, Scaffold
from fedagrac.core.optimizers import SGD
from fedagrac.data.federation import Federation
from fedagrac.data.partitions import IID
from fedagrac.data.pictures import Images
from fedagrac.heterogeneity import Constant, Extreme, Gaussian, StepSchedule

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.algorithms import Algorithm

__all__ = ["CASES", "SWEEPS", "Case", "pfl_cnn", "torchvision_resnet18", "tutorial_cnn"]

CIFAR = Images((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), padding=4)
GREY = Images((0.5,), (0.25,))


def pfl_cnn() -> nn.Module:
    """Return the CNN of the public pfl-research CIFAR-10 workload.

    Examples:
        >>> sum(p.numel() for p in pfl_cnn().parameters())
        1626442
    """
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


def tutorial_cnn() -> nn.Module:
    """Return the CNN of PyTorch's CIFAR-10 tutorial, which BlazeFL's benchmark trains.

    Examples:
        >>> sum(p.numel() for p in tutorial_cnn().parameters())
        62006
    """
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def torchvision_resnet18(norm: Callable[[int], nn.Module]) -> nn.Module:
    """Return ResNet-18 as in torchvision, with 10 classes and a norm of your choice.

    Its first convolution is 7 x 7 with stride 2 and a pool follows, as for ImageNet. On pictures of 32 x 32 it
    needs a fifteenth of the operations of `models.build("resnet18")`. FL-Simulator trains it with GroupNorm of two
    groups, BlazeFL with BatchNorm.

    Examples:
        >>> sum(p.numel() for p in torchvision_resnet18(nn.BatchNorm2d).parameters())
        11181642
    """
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width in (64, 128, 256, 512):
        layers += [_ResidualBlock(channels, width, norm), _ResidualBlock(width, width, norm)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class _ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions; a 1 x 1 convolution is the shortcut where the number of channels changes."""

    def __init__(self, channels: int, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        stride = 1 if channels == width else 2
        self.branch = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, 1, bias=False), norm(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), norm(width),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), norm(width))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.branch(x) + self.shortcut(x))


@dataclass(frozen=True)
class Case:
    """One problem whose steps are timed.

    Attributes:
        about: a description for tables.
        model: a function that makes the module.
        shape: the shape of a sample.
        classes: the number of classes.
        images: how bytes become inputs; None for samples that are not pictures.
        clients: the number of clients.
        samples: the samples of each client.
        batch: the samples of a step.
        steps: K_i.
        cohort: the clients that take part in a round; None for all.
        algorithm: a function that makes the algorithm, given lr and the local optimizer.
        lr: the step size.
        vocabulary: the number of characters, if samples are texts.
        clip: the largest norm of a gradient; None for any.
        weight_decay: the coefficient of l2 regularisation.
        short: clients and steps of a shorter round, which is timed on a CPU; None for the same round.
        only_gpu: whether the shorter round is that of another case.
    """

    about: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    images: Images | None
    clients: int
    samples: int
    batch: int
    steps: StepSchedule
    cohort: int | None = None
    algorithm: Callable[..., Algorithm] = FedaGrac
    lr: float = 0.01
    vocabulary: int | None = None
    clip: float | None = None
    weight_decay: float = 0.0
    short: tuple[int, int] | None = None
    only_gpu: bool = False

    def federation(self) -> Federation:
        """Return a federation with random data."""
        rng = np.random.default_rng(0)
        size = (self.clients * self.samples, *self.shape)
        values = 256 if self.images else self.vocabulary
        X = rng.integers(0, values, size, dtype=np.uint8) if values else rng.random(size, np.float32)
        y = torch.from_numpy(rng.integers(0, self.classes, len(X)))
        shares = IID().split(y.numpy(), self.clients, seed=0)
        pool = torch.from_numpy(X), y
        return Federation(*pool, shares, (pool[0][:100], y[:100]), None, "random", (), self.images)

    def make_algorithm(self) -> Algorithm:
        """Return a new algorithm."""
        return self.algorithm(lr=self.lr, local=SGD(clip=self.clip))

    def lanes(self) -> int:
        """Return the clients of one round."""
        return self.cohort or self.clients

    def client_steps(self) -> int:
        """Return the local steps of one round, on average if the cohort varies."""
        K = self.steps.counts(0, self.clients, 0)
        return round(float(K.mean()) * self.lanes())

    @property
    def large(self) -> bool:
        """Whether a step is so long that only a few clients are timed on a CPU."""
        return self.short is not None and self.short[0] <= 4

    def on(self, device: str) -> Case:
        """Return the case with the rounds that are timed on a device: short ones on a CPU."""
        if self.short is None or device != "cpu":
            return self
        clients, steps = self.short
        samples = min(self.samples, 2 * self.batch)  # calibration starts with a pass over all of them
        return replace(self, clients=clients, cohort=None, samples=samples, steps=Constant(steps))


def _logistic() -> nn.Module:
    return models.build("logistic", features=123, classes=2)


def _built(name: str, **sizes: int) -> Callable[[], nn.Module]:
    return lambda: models.build(name, **sizes)


def _two_groups(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


PICTURE = ((3, 32, 32), 10, CIFAR)

_FL_SIMULATOR = Case(
    "FL-Simulator: ResNet-18-GN", lambda: torchvision_resnet18(_two_groups), *PICTURE, 100, 500, 50, Constant(50),
    cohort=10, algorithm=FedAvg, lr=0.1, clip=10.0, weight_decay=0.001, short=(4, 2),
)  # fmt: skip

CASES = {
    "lr-a9a": Case("LR, a9a, 100 x K = 50", _logistic, (123,), 2, None, 100, 300, 20, Constant(50)),
    "lr-a9a-paper": Case(
        "LR, a9a, 20 x N(500, 10000)", _logistic, (123,), 2, None, 20, 1600, 20, Gaussian(500, 10_000), lr=0.005
    ),
    "cnn": Case(
        "2-layer CNN, Fashion-MNIST", _built("cnn"), (1, 28, 28), 10, GREY, 20, 500, 25, Constant(50)
    ),
    "pfl": Case(
        "pfl-research CNN, CIFAR-10", pfl_cnn, (3, 32, 32), 10, Images(CIFAR.mean, CIFAR.std), 1000, 50, 10,
        Constant(5), cohort=50, algorithm=FedAvg, lr=0.1,
    ),
    "char-gpt": Case(
        "GPT 0.8 M, 80 characters",
        _built("char-gpt", vocabulary=90, context=80, width=128, layers=4, heads=4),
        (80,), 90, None, 20, 200, 16, Constant(50), vocabulary=90, short=(10, 2),
    ),
    "char-lstm": Case(
        "LSTM 2 x 256, 80 characters",
        _built("char-lstm", vocabulary=80, embedding=8, hidden=256, layers=2),
        (80,), 80, None, 20, 200, 16, Constant(50), vocabulary=80, short=(10, 2),
    ),
    "resnet20": Case(
        "ResNet-20-GN, CIFAR-10", _built("resnet20"), *PICTURE, 20, 500, 25, Constant(50), short=(10, 2)
    ),
    "resnet18": Case(
        "ResNet-18-GN, CIFAR-10", _built("resnet18"), *PICTURE, 20, 500, 25, Constant(20), short=(2, 10)
    ),
    "alexnet": Case(
        "AlexNet, CIFAR-10", _built("alexnet"), *PICTURE, 20, 500, 25, Constant(100), short=(4, 10)
    ),
    "alexnet-unequal": Case(
        "AlexNet, K ~ N(500, 10000)", _built("alexnet"), *PICTURE, 20, 500, 25, Gaussian(500, 10_000),
        short=(4, 2), only_gpu=True,
    ),
    "alexnet-equal": Case(
        "AlexNet, K = 500", _built("alexnet"), *PICTURE, 20, 500, 25, Constant(500), short=(4, 2), only_gpu=True
    ),
    "vgg19": Case(
        "VGG-19, CIFAR-10", _built("vgg19"), *PICTURE, 20, 500, 25, Constant(20), short=(2, 10)
    ),
    "fl-simulator": _FL_SIMULATOR,
    "fl-simulator-scaffold": replace(
        _FL_SIMULATOR, about="FL-Simulator, SCAFFOLD", algorithm=Scaffold, only_gpu=True
    ),
    "blazefl-cnn": Case(
        "BlazeFL: tutorial CNN", tutorial_cnn, *PICTURE, 100, 500, 50, Constant(50), algorithm=FedAvg,
        short=(20, 5),
    ),
    "blazefl-resnet18": Case(
        "BlazeFL: ResNet-18-BN", lambda: torchvision_resnet18(nn.BatchNorm2d), *PICTURE, 100, 500, 50,
        Constant(50), algorithm=FedAvg, short=(4, 2),
    ),
}  # fmt: skip
"""All cases by name."""


def _clients(count: int) -> Case:
    """Return a case with this many clients."""
    return replace(CASES["lr-a9a"], clients=count, samples=100)


def _spread(steps: StepSchedule) -> Case:
    """Return a case with this step schedule."""
    return replace(CASES["lr-a9a-paper"], steps=steps, samples=300)


def _width(hidden: int) -> Case:
    """Return a case whose model has this many hidden units."""

    def perceptron() -> nn.Module:
        return nn.Sequential(nn.Linear(123, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    return replace(CASES["lr-a9a"], model=perceptron, clients=20, steps=Constant(10))


SWEEPS: dict[str, tuple[str, dict[str, Case]]] = {
    "clients": ("clients in one round", {str(n): _clients(n) for n in (10, 30, 100, 300, 1000, 3000, 10_000)}),
    "spread": (
        "how unequal K is",
        {
            "K = 500": _spread(Gaussian(500, 0)),
            "variance 100": _spread(Gaussian(500, 100)),
            "variance 10000": _spread(Gaussian(500, 10_000)),
            "one 100 x faster": _spread(Extreme(slow=50, fast=5000)),
        },
    ),
    "size": ("parameters", {str(126 * h + 2): _width(h) for h in (8, 32, 128, 512, 2048, 8192)}),
}
"""Sweeps over the number of clients, the spread of K and the model size: a label, and a case for each point."""
