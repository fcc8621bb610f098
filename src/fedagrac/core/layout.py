"""How the parameters of a module lie in the vector x: their names, shapes and layers.

Algorithms that treat some coordinates differently, such as personal layers or sub-networks, read it from the
cohort. To all others x is one vector.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedagrac.errors import InputError

__all__ = ["INPUT", "Call", "Flow", "Layout", "Parameter"]

INPUT = "<input>"
"""The name of the module's input among what a layer reads."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a module.

    Attributes:
        name: its name in the module, such as "features.0.weight".
        shape: its shape.
        kind: the class of the layer that owns it, such as "Conv2d".
        groups: the groups of a convolution or of a group normalization; otherwise 1.

    Examples:
        >>> Parameter("features.0.weight", (8, 3, 5, 5), "Conv2d").layer
        'features.0'
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    groups: int = 1

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def layer(self) -> str:
        """The name of the layer that owns it; empty if that is the module itself."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Call:
    """One call of a layer or of a function in a forward pass.

    Attributes:
        layer: the name of the layer; None for a function.
        kind: the class of the layer, or the name of the function.
        reads: which layers with matrices of weights made its arguments, through any other operations; `INPUT` for
            the module's input.
    """

    layer: str | None
    kind: str
    reads: frozenset[str]


@dataclass(frozen=True)
class Flow:
    """What a module computes from what, in the order of its forward pass.

    Attributes:
        calls: the layers and functions in the order of the calls.
        output: which layers with matrices of weights made the output.
        apart: names of parameters that are used outside their layer.
        unknown: why the module could not be followed; empty if it could.
    """

    calls: tuple[Call, ...] = ()
    output: frozenset[str] = frozenset()
    apart: tuple[str, ...] = ()
    unknown: str = ""


@dataclass(frozen=True)
class Layout:
    """The parameters of a module in the order of the vector.

    Attributes:
        parameters: those that train.
        frozen: the names of those that do not, which are not in the vector.
        tied: other names of parameters that several layers share.
        flow: follows the module's forward pass; None if the module is not known.

    Examples:
        >>> layout = Layout((Parameter("body.weight", (2, 2), "Linear"), Parameter("head.bias", (1,), "Linear")))
        >>> layout.size, layout.layers
        (5, ('body', 'head'))
        >>> layout.matching("personal", ["head"]).tolist()
        [False, False, False, False, True]
    """

    parameters: tuple[Parameter, ...]
    frozen: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    flow: Callable[[], Flow] | None = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """d, the length of the vector."""
        return sum(parameter.size for parameter in self.parameters)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers that have parameters, in order."""
        return tuple(dict.fromkeys(parameter.layer for parameter in self.parameters))

    def spans(self) -> Iterator[tuple[Parameter, slice]]:
        """Yield every parameter with its place in the vector."""
        start = 0
        for parameter in self.parameters:
            yield parameter, slice(start, start + parameter.size)
            start += parameter.size

    def matching(self, field: str, patterns: Sequence[str]) -> Tensor:
        """Return which coordinates belong to parameters or layers with these names, [d].

        A name may have the wildcards * and ?, and the name of a layer holds for all within it. Names that match
        nothing are refused as values of `field`.
        """
        found = torch.zeros(self.size, dtype=torch.bool)
        for pattern in patterns:
            chosen = [span for parameter, span in self.spans() if _matches(parameter.name, pattern)]
            if not chosen:
                names = ", ".join(parameter.name for parameter in self.parameters[:20])
                more = ", ..." if len(self.parameters) > 20 else ""
                raise InputError(field, pattern, f"names of parameters or layers, such as {names}{more}")
            for span in chosen:
                found[span] = True
        return found

    def of_kind(self, prefix: str) -> Tensor:
        """Return which coordinates belong to layers of a class whose name begins so, [d].

        Examples:
            >>> Layout((Parameter("0.weight", (2,), "BatchNorm1d"),)).of_kind("BatchNorm").tolist()
            [True, True]
        """
        found = torch.zeros(self.size, dtype=torch.bool)
        for parameter, span in self.spans():
            found[span] = parameter.kind.startswith(prefix)
        return found


def _matches(name: str, pattern: str) -> bool:
    """Return whether a parameter, or a layer around it, has a name like the pattern."""
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))
