"""The buffers of a module that its forward pass changes, such as the running statistics of BatchNorm.

Buffers are not parameters: no gradient reaches them and no algorithm corrects them. Those that move are kept as
one vector b in R^q beside x, so that every client starts from buffers of its own and leaves none behind. Buffers
that never change are part of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fedagrac.errors import FedagracError, InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Buffers"]


class Buffers:
    """The moving buffers of a module as one vector; none until `find` has run the module.

    Attributes:
        names: the names of the moving buffers, in the order of the vector.

    Examples:
        >>> norm = torch.nn.BatchNorm1d(2)
        >>> buffers = Buffers(norm)
        >>> buffers.find(lambda: norm(torch.tensor([[0.0, 0.0], [2.0, 4.0]])))
        >>> buffers.names, buffers.size
        (['running_mean', 'running_var', 'num_batches_tracked'], 5)
        >>> buffers.given(torch.float32)
        tensor([0., 0., 1., 1., 0.])
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._given = {name: value.detach().clone() for name, value in module.named_buffers()}
        self._owners = _owners(module)
        self.names: list[str] = []

    @property
    def size(self) -> int:
        """q, the numbers in all moving buffers."""
        return sum(self._given[name].numel() for name in self.names)

    def find(self, forward: Callable[[], Any]) -> None:
        """Run forward passes of the module, find the buffers that they change, and undo the changes."""
        self.put(None)
        constant = [name for name in self._given if name not in self.names]
        forward()
        for name in constant:
            if self._changed(name):
                if self._given[name].is_complex() or self._current(name).shape != self._given[name].shape:
                    raise InputError(
                        f"model buffer {name}", f"{self._given[name].dtype}", "real numbers of a fixed shape"
                    )
                self.names.append(name)
        self.names.sort(key=list(self._given).index)
        self.put(None)

    def adopt(self, names: Sequence[str]) -> None:
        """Take the names of the moving buffers from someone who has run the module, such as a client.

        Examples:
            >>> buffers = Buffers(torch.nn.BatchNorm1d(2))
            >>> buffers.adopt(["running_mean"])
            >>> buffers.size
            2
        """
        unknown = [name for name in names if name not in self._given]
        if unknown or len(set(names)) != len(names):
            raise InputError("moving buffers", list(names), f"buffers of the module: {', '.join(self._given)}")
        self.names = sorted(names, key=list(self._given).index)

    def given(self, dtype: torch.dtype) -> Tensor:
        """Return the moving buffers of the user's module, [q]."""
        return self._join([self._given[name] for name in self.names], dtype)

    def put(self, vector: Tensor | None) -> None:
        """Give the module these moving buffers; None for those of the user's module."""
        if vector is None:
            values = {name: self._given[name].clone() for name in self.names}
        else:
            values = {name: rows[0] for name, rows in self.rows(vector[None]).items()}
        for name, value in values.items():
            for layer, key in self._owners[name]:
                layer._buffers[key] = value

    def take(self, dtype: torch.dtype) -> Tensor:
        """Return the module's moving buffers as they are now, [q]."""
        return self._join([self._current(name) for name in self.names], dtype)

    def rows(self, vectors: Tensor) -> dict[str, Tensor]:
        """Return copies of the moving buffers of many models, each [m, ...], from their vectors [m, q].

        Counters, which averaging may have made fractions, are rounded.
        """
        sizes = [self._given[name].numel() for name in self.names]
        pieces = torch.split(vectors, sizes, dim=1)
        copies = {}
        for name, piece in zip(self.names, pieces, strict=True):
            given = self._given[name]
            values = piece if given.is_floating_point() else piece.round()
            copies[name] = values.reshape(len(vectors), *given.shape).to(given.dtype, copy=True)
        return copies

    def join(self, rows: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the vectors [m, q] of many models from their moving buffers, each [m, ...]."""
        return torch.cat([rows[name].detach().reshape(len(rows[name]), -1).to(dtype) for name in self.names], 1)

    def check_constant(self) -> None:
        """Refuse a module that has changed a buffer which no trial step changed."""
        for name in self._given:
            if name not in self.names and self._changed(name):
                raise FedagracError(
                    f"model buffer {name} changed during training, but not in the trial step before round 1, so "
                    "one client would pass it to the next; let the forward pass change it from the first step on"
                )

    def _current(self, name: str) -> Tensor:
        layer, key = self._owners[name][0]
        value = layer._buffers[key]
        assert value is not None
        return value.detach()

    def _changed(self, name: str) -> bool:
        now, given = self._current(name), self._given[name]
        return now is not given and not (now.shape == given.shape and torch.equal(now.to(given.dtype), given))

    def _join(self, values: list[Tensor], dtype: torch.dtype) -> Tensor:
        if not values:
            raise FedagracError("the module has no buffers that move")
        return torch.cat([value.reshape(-1).to(dtype) for value in values])


def _owners(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return all layers that hold each buffer, with its name there; several layers may share one buffer."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for layer in module.modules():
        for key, value in layer._buffers.items():
            if value is not None:
                places.setdefault(id(value), []).append((layer, key))
    return {name: places[id(value)] for name, value in module.named_buffers()}
