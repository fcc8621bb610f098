"""Trees of tensors: inputs, targets and outputs that are one tensor, or tuples, lists and dicts of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["leaves", "map_leaves", "named_leaves", "num_samples"]


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return the tree with the function applied to every leaf, and to the same leaves of other trees.

    Examples:
        >>> map_leaves(len, {"ids": "abc", "mask": ("de", "f")})
        {'ids': 3, 'mask': (2, 1)}
        >>> map_leaves(lambda a, b: a + b, (1, 2), (10, 20))
        (11, 22)
    """
    if isinstance(tree, torch.Tensor):  # most trees are; walking one costs more than a small step
        return function(tree, *others)
    return pytree.tree_map(function, tree, *others)


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree in a fixed order.

    Examples:
        >>> leaves({"ids": 1, "mask": (2, 3)})
        [1, 2, 3]
    """
    return [tree] if isinstance(tree, torch.Tensor) else list(pytree.tree_leaves(tree))


def named_leaves(name: str, tree: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a tree with their names, which messages show.

    Examples:
        >>> named_leaves("inputs", {"ids": 1, "mask": (2, 3)})
        [("inputs['ids']", 1), ("inputs['mask'][0]", 2), ("inputs['mask'][1]", 3)]
        >>> named_leaves("inputs", 5)
        [('inputs', 5)]
    """
    paths, _ = pytree.tree_flatten_with_path(tree)
    return [(name + pytree.keystr(path), leaf) for path, leaf in paths]


def num_samples(tree: Any) -> int:
    """Return the length of the first leaf, which all leaves share.

    Examples:
        >>> num_samples(("abc", "def"))
        3
    """
    return len(leaves(tree)[0])
