"""Tensors in lists, dicts and plain objects: taken out as a flat list, and put back where they were.

A tree of PyTorch knows the containers that it was told of, and makes new ones. Code of models also gives its units
plain objects (caches, conditions), has them write into a dict, and gets objects back. So an `Outline` goes through
lists, dicts, sets, plain objects and generators as well (*places*), and remembers what each of them held:

* ``build`` puts leaves into the places themselves, as for a unit that runs for the first time: what it writes is there
  for whoever comes next;
* ``build(fresh=True)`` copies the places, as they were, for a unit that runs again: nobody sees what it writes.

Tensors that stand in several places are one leaf. Modules with parameters, functions and types are constants.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import length_hint
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outsize.compat import torch_private
from outsize.runtime.forward.places import MODULE, Items, PlaceKind, State, Variables, kind_of

# A container of more is data: no forward goes through it.
MOST_ITEMS = 100_000
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class _Leaf(NamedTuple):
    at: int


class _Made(NamedTuple):
    """A value that is made anew of its parts: a tuple, or a container that PyTorch was told of."""

    make: Callable[[list[Any]], Any]
    read: Callable[[Any], list[Any]]
    parts: list[Any]


class OpenPlace:
    """A mutable container and its contents before the unit ran.

    Attributes:
        target: the list, dict, object or generator.
        items: by key: a leaf, a place, something to be made anew, or the value itself.
        written: whether it held something else after its unit had run.
    """

    __slots__ = ("items", "kind", "target", "written")

    def __init__(self, target: Any, kind: PlaceKind) -> None:
        self.target, self.kind = target, kind
        self.items: Items = []
        self.written = False


class Outline:
    """How values hang together; see `outline_of`.

    Attributes:
        places: that were come by.
        ends: for each value, how many leaves there were after it.
    """

    __slots__ = ("_roots", "ends", "places")

    def __init__(self) -> None:
        self._roots: list[Any] = []
        self.places: list[OpenPlace] = []
        self.ends: list[int] = []

    def build(self, leaves: Sequence[Tensor], *, fresh: bool = False) -> tuple[list[Any], list[Any]]:
        """Return the values with ``leaves`` in them, and the target, or its copy, of each place.

        Args:
            leaves: in the order of `outline_of`.
            fresh: whether places that were written, or hold leaves, are copied; else they are filled.
        """
        of: dict[int, Any] = {}
        if self.places:
            filled = self._touched() if fresh else [one for one in self.places if _has_leaf(one.items)]
            of = {id(one): one.kind.copied(one.target) if fresh else one.target for one in filled}
            for one in filled:
                one.kind.write(of[id(one)], [(key, _value(node, leaves, of)) for key, node in one.items])
        targets = [of.get(id(one), one.target) for one in self.places]
        return [_value(root, leaves, of) for root in self._roots], targets

    @property
    def holds_places(self) -> bool:
        """Whether there is a place in the first value."""
        return next(_places_in([(None, self._roots[0])]), None) is not None

    def restore(self, leaves: Sequence[Tensor]) -> None:
        """Have every place hold what it held, with ``leaves``."""
        for one in self.places:
            if not _same_items(one.kind.read(one.target), one.items, leaves):
                one.kind.write(one.target, [(key, _value(node, leaves, {})) for key, node in one.items])

    def _touched(self) -> list[OpenPlace]:
        """Return the places that were written since or hold leaves, and those that hold such places."""
        touched = {id(one) for one in self.places if one.written or _has_leaf(one.items)}
        others = [one for one in self.places if id(one) not in touched]
        touched.update(id(one) for one in others if not _same_items(one.kind.read(one.target), one.items, ()))
        inner = [(id(one), set(_places_in(one.items))) for one in self.places]
        before = -1
        while before != len(touched):
            before = len(touched)
            touched.update(outer for outer, within in inner if within & touched)
        return [one for one in self.places if id(one) in touched]

    def note_written(self, leaves: Sequence[Tensor]) -> bool:
        """Note which places hold other things now than with ``leaves``; returns whether any does."""
        for place in self.places:
            place.written = not _same_items(place.kind.read(place.target), place.items, leaves)
        return any(place.written for place in self.places)

    def written(self, leaves: Sequence[Tensor]) -> dict[tuple[int, Any], Any]:
        """Return what is another than with ``leaves``, by number of the place and key there; None if it is gone."""
        written: dict[tuple[int, Any], Any] = {}
        for number, place in enumerate(self.places):
            now, then = place.kind.read(place.target), place.items
            if not _same_items(now, then, leaves):
                present, before = dict(now), dict(then)
                for key in present.keys() | before:
                    stays = key in present and key in before and _same(present[key], before[key], leaves)
                    if not stays:
                        written[number, key] = present.get(key)
        return written

    def name_of(self, number: int, key: Any) -> str:
        """Return how a user would call what lies under ``key`` in the place ``number``: ``Class.attribute``, say."""
        place, attribute = self.places[number], str(key)
        for _ in self.places:  # each at most once
            if isinstance(place.target, Variables):
                return f"{place.target.owner}.{attribute}"
            if isinstance(place.target, nn.Module):
                return f"{type(place.target).__name__}.{attribute}"
            above = ((one, name) for one in self.places for name, node in one.items if node is place)
            place, name = next(above, (place, ""))
            if not name:
                break
            attribute = attribute if name == "_buffers" else str(name)
        return f"a {type(place.target).__name__} that the model's code or its hooks write into"

    def name_of_leaf(self, at: int) -> str:
        """Return the same of a leaf, by its position."""
        where = (
            (number, key)
            for number, one in enumerate(self.places)
            for key, node in one.items
            if isinstance(node, _Leaf) and node.at == at
        )
        number, key = next(where, (None, ""))
        return "a tensor that its code or its hooks hold" if number is None else self.name_of(number, key)

    def settle(self, constants: Mapping[int, Tensor], num_leaves: int) -> list[int]:
        """Have some leaves, by their index, be constants; returns the indices of those that are leaves still."""
        others = [index for index in range(num_leaves) if index not in constants]
        if constants:
            new: dict[int, Any] = {old: _Leaf(at) for at, old in enumerate(others)}
            new.update(constants)
            self._roots = [_renumbered(node, new) for node in self._roots]
            for one in self.places:
                one.items = [(key, _renumbered(node, new)) for key, node in one.items]
        return others


def outline_of(
    values: Iterable[Any], modules: Iterable[nn.Module] = (), others: Iterable[Any] = ()
) -> tuple[list[Tensor], Outline]:
    """Return the tensors in ``values``, each once, and how the values hang together.

    Args:
        values: what `Outline.build` returns.
        modules: of which what they have besides parameters and modules counts as well.
        others: whose tensors count, too; parameters are none of them.
    """
    walk = _Walk()
    for value in values:
        walk.outline._roots.append(walk.node(value))
        walk.outline.ends.append(len(walk.leaves))
    walk.parameters_count = False
    for module in modules:
        walk.place(module, MODULE)
    for value in others:
        walk.node(value)
    return walk.leaves, walk.outline


class _Walk:
    """Goes through values, and remembers what it has come by."""

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self.outline = Outline()
        self.parameters_count = True
        self._known: dict[int, Any] = {}
        self._alive: list[Any] = []  # an identity is that of one value only as long as the value is there

    def node(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return value
        node = self._known.get(id(value))
        if node is None:
            node = self._new(value)
            if node is not value:
                self._known[id(value)] = node
                self._alive.append(value)
        return node

    def place(self, target: Any, kind: PlaceKind) -> OpenPlace:
        node = self._known.get(id(target))
        if isinstance(node, OpenPlace):
            return node
        place = self._known[id(target)] = OpenPlace(target, kind)
        self._alive.append(target)
        self.outline.places.append(place)
        place.items = [(key, self.node(value)) for key, value in kind.read(target)]
        return place

    def _new(self, value: Any) -> Any:
        if isinstance(value, nn.Parameter) and not self.parameters_count:
            return value
        if isinstance(value, Tensor):
            self.leaves.append(value)
            return _Leaf(len(self.leaves) - 1)
        kind = type(value)
        if kind is tuple:
            return _Made(tuple, list, [self.node(part) for part in value])
        place_kind = kind_of(value)
        if place_kind is not None and length_hint(value) <= MOST_ITEMS:
            return self.place(value, place_kind)
        if not torch_private.is_leaf(value):
            parts, structure = torch_private.flatten(value, is_leaf=lambda other: other is not value)
            return _Made(
                lambda new: torch_private.unflatten(new, structure),
                lambda new: torch_private.leaves_of(new, is_leaf=lambda other: other is not new),
                [self.node(part) for part in parts],
            )
        if isinstance(value, tuple):  # of a class that PyTorch was not told of
            return _Made(kind, list, [self.node(part) for part in value])
        return value


def _has_leaf(items: Items) -> bool:
    """Whether a leaf lies in a place itself."""
    return any(
        isinstance(node, _Leaf) or (isinstance(node, _Made) and _has_leaf(_parts(node))) for _, node in items
    )


def _places_in(items: Items) -> Iterator[int]:
    for _, node in items:
        if isinstance(node, OpenPlace):
            yield id(node)
        elif isinstance(node, _Made):
            yield from _places_in(_parts(node))


def _parts(node: "_Made") -> Items:
    return list(enumerate(node.parts))


def _value(node: Any, leaves: Sequence[Tensor], of: Mapping[int, Any]) -> Any:
    if isinstance(node, _Leaf):
        return leaves[node.at]
    if isinstance(node, OpenPlace):
        return of.get(id(node), node.target)
    if isinstance(node, _Made):
        return node.make([_value(part, leaves, of) for part in node.parts])
    return node


def _renumbered(node: Any, new: Mapping[int, Any]) -> Any:
    if isinstance(node, _Leaf):
        return new[node.at]
    if isinstance(node, _Made):
        return _Made(node.make, node.read, [_renumbered(part, new) for part in node.parts])
    return node


def _same_items(now: Items, then: Items, leaves: Sequence[Tensor]) -> bool:
    return len(now) == len(then) and all(
        key == key_then and _same(value, node, leaves)
        for (key, value), (key_then, node) in zip(now, then, strict=True)
    )


def _same(value: Any, node: Any, leaves: Sequence[Tensor]) -> bool:
    """Whether ``value`` is what ``node`` stands for."""
    if isinstance(node, _Leaf):
        return value is leaves[node.at]
    if isinstance(node, OpenPlace):
        return value is node.target
    if isinstance(node, _Made):
        parts = node.read(value)
        return len(parts) == len(node.parts) and all(
            _same(part, one, leaves) for part, one in zip(parts, node.parts, strict=True)
        )
    if isinstance(node, (*_PLAIN, State)) and type(value) is type(node):
        return bool(value is node or value == node)
    return value is node
