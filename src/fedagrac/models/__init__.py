"""Models: built-in models by name, and any nn.Module as a function of one vector x."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

from fedagrac.errors import count, one_of, unknown
from fedagrac.imports import Imports
from fedagrac.models.networks import MOST_CLASSES, alexnet, cnn, vgg19
from fedagrac.models.residual import resnet18, resnet20
from fedagrac.models.sequences import CharGPT, CharLSTM
from fedagrac.models.vector import VectorModel

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "REGISTRY",
    "CharGPT",
    "CharLSTM",
    "Imports",
    "VectorModel",
    "alexnet",
    "build",
    "cnn",
    "logistic",
    "resnet18",
    "resnet20",
    "vgg19",
]


def logistic(features: int = 123, classes: int = 2) -> nn.Module:
    """Build multinomial logistic regression: one linear layer on flattened inputs, with zero weights.

    The problem is convex, so its minimiser does not depend on the start, and the start need not be random.

    Examples:
        >>> sum(p.numel() for p in logistic(features=64, classes=10).parameters())
        650
    """
    count("features", features)
    count("classes", classes, least=2, most=MOST_CLASSES)
    linear = nn.Linear(features, classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)


REGISTRY: dict[str, Callable[..., nn.Module]] = {
    "logistic": logistic,
    "cnn": cnn,
    "alexnet": alexnet,
    "vgg19": vgg19,
    "resnet18": resnet18,
    "resnet20": resnet20,
    "char-lstm": CharLSTM,
    "char-gpt": CharGPT,
}
"""All built-in models by name."""


def build(name: str, **sizes: Any) -> nn.Module:
    """Build a built-in model by name, or one of your own as "module:factory".

    Sizes default to those of the paper's data set. An import path runs the code that it names, so use `Imports`
    for paths from files that may not be trusted.

    Examples:
        >>> build("logistic", features=4, classes=3)[1]
        Linear(in_features=4, out_features=3, bias=True)
        >>> build("torch.nn:Linear", in_features=2, out_features=3)
        Linear(in_features=2, out_features=3, bias=True)
    """
    if isinstance(name, str) and ":" in name:
        return Imports(trusted=True).build(name, sizes)
    factory = REGISTRY[one_of("name", name, REGISTRY)]
    accepted = list(inspect.signature(factory).parameters)
    for key, value in sizes.items():
        if key not in accepted:
            raise unknown(f"{name}.{key}", value, accepted)
    return factory(**sizes)
