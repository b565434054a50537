"""Nested containers of values, taken apart and put together as torch does it: its `_pytree`.

A leaf is what is no container: containers are lists, tuples, dictionaries and the classes registered with torch, such
as transformers' outputs. None is a leaf.
"""

from collections.abc import Callable
from typing import Any

IsLeaf = Callable[[Any], bool]


def flatten(values: Any, is_leaf: IsLeaf | None = None) -> tuple[list[Any], Any]:
    """Return the leaves of ``values`` in order, and the structure that they were in; see `unflatten`."""
    from torch.utils import _pytree

    return _pytree.tree_flatten(values, is_leaf=is_leaf)


def unflatten(leaves: Any, structure: Any) -> Any:
    """Return ``leaves`` in the structure that `flatten` returned."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, structure)


def leaves_of(values: Any, is_leaf: IsLeaf | None = None) -> list[Any]:
    """Return the leaves of ``values`` in order."""
    from torch.utils import _pytree

    return _pytree.tree_leaves(values, is_leaf=is_leaf)


def is_leaf(value: Any) -> bool:
    """Return whether ``value`` is no container."""
    from torch.utils import _pytree

    return _pytree.tree_is_leaf(value)


def map_leaves(change: Callable[[Any], Any], values: Any) -> Any:
    """Return ``values`` with what ``change`` makes of each leaf in its place."""
    from torch.utils import _pytree

    return _pytree.tree_map(change, values)


def map_only(kind: type[Any], change: Callable[[Any], Any], values: Any) -> Any:
    """Return ``values`` with what ``change`` makes of each leaf of ``kind`` in its place."""
    from torch.utils import _pytree

    return _pytree.tree_map_only(kind, change, values)
