"""Read, write and copy the lists, dicts, sets, objects and generators that code of a model may write into."""

import copy
import enum
import pickle
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outsize.compat import torch_private

Items = list[tuple[Any, Any]]

_SEQUENCES = (list, deque, set)
_VALUES = (Number, str, bytes, type(None), tuple, Tensor)
_ARRAY_BYTES = (
    1 << 16
)  # larger arrays are tables: looking at them before every layer would cost more than computing
_DICTS = (dict, OrderedDict, defaultdict, Counter)
# What a module has of its own accord, but for what a forward may change: buffers, and hooks hung up on the way.
OF_MODULES = frozenset(
    name for name in vars(nn.Module()) if name != "_buffers" and "_forward_" not in name
) | {"forward"}


class Variables(NamedTuple):
    """Names outside of objects that code assigns to.

    Attributes:
        owner: what they are names of, for people.
        holder: the names of a file, a class, or a cell of a closure.
        names: those that count; None for all.
    """

    owner: str
    holder: Any
    names: Collection[str] | None = None


class PlaceKind(NamedTuple):
    """How a kind of place is read and written."""

    read: Callable[[Any], Items]
    write: Callable[[Any, Items], None]
    copied: Callable[[Any], Any] = copy.copy


def kind_of(value: Any) -> PlaceKind | None:
    """Return how ``value`` is read and written; None of what is a constant, or made anew."""
    kind = type(value)
    if kind in _SEQUENCES:
        return _SEQUENCE
    if kind in _DICTS:
        return _DICT
    if kind is Variables:
        return _VARIABLES
    if isinstance(value, torch.Generator):
        return _GENERATOR
    if isinstance(value, random.Random):
        return _RANDOM
    return _numpy_kind(value) or (_OBJECT if _is_plain_object(value, kind) else None)


def _is_plain_object(value: Any, kind: type) -> bool:
    """Whether ``value`` is an object of somebody's class, of which only its attributes are known."""
    if isinstance(value, nn.Module):
        return next(value.parameters(), None) is None
    if isinstance(value, (type, enum.Enum, tuple, BaseException)) or not torch_private.is_leaf(value):
        return False
    root = kind.__module__.partition(".")[0]
    if root in ("torch", "outsize", "numpy", "greenlet", "builtins"):
        return False
    if root in sys.stdlib_module_names and root not in ("types", "__main__"):  # a SimpleNamespace, say
        return False
    return hasattr(value, "__dict__") or any("__slots__" in vars(one) for one in kind.__mro__)


def _numpy_kind(value: Any) -> PlaceKind | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        return _NUMPY
    if type(value) is numpy.ndarray:
        return None if value.dtype.hasobject or value.nbytes > _ARRAY_BYTES else _ARRAY
    return _NUMPY_OLD if isinstance(value, numpy.random.RandomState) else None


def _slots_of(value: Any) -> Iterable[str]:
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def _read_object(value: Any) -> Items:
    attributes = dict(getattr(value, "__dict__", ()))
    for name in _slots_of(value):
        if name not in ("__dict__", "__weakref__") and hasattr(value, name):
            attributes[name] = getattr(value, name)
    return list(attributes.items())


def _write_object(value: Any, items: Items) -> None:
    names, given = getattr(value, "__dict__", {}), dict(items)
    for name in [name for name in names if name not in given]:
        del names[name]
    for name, one in items:
        if name in names or not hasattr(type(value), name):
            names[name] = one
        else:
            object.__setattr__(value, name, one)  # a slot, frozen or not


def _read_module(module: nn.Module) -> Items:
    attributes = [(name, value) for name, value in vars(module).items() if name not in OF_MODULES]
    return [item for item in attributes if not isinstance(item[1], nn.Module)]


def _write_module(module: nn.Module, items: Items) -> None:
    names, given = vars(module), dict(items)
    for name, value in _read_module(module):
        if name not in given and name in names and not isinstance(value, nn.Module):
            del names[name]
    names.update(given)


def _write_sequence(value: Any, items: Items) -> None:
    value.clear()
    (value.update if isinstance(value, set) else value.extend)(one for _, one in items)


def _write_dict(value: Any, items: Items) -> None:
    value.clear()
    for key, one in items:
        value[key] = one


def _read_variables(value: Variables) -> Items:
    held = value.holder
    if not isinstance(held, dict):
        held = vars(held) if isinstance(held, type) else {"cell_contents": held.cell_contents}
    names = held if value.names is None else value.names
    values = [(name, held[name]) for name in names if name in held and not name.startswith("__")]
    return [item for item in values if isinstance(item[1], _VALUES) or kind_of(item[1]) is not None]


def _write_variables(value: Variables, items: Items) -> None:
    held, given, is_dict = value.holder, dict(items), isinstance(value.holder, dict)
    for name in dict(_read_variables(value)).keys() - given:
        held.pop(name) if is_dict else delattr(held, name)
    for name, one in items:
        held.update({name: one}) if is_dict else setattr(held, name, one)


class State:
    """The state of a generator: one value that is compared, and never gone into."""

    __slots__ = ("_text", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._text = pickle.dumps(value.tolist() if isinstance(value, Tensor) else value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and self._text == other._text

    __hash__ = None  # type: ignore[assignment]


def _generator(
    read: Callable[[Any], Any], write: Callable[[Any, Any], Any], copied: Callable[[Any], Any]
) -> PlaceKind:
    return PlaceKind(
        lambda value: [("state", State(read(value)))],
        lambda value, items: write(value, items[0][1].value),
        copied,
    )


_SEQUENCE = PlaceKind(lambda value: list(enumerate(value)), _write_sequence)
_DICT = PlaceKind(lambda value: list(value.items()), _write_dict)
_VARIABLES = PlaceKind(_read_variables, _write_variables)
_OBJECT = PlaceKind(_read_object, _write_object)
MODULE = PlaceKind(_read_module, _write_module)
_GENERATOR = _generator(torch.Generator.get_state, torch.Generator.set_state, torch.Generator.clone_state)
_RANDOM = _generator(random.Random.getstate, random.Random.setstate, copy.copy)
_NUMPY = _generator(
    lambda value: value.bit_generator.state,
    lambda value, state: setattr(value.bit_generator, "state", state),
    copy.deepcopy,
)
_ARRAY = _generator(lambda value: value.copy(), lambda value, state: value.__setitem__(..., state), copy.copy)
_NUMPY_OLD = _generator(
    lambda value: value.get_state(), lambda value, state: value.set_state(state), copy.deepcopy
)
