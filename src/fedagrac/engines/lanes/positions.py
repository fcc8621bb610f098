"""Positions of a sequence that a module computes but does not use.

A classifier on a transformer reads one position of its last layer: the last one of a GPT, the first one of a BERT.
The layers between the last attention and that position treat every position alike, so all others can be left out
without changing the output or its gradient. For a network of four layers that is a fifth of the work.

A trial forward pass writes down the calls of torch's functions. From the end backwards it follows which tensors,
[n, positions, ...], are used at one position only. A call that is not known to treat positions separately needs
all of them, and so does every look at a shape. Later passes make the same calls, with some arguments cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from fedagrac.engines.lanes.modes import CallMode

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ChangedCallsError", "UsedPositions", "used_positions"]

_UNARY = {
    functional.gelu, functional.relu, functional.silu, functional.elu, functional.leaky_relu, functional.mish,
    functional.softplus, functional.tanh, functional.sigmoid, functional.dropout, functional.hardswish,
    torch.relu, torch.tanh, torch.sigmoid, torch.Tensor.relu, torch.Tensor.tanh, torch.Tensor.sigmoid,
}  # fmt: skip
"""Functions of each number by itself."""

_BINARY = {
    torch.add, torch.sub, torch.mul, torch.Tensor.add, torch.Tensor.sub, torch.Tensor.mul, torch.Tensor.__add__,
    torch.Tensor.__radd__, torch.Tensor.__sub__, torch.Tensor.__mul__, torch.Tensor.__rmul__,
}  # fmt: skip
"""Functions of two tensors, number by number."""


class ChangedCallsError(Exception):
    """A forward pass made other calls than the trial did."""


class _Call(NamedTuple):
    """One call of the trial pass."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    result: Any


@dataclass(frozen=True, eq=False)
class UsedPositions:
    """The calls of a forward pass, and where its arguments are cut to one position.

    Attributes:
        calls: the functions in the order of their calls.
        cuts: by the number of a call, the numbers of the arguments to cut, and the position to keep.
        reads: by the number of a call that reads this position from a tensor that is cut already, its index.
    """

    calls: list[Callable[..., Any]]
    cuts: dict[int, tuple[tuple[int, ...], int]]
    reads: dict[int, tuple[Any, ...]]

    def arguments(self, number: int, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a call, cut to what is used.

        Raises:
            ChangedCallsError: the trial called another function here, or read another position.
        """
        if number >= len(self.calls) or self.calls[number] != function:
            raise ChangedCallsError(f"call {number} is {function}")
        if number in self.reads:
            x, index = args
            if index != self.reads[number]:
                raise ChangedCallsError(f"call {number} reads {index}")
            return x, (index[0], 0, *index[2:])
        if number not in self.cuts:
            return args
        places, position = self.cuts[number]
        return tuple(a[:, position : position + 1] if i in places else a for i, a in enumerate(args))


class _Tape(CallMode):
    """Writes down the calls of a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        result = function(*args, **options)
        self.calls.append(_Call(function, args, options, result))
        return result


def used_positions(forward: Callable[[], Any]) -> UsedPositions | None:
    """Run a forward pass and return where later ones can be cut; None if all positions are used.

    Examples:
        >>> layer, x = torch.nn.Linear(8, 8), torch.zeros(2, 5, 8)
        >>> used_positions(lambda: layer(x)[:, -1]).cuts
        {0: ((0,), 4)}
        >>> used_positions(lambda: layer(x).mean(1)) is None
        True
    """
    with torch.no_grad(), _Tape() as tape:
        output = forward()
    calls = tape.calls
    needed = _needed(calls, _tensors(output))
    cuts, reads = {}, {}
    for number, call in enumerate(calls):
        if _read_position(call) is not None and needed.get(id(call.args[0])) is not None:
            reads[number] = call.args[1]
        position = needed.get(id(call.result))
        if position is None:
            continue
        places = tuple(i for i in _carriers(call) if needed.get(id(call.args[i])) is None)
        if places and not _returns_argument(call):
            cuts[number] = places, position
    worth = any(call.function is functional.linear and needed.get(id(call.result)) is not None for call in calls)
    return UsedPositions([call.function for call in calls], cuts, reads) if worth else None


def _needed(calls: list[_Call], outputs: Iterable[Tensor]) -> dict[int, int]:
    """Return the position of the tensors, by their id, that are used at one position only.

    The calls keep their tensors, so no two of them have the same id.
    """
    users: dict[int, list[int]] = {}
    whole = {id(t) for t in outputs}
    for number, call in enumerate(calls):
        if _returns_argument(call):
            continue
        used = _tensors((call.args, call.options))
        for t in used:
            users.setdefault(id(t), []).append(number)
        whole |= {id(t) for t in _tensors(call.result)} & {id(t) for t in used}  # changed in place
    needed: dict[int, int] = {}
    for call in reversed(calls):
        t = call.result
        if _returns_argument(call) or id(t) in whole or not _carriers(call):
            continue
        positions = {_position_for(calls[user], t, needed) for user in users.get(id(t), ())}
        if len(positions) == 1 and None not in positions:
            needed[id(t)] = next(p for p in positions if p is not None)
    return needed


def _position_for(call: _Call, t: Tensor, needed: dict[int, int]) -> int | None:
    """Return the one position of t that a call uses; None if it may use all."""
    position = _read_position(call)
    if position is not None:
        return position
    carries = any(call.args[i] is t for i in _carriers(call))
    return needed.get(id(call.result)) if carries else None


def _returns_argument(call: _Call) -> bool:
    """Return whether a call returned its argument unchanged, as dropout with probability 0 does."""
    same = bool(call.args) and call.result is call.args[0]
    return same and call.function in _UNARY and not call.options.get("inplace")


def _read_position(call: _Call) -> int | None:
    """Return the position that a call reads as x[:, position]; None for any other call."""
    if call.function is not torch.Tensor.__getitem__ or not isinstance(call.args[0], torch.Tensor):
        return None
    x, index = call.args
    if x.ndim < 3 or not isinstance(index, tuple) or not 2 <= len(index) <= x.ndim or type(index[1]) is not int:
        return None
    others = (index[0], *index[2:])
    every = all(isinstance(part, slice) and part == slice(None) for part in others)
    return index[1] % x.shape[1] if every else None


def _carriers(call: _Call) -> tuple[int, ...]:
    """Return which arguments of a call have the positions of its result; none if it may mix positions."""
    result, args = call.result, call.args
    if not isinstance(result, torch.Tensor) or result.ndim < 3 or call.options.get("inplace"):
        return ()
    if _tensors(call.options) and call.function is not functional.layer_norm:
        return ()
    first = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if call.function in _BINARY:
        return _same_positions(args[:2], result) if len(args) == 2 else ()
    if first is None or first.shape[:2] != result.shape[:2]:
        return ()
    separately = call.function in _UNARY or call.function is functional.linear
    if call.function in (functional.layer_norm, getattr(functional, "rms_norm", None)):
        separately = len(args) > 1 and len(args[1]) <= first.ndim - 2
    return (0,) if separately else ()


def _same_positions(operands: tuple[Any, ...], result: Tensor) -> tuple[int, ...]:
    """Return which operands have the positions of the result; none if one has them in another dimension."""
    places = []
    for i, operand in enumerate(operands):
        if not isinstance(operand, torch.Tensor):
            continue
        aligned = operand.shape[1 - result.ndim] if operand.ndim >= result.ndim - 1 else 1
        if operand.shape == result.shape:
            places.append(i)
        elif aligned != 1:
            return ()
    return tuple(places)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
