"""The lists, dicts, sets, objects and generators that code of a model may write into: read, written, copied, named."""

import copy
import enum
import inspect
import pickle
import random
import re
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from numbers import Number
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from outsize.compat import torch_private
from outsize.compat.torch_private import forward_hooks_of

Items = list[tuple[Any, Any]]

_SEQUENCES = (list, deque, set)
_VALUES = (Number, str, bytes, type(None), tuple, Tensor)
_ARRAY_BYTES = (
    1 << 16
)  # larger arrays are tables: looking at them before every layer would cost more than computing
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = (dict, list, deque, set)
# Of what code names outside of itself, what it may write into; other objects there belong to libraries.
_WRITABLE = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
# Models of these assign to nothing outside of themselves.
_LIBRARY = re.compile(r"(transformers|diffusers|peft|accelerate|huggingface_hub|torch|numpy|outsize)\b")
_OF_PYTHON = sys.stdlib_module_names - {"__main__"}
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
    if _is_plain_object(value, kind):
        return _SUBCLASS if isinstance(value, _CONTAINERS) else _OBJECT
    return _numpy_kind(value)


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


class _Item(NamedTuple):
    """The key of what a container of a class of somebody's holds beside its attributes."""

    key: Any


def _read_subclass(value: Any) -> Items:
    ordered = OrderedDict if isinstance(value, OrderedDict) else dict
    contents = ordered.items(value) if isinstance(value, dict) else enumerate(value)
    return [*_read_object(value), *((_Item(key), one) for key, one in contents)]


def _write_subclass(value: Any, items: Items) -> None:
    inside = [(key.key, one) for key, one in items if isinstance(key, _Item)]
    base: Any = next(kind for kind in (OrderedDict, *_CONTAINERS) if isinstance(value, kind))
    base.clear(value)
    if issubclass(base, dict):
        for key, one in inside:
            base.__setitem__(value, key, one)
    else:
        (set.update if base is set else base.extend)(value, (one for _, one in inside))
    _write_object(value, [item for item in items if not isinstance(item[0], _Item)])


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


def read_variables(value: Variables) -> Items:
    """Return names and values of variables that code may change."""
    held = value.holder
    if not isinstance(held, dict):
        held = vars(held) if isinstance(held, type) else {"cell_contents": held.cell_contents}
    names = held if value.names is None else value.names
    values = [(name, held[name]) for name in names if name in held and not name.startswith("__")]
    return [item for item in values if isinstance(item[1], _VALUES) or kind_of(item[1]) is not None]


def _write_variables(value: Variables, items: Items) -> None:
    held, given, is_dict = value.holder, dict(items), isinstance(value.holder, dict)
    for name in dict(read_variables(value)).keys() - given:
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
_VARIABLES = PlaceKind(read_variables, _write_variables)
_OBJECT = PlaceKind(_read_object, _write_object)
_SUBCLASS = PlaceKind(_read_subclass, _write_subclass)
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


def named_by(module: nn.Module) -> Iterator[Any]:
    """Yield what the code of a module and of the hooks in it names outside of itself."""
    yield from _variables_of(type(module))
    for function in code_of(cast("Hashable", type(module))):
        yield from _named_in(function)
    hooks = (hook for hung in forward_hooks_of(module) for hook in hung.values())
    of_user = (value for name, value in vars(module).items() if name not in OF_MODULES)
    for one in (*hooks, *(each for each in of_user if isinstance(each, (types.FunctionType, partial)))):
        yield from _held_by(one)


def _held_by(hook: Any) -> Iterator[Any]:
    """Yield objects that a hook refers to: closure cells, the bound object, partial arguments."""
    if isinstance(hook, partial):
        yield from (*hook.args, *hook.keywords.values())
        hook = hook.func
    if inspect.ismethod(hook):
        yield hook.__self__
        hook = hook.__func__
    if inspect.isfunction(hook):
        for function in _reached_from((hook,)):
            yield from _named_in(function)
    elif not inspect.isbuiltin(hook):
        yield hook


def _named_in(function: Any) -> Iterator[Any]:
    space, names = function.__globals__, names_of(function.__code__)
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not yet filled
            inside = cell.cell_contents
            yield inside if isinstance(inside, nn.Module) else Variables(function.__qualname__, cell)
    values = [space[name] for name in names if name in space]
    if _is_of_library(function.__module__):
        yield from (one for one in values if type(one) in _WRITABLE or isinstance(one, torch.Generator))
        return
    yield from (function.__defaults__ or (), function.__kwdefaults__ or (), vars(function))
    yield Variables(function.__module__, space, names)
    for value in values:
        if isinstance(value, type) and not _is_of_library(value.__module__):
            yield from _variables_of(value)
        elif inspect.ismodule(value) and not _is_of_library(value.__name__):
            yield Variables(value.__name__, vars(value), names)


def _variables_of(kind: type) -> Iterator[Variables]:
    """Yield those of a class, of classes that it comes from, and of classes within them."""
    for one in kind.__mro__:
        if not _is_of_library(one.__module__):
            yield Variables(one.__name__, one)
            for each in vars(one).values():
                if isinstance(each, type) and each.__qualname__ == f"{one.__qualname__}.{each.__name__}":
                    yield from _variables_of(each)


@cache
def _is_of_library(module: str) -> bool:
    """Whether code of a module of Python keeps no state of a model: of libraries, and of Python itself."""
    return bool(_LIBRARY.match(module or "")) or module.partition(".")[0] in _OF_PYTHON


@cache
def _classes_of(kind: Any) -> tuple[type, ...]:
    """Return a class of modules and those that it comes from, below PyTorch's own."""
    return tuple(one for one in kind.__mro__ if not one.__module__.startswith("torch.") and one is not object)


@cache
def code_of(kind: Any) -> tuple[Any, ...]:
    """Return the functions of a class of modules, below PyTorch's own, and those that they call in its file."""
    return _reached_from(chain.from_iterable(map(_functions_of, _classes_of(kind))))


def _functions_of(value: Any) -> Iterator[Any]:
    """Yield functions that a name stands for: itself, what it wraps, those in a dict, methods of its class."""
    kind = value if isinstance(value, type) else type(value)
    methods = () if _is_of_library(kind.__module__) else vars(kind).values()
    for one in (value, *(value.values() if type(value) is dict else ()), *methods):
        inside = one.func if isinstance(one, partial) else one.fget if isinstance(one, property) else one
        yield getattr(inside, "__wrapped__", inside)


def _reached_from(functions: Iterable[Any]) -> tuple[Any, ...]:
    """Return functions and those that they name in the same file; of libraries none besides."""
    waiting, reached = list(functions), dict[Any, None]()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if not inspect.isfunction(function) or function in reached:
            continue
        reached[function] = None
        if not _is_of_library(function.__module__):
            space, names = function.__globals__, names_of(function.__code__)
            named = chain.from_iterable(map(_functions_of, map(space.get, names)))
            waiting += [one for one in named if getattr(one, "__globals__", None) is space]
    return tuple(reached)


@cache
def names_of(code: types.CodeType) -> frozenset[str]:
    """Return the names that code, and code within it, reads or writes outside of itself."""
    inner = (names_of(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return frozenset(code.co_names).union(*inner)


@cache
def read_in_files(kind: Any) -> tuple[tuple[Any, frozenset[str]], ...]:
    """Return the files of a class and of those that it comes from, each with the names that the class reads in it."""
    classes, names = _classes_of(kind), set[str]()
    files = {one.__module__: sys.modules[one.__module__] for one in classes if one.__module__ in sys.modules}
    methods = chain.from_iterable(vars(one).values() for one in classes)
    code = [one.__code__ for one in map(inspect.unwrap, methods) if inspect.isfunction(one)]
    while code:
        new = names_of(code.pop()) - names
        names |= new
        values = (vars(file).get(name) for name in new for file in files.values())
        functions = map(inspect.unwrap, chain.from_iterable(map(_functions_of, values)))
        code += [one.__code__ for one in functions if inspect.isfunction(one)]
    return tuple((file, frozenset(names & vars(file).keys())) for file in files.values())
