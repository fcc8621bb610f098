"""The paper's networks, layer by layer as in its tables. The loss (cross-entropy) contains the softmax."""

from __future__ import annotations

import math

from torch import nn

from fedagrac.errors import count

__all__ = ["MOST_CLASSES", "alexnet", "cnn", "he_normal", "vgg19"]

MOST_CLASSES = 100_000
"""The largest number of outputs of a built-in model. It bounds what an experiment file can ask for."""


def cnn(classes: int = 10) -> nn.Module:
    """Return the 2-layer CNN for Fashion-MNIST, 21,840 parameters.

    Examples:
        >>> sum(p.numel() for p in cnn().parameters())
        21840
    """
    count("classes", classes, least=2, most=MOST_CLASSES)
    return nn.Sequential(
        nn.Conv2d(1, 10, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(10, 20, kernel_size=5),
        nn.ReLU(),
        nn.Dropout2d(0.5),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(320, 50),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(50, classes),
    )


def alexnet(classes: int = 10) -> nn.Module:
    """Return AlexNet for CIFAR-10, 7.21 million parameters.

    Examples:
        >>> sum(p.numel() for p in alexnet().parameters())
        7212874
    """
    count("classes", classes, least=2, most=MOST_CLASSES)
    return nn.Sequential(
        nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=5),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=2),
        nn.Conv2d(64, 192, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=2),
        nn.Conv2d(192, 384, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(256, 2048),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, classes),
    )


def he_normal(convolution: nn.Conv2d) -> nn.Conv2d:
    """Draw the weights of a convolution from Normal(0, sqrt(2 / (k k out))), set its bias to zero, and return it.

    Here k x k is the kernel and out the number of output channels (He et al. 2015, the backward form).

    Examples:
        >>> he_normal(nn.Conv2d(3, 2, kernel_size=1)).bias
        Parameter containing:
        tensor([0., 0.], requires_grad=True)
    """
    area = math.prod(convolution.kernel_size)
    nn.init.normal_(convolution.weight, std=math.sqrt(2 / (area * convolution.out_channels)))
    if convolution.bias is not None:
        nn.init.zeros_(convolution.bias)
    return convolution


def vgg19(classes: int = 10) -> nn.Module:
    """Return VGG-19 for CIFAR-10, 20.55 million parameters.

    Convolutions start as in the authors' code (`he_normal`), because with torch's default start the signal vanishes:
    logits differ by 3e-9 between inputs and the first convolution's gradient is about 2e-8. Dense layers start as
    torch makes them.

    Examples:
        >>> sum(p.numel() for p in vgg19().parameters())
        20554826
    """
    count("classes", classes, least=2, most=MOST_CLASSES)
    layers: list[nn.Module] = []
    channels = 3
    for width, convolutions in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(convolutions):
            layers += [he_normal(nn.Conv2d(channels, width, kernel_size=3, padding=1)), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2, stride=2))
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )
