"""The buffers of a module that its forward pass changes, such as the running statistics of BatchNorm.

Buffers are not parameters: no gradient reaches them and no algorithm corrects them. Those that move are kept as
one vector b in R^q beside x, so that every client starts from buffers of its own and leaves none behind. Buffers
that never change are part of the module, as are frozen parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fedagrac.errors import FedagracError, InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Buffers"]

INTEGERS = {4: torch.int32, 8: torch.int64}
"""Integers as wide as numbers of so many bytes."""


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
        self._frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        self._checksums = _checksums(self._frozen.values())
        self.names: list[str] = []

    @property
    def size(self) -> int:
        """q, the numbers in all moving buffers."""
        return sum(self._given[name].numel() for name in self.names)

    def find(self, forward: Callable[[], Any]) -> None:
        """Run forward passes of the module, find the buffers that they change, and undo the changes.

        Raise InputError for changes that cannot be undone: of parameters, and of buffers without a fixed shape.
        """
        self.put(None)
        constant = [name for name in self._given if name not in self.names]
        parameters = dict(self._module.named_parameters())
        before = _marks(parameters.values())
        forward()
        for name, one, other in zip(parameters, before, _marks(parameters.values()), strict=True):
            if one != other:
                accepted = "a forward pass that changes no parameter, but buffers (register_buffer)"
                raise InputError(f"model parameter {name}", "changed by the forward pass", accepted)
        for name, _ in self._module.named_buffers():
            if name not in self._given:
                raise InputError(f"model buffer {name}", None, "a tensor before the first forward pass")
        for name in self._changed(constant):
            now, given = self._current(name), self._given[name]
            if given.is_complex() or now is None or now.shape != given.shape:
                seen = None if now is None else f"{tuple(now.shape)} {now.dtype}"
                raise InputError(f"model buffer {name}", seen, f"real numbers of shape {tuple(given.shape)}")
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
        return self._join([now for name in self.names if (now := self._current(name)) is not None], dtype)

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
        """Refuse a module that has changed a buffer or a frozen parameter which no trial step changed."""
        changed = [f"buffer {name}" for name in self._changed([n for n in self._given if n not in self.names])]
        changed += [f"buffer {name}" for name, _ in self._module.named_buffers() if name not in self._given]
        changed += [f"parameter {name}" for name in self._changed_parameters()]
        if changed:
            raise FedagracError(
                f"model {changed[0]} changed during training, but not in the trial step before round 1, so "
                "one client would pass it to the next; let the forward pass change a buffer from the first step on"
            )

    def _current(self, name: str) -> Tensor | None:
        layer, key = self._owners[name][0]
        value = layer._buffers[key]
        return None if value is None else value.detach()

    def _changed(self, names: Sequence[str]) -> list[str]:
        """Return which of some buffers are no longer as given."""
        same: dict[str, Tensor] = {}
        for name in names:
            now, given = self._current(name), self._given[name]
            # a step of many lanes leaves a tensor behind that belongs to all of them, which nothing can read
            if now is not None and now.shape == given.shape and not torch._C._functorch.is_batchedtensor(now):
                now = now.to(given.dtype)
                same[name] = ((now == given) | (now.isnan() & given.isnan())).all()
        kept = dict(zip(same, torch.stack([*same.values()]).tolist() if same else (), strict=True))  # waits once
        return [name for name in names if not kept.get(name, False)]

    def _changed_parameters(self) -> list[str]:
        """Return which frozen parameters are no longer as given."""
        now = _checksums(self._frozen.values())
        return [name for name, one, other in zip(self._frozen, now, self._checksums, strict=True) if one != other]

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


def _checksums(parameters: Iterable[Tensor]) -> list[int]:
    """Return the sum of each tensor's bit patterns, which any change is likely to alter and rounding cannot."""
    sums = [
        p.detach().reshape(-1).view(INTEGERS.get(p.element_size(), torch.uint8)).sum(dtype=torch.int64)
        for p in parameters
    ]
    return list(torch.stack(sums).tolist()) if sums else []


def _marks(parameters: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return what differs after a parameter was written: its version, unless through .data, and its numbers."""
    tensors = list(parameters)
    return list(zip([tensor._version for tensor in tensors], _checksums(tensors), strict=True))
