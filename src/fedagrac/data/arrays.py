"""Arrays of users: anything that becomes a tensor, checked leaf by leaf and pooled over the clients.

Inputs and targets are trees: one array, or a tuple or dict of arrays with as many samples each. Every message
names the client and the leaf.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from fedagrac.data.disk import WIDER, DiskArray, mapped_file
from fedagrac.data.trees import named_leaves
from fedagrac.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    Leaf: TypeAlias = Tensor | DiskArray
    Flat: TypeAlias = dict[str, Any]

__all__ = ["Tree", "as_pair", "check_finite", "check_like", "flatten", "is_tree", "largest", "pool", "rebuild"]

Tree: TypeAlias = Any
"""A tensor or `DiskArray`, or a tuple or dict of them."""


def is_tree(value: Any) -> bool:
    """Return whether a value is a tuple or dict of arrays, not one array.

    A tuple of numbers, or of lists of numbers, is one array.

    Examples:
        >>> is_tree((np.zeros(2), np.zeros(2))), is_tree({"x": [0.0, 1.0]}), is_tree(((0.0, 1.0), (2.0, 3.0)))
        (True, True, False)
    """
    if isinstance(value, Mapping):
        return True
    return isinstance(value, tuple) and any(getattr(v, "ndim", 0) >= 1 or is_tree(v) for v in value)


def flatten(value: Any) -> Flat:
    """Return the leaves of a value by their place in it.

    Examples:
        >>> flatten({"ids": [1, 2], "mask": [0, 1]})
        {"['ids']": [1, 2], "['mask']": [0, 1]}
        >>> flatten([1, 2])
        {'': [1, 2]}
    """
    if not is_tree(value):
        return {"": value}
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {f"[{key!r}]{place}": leaf for key, part in parts for place, leaf in flatten(part).items()}


def rebuild(value: Any, found: Flat, place: str = "") -> Tree:
    """Return a tree of the structure of `value` with the leaves that `flatten` would give."""
    if not is_tree(value):
        return found[place]
    if isinstance(value, Mapping):
        return {key: rebuild(part, found, f"{place}[{key!r}]") for key, part in value.items()}
    return tuple(rebuild(part, found, f"{place}[{key}]") for key, part in enumerate(value))


def as_pair(field: str, pair: Any, like: tuple[Tree, Tree] | None = None) -> tuple[Tree, Tree]:
    """Return inputs and targets as trees of tensors; lists of numbers get the types of `like`.

    Examples:
        >>> as_pair("test", ([[1, 2]], [0]))
        (tensor([[1, 2]]), tensor([0]))
    """
    inputs, targets = _leaves(field, pair)
    for found, part, example in zip((inputs, targets), pair, like or (), strict=False):
        given, examples = flatten(part), flatten(example)
        for place, leaf in found.items():
            if not _is_typed(given[place]) and place in examples:
                found[place] = leaf.to(torch.promote_types(leaf.dtype, examples[place].dtype))
    return rebuild(pair[0], inputs), rebuild(pair[1], targets)


def pool(pairs: Sequence[tuple[str, Any]]) -> tuple[Tree, Tree, list[int]]:
    """Return the named pairs of all clients as one pair, and the number of samples of each.

    All clients must have one structure, one shape per sample and one type of numbers. Floating-point numbers are
    promoted to the widest; lists, which have no type of their own, follow the others.
    """
    flats = [_leaves(field, pair) for field, pair in pairs]
    typed = (all(_is_typed(leaf) for part in pair for leaf in flatten(part).values()) for _, pair in pairs)
    head = next((i for i, whole in enumerate(typed) if whole), 0)
    joined = []
    for part, what in enumerate(("inputs", "targets")):
        first, owner = flats[head][part], pairs[head][0]
        for (field, pair), flat in zip(pairs, flats, strict=True):
            _check_leaves(f"{field} {what}", flat[part], first, owner, flatten(pair[part]))
        columns = {place: _joined(f"{what}{place}", [flat[part][place] for flat in flats]) for place in first}
        joined.append(rebuild(pairs[head][1][part], columns))
    sizes = [len(next(iter(inputs.values()))) for inputs, _ in flats]
    return joined[0], joined[1], sizes


def check_finite(field: str, tree: Tree) -> None:
    """Refuse NaN and infinity, naming the leaf and the sample; arrays on disk are read page by page."""
    for name, leaf in named_leaves(field, tree):
        if not leaf.is_floating_point():
            continue
        for first, page in _pages(leaf):
            if not bool(torch.isfinite(page).all()):
                bad = int((~torch.isfinite(page)).reshape(len(page), -1).any(1).nonzero()[0, 0])
                raise InputError(name, f"NaN or infinity in sample {first + bad}", "finite numbers")


def check_like(field: str, tree: Tree, like: Tree, owner: str) -> None:
    """Refuse a tree whose structure, shapes or types of numbers are not those of another."""
    flat = flatten(tree)
    _check_leaves(field, flat, flatten(like), owner, flat)


def largest(leaf: Leaf) -> int:
    """Return the largest of all numbers; arrays on disk are read page by page."""
    pages = leaf.pages() if isinstance(leaf, DiskArray) else iter([(0, leaf)])
    return max(int(page.max()) for _, page in pages)


def _pages(leaf: Leaf) -> Iterator[tuple[int, Tensor]]:
    if not isinstance(leaf, DiskArray):
        yield 0, leaf
    elif not leaf.finite:
        yield from leaf.pages()


def _leaves(field: str, pair: Any) -> tuple[Flat, Flat]:
    """Return the tensors of a client's inputs and targets by their places."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InputError(field, type(pair).__name__, "a pair (inputs, targets)")
    inputs, targets = (
        {place: _leaf(f"{field} {what}{place}", leaf) for place, leaf in flatten(part).items()}
        for what, part in zip(("inputs", "targets"), pair, strict=True)
    )
    for what, flat in (("inputs", inputs), ("targets", targets)):
        if not flat:
            raise InputError(f"{field} {what}", "no arrays", "at least one array")
    shapes = [tuple(leaf.shape) for flat in (inputs, targets) for leaf in flat.values()]
    if not all(shapes) or len({shape[0] for shape in shapes}) != 1:
        if len(shapes) == 2:
            value = f"inputs {shapes[0]}, targets {shapes[1]}"
        else:
            value = ", ".join(
                f"{what}{place} {tuple(leaf.shape)}"
                for what, flat in (("inputs", inputs), ("targets", targets))
                for place, leaf in flat.items()
            )
        raise InputError(field, value, "as many targets as inputs")
    if shapes[0][0] == 0:
        raise InputError(field, "no samples", "at least one sample")
    return inputs, {place: _label(leaf) for place, leaf in targets.items()}


def _leaf(field: str, value: Any) -> Leaf:
    """Return a tensor, or an array on disk for a memory map."""
    if isinstance(value, DiskArray):
        return value
    if isinstance(value, np.ndarray) and mapped_file(value) is not None:
        return DiskArray.from_memmap(value, field=field)
    try:
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(field, type(value).__name__, f"something that becomes a tensor ({error})") from error
    if tensor.layout != torch.strided:
        raise InputError(field, tensor.layout, "a dense tensor, such as tensor.to_dense()")
    return tensor.to(WIDER.get(tensor.dtype, tensor.dtype))


def _label(leaf: Leaf) -> Leaf:
    """Return targets: integers as int64; one number per sample in memory, because partitions need labels."""
    dtype = leaf.dtype if leaf.dtype.is_floating_point or leaf.dtype.is_complex else torch.int64
    if not isinstance(leaf, DiskArray):
        return leaf.to(dtype)
    leaf = leaf.as_type(dtype)
    return torch.cat([page for _, page in leaf.pages()]) if leaf.ndim == 1 and len(leaf) else leaf


def _check_leaves(field: str, flat: Flat, like: Flat, owner: str, given: Flat) -> None:
    """Refuse leaves that differ from others; `given` are the user's values, of which lists have no type."""
    if flat.keys() != like.keys():
        value, accepted = (_structure(found) for found in (flat, like))
        raise InputError(field, value, f"the structure of {owner}, {accepted}")
    for place, leaf in flat.items():
        other = like[place]
        if leaf.shape[1:] != other.shape[1:]:
            shape = f"samples of shape {tuple(leaf.shape[1:])}"
            raise InputError(f"{field}{place}", shape, f"the shape of {owner}, {tuple(other.shape[1:])}")
        floats = leaf.dtype.is_floating_point and other.dtype.is_floating_point
        if leaf.dtype != other.dtype and _is_typed(given[place]) and not floats:
            raise InputError(f"{field}{place}", leaf.dtype, f"the type of {owner}, {other.dtype}")


def _is_typed(value: Any) -> bool:
    return hasattr(value, "dtype")


def _structure(flat: Flat) -> str:
    return "one array" if "" in flat else f"arrays {', '.join(flat)}"


def _joined(field: str, leaves: list[Leaf]) -> Leaf:
    on_disk = [leaf for leaf in leaves if isinstance(leaf, DiskArray)]
    if len(on_disk) == len(leaves):
        return DiskArray.join(field, on_disk)
    if on_disk:
        raise InputError(
            field, f"{len(on_disk)} of {len(leaves)} clients on disk", "all on disk, or all in memory"
        )
    return torch.cat([leaf for leaf in leaves if not isinstance(leaf, DiskArray)])
