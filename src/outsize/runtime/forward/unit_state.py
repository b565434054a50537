"""State that a call of a unit changes besides its output: buffers, attributes, lists, objects, hooks, generators.

Few units do; a trial tells which (`runtime.trial.effects_trial`). Only of these is the state gone through in a step.

Microbatches take turns between units, so that what the code of one leaves there is overwritten by the next. Such a
batch has to go whole. What is made once and stays (a table, a cached mask) does no harm.
"""

import inspect
import logging
import random
import re
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from outsize.accelerators import is_accelerator, module_of
from outsize.compat.torch_private import (
    buffers_of,
    forward_hooks_of,
    has_hooks_of_all,
)
from outsize.compat.transformers_private import ADAPTERS_IN_USE, OUTPUT_HOOKS
from outsize.runtime.forward.outline import outline_of
from outsize.runtime.forward.places import Variables

_log = logging.getLogger(__name__)
# Of what code names outside of itself, what it may write into; other objects there belong to libraries.
_WRITABLE = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
# Models of these assign to nothing outside of themselves.
_LIBRARY = re.compile(r"(transformers|diffusers|peft|accelerate|huggingface_hub|torch|numpy|outsize)\b")
_OF_PYTHON = sys.stdlib_module_names - {"__main__"}


class UnitState:
    """Where the state of some modules lies.

    Args:
        modules: of a unit, or all of a model.

    Attributes:
        modules: those whose attributes and buffers are state.
        others: containers, objects, generators, classes and variables that code and hooks name.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules: list[nn.Module] = []
        self.others: list[Any] = []
        for module in modules:
            self.modules.append(module)
            for value in _named_by(module):
                (self.modules if isinstance(value, nn.Module) else self.others).append(value)


@contextmanager
def untouched(state: UnitState, values: Iterable[Any] = ()) -> Iterator[None]:
    """Leave ``state``, and places in ``values``, behind as they are now, whatever runs while the context lasts."""
    leaves, outline = outline_of(values, state.modules, state.others)
    start = outline.ends[-1] if outline.ends else 0
    with torch.no_grad():
        copies = [leaf.detach().clone() for leaf in leaves[start:]]
    try:
        yield
    finally:
        outline.restore(leaves)
        with torch.no_grad():
            for leaf, value in zip(leaves[start:], copies, strict=True):
                if not same_values(leaf, value):
                    leaf.copy_(value)


def _named_by(module: nn.Module) -> Iterator[Any]:
    """Yield what the code of a module and of the hooks in it names outside of itself."""
    for kind in _classes_of(cast("Hashable", type(module))):
        if not _is_of_library(kind.__module__):
            yield Variables(kind.__name__, kind)
    for function in _code_of(cast("Hashable", type(module))):
        yield from _named_in(function)
    for hooks in forward_hooks_of(module):
        for hook in hooks.values():
            yield from _held_by(hook)


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
    space, names = function.__globals__, _names_of(function.__code__)
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not yet filled
            inside = cell.cell_contents
            yield inside if isinstance(inside, nn.Module) else Variables(function.__qualname__, cell)
    values = [space[name] for name in names if name in space]
    if _is_of_library(function.__module__):
        yield from (one for one in values if type(one) in _WRITABLE or isinstance(one, torch.Generator))
        return
    yield from (function.__defaults__ or (), function.__kwdefaults__ or {}, vars(function))
    yield Variables(function.__module__, space, names)
    for value in values:
        if isinstance(value, type) and not _is_of_library(value.__module__):
            yield Variables(value.__name__, value)
        elif inspect.ismodule(value) and not _is_of_library(value.__name__):
            yield Variables(value.__name__, vars(value), names)


@cache
def _is_of_library(module: str) -> bool:
    """Whether code of a module of Python keeps no state of a model: of libraries, and of Python itself."""
    return bool(_LIBRARY.match(module or "")) or module.partition(".")[0] in _OF_PYTHON


@cache
def _classes_of(kind: Any) -> tuple[type, ...]:
    """Return a class of modules and those that it comes from, below PyTorch's own."""
    return tuple(one for one in kind.__mro__ if not one.__module__.startswith("torch.") and one is not object)


@cache
def _code_of(kind: Any) -> tuple[Any, ...]:
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
            space, names = function.__globals__, _names_of(function.__code__)
            named = chain.from_iterable(map(_functions_of, map(space.get, names)))
            waiting += [one for one in named if getattr(one, "__globals__", None) is space]
    return tuple(reached)


@cache
def _names_of(code: types.CodeType) -> frozenset[str]:
    """Return the names that code, and code within it, reads or writes outside of itself."""
    inner = (_names_of(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def settings_of(modules: Iterable[nn.Module]) -> list[str]:
    """Return what callers set of layers and layers themselves do not: modes, chances and factors, adapters in use."""
    return [
        f"{name}={value}"
        for unit in modules
        for module in unit.modules()
        for name, value in vars(module).items()
        if type(value) is float or name == "training" or name in ADAPTERS_IN_USE
    ]


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors hold the same; what is no number equals itself."""
    if one.shape != other.shape or torch.equal(one, other):
        return one.shape == other.shape
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


class LeftState:
    """The state of modules of a model, and of generators, before a call.

    Args:
        modules: which are looked at, with what their code and hooks name.
        device: that computes.
        moves: whether buffers are exchanged for copies on other devices meanwhile.
        first: whether this call may make replicas, which puts hooks that record outputs.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        device: torch.device,
        *,
        moves: bool,
        first: bool = False,
    ) -> None:
        self._device, self._random = device, random_states(device)
        self._expected = OUTPUT_HOOKS if moves and first else ()
        state = UnitState(modules)
        self._leaves, self._outline = outline_of((), state.modules, state.others)
        buffers = {id(buffers_of(module)) for module in state.modules} if moves else set()
        self._moving = {n for n, place in enumerate(self._outline.places) if id(place.target) in buffers}
        self._values = [leaf.detach().clone() for leaf in self._leaves]

    def changed(self, *, in_place: bool = False) -> str | None:
        """Return the name of something that is another by now, or is a tensor changed in place; None: nothing is."""
        written = self._outline.written(self._leaves)
        names = (self._outline.name_of(*key) for key in written if key[0] not in self._moving)
        left = next((name for name in names if not name.endswith(self._expected)), None)
        if left is None and in_place:
            pairs = enumerate(zip(self._leaves, self._values, strict=True))
            others = (at for at, (leaf, value) in pairs if not same_values(leaf, value))
            left = next(map(self._outline.name_of_leaf, others), None)
        return left

    def undo(self) -> None:
        """Have everything be as it was."""
        self._outline.restore(self._leaves)
        self.undo_tensors()

    def undo_tensors(self) -> None:
        """Have generators be where they were, and tensors what they were that were changed in place."""
        set_random_states(self._device, self._random)
        with torch.no_grad():
            for leaf, value in zip(self._leaves, self._values, strict=True):
                if not same_values(leaf, value):
                    leaf.copy_(value)


def watching(model: nn.Module) -> int:
    """Return what tells whether other hooks hang on modules of ``model``, or it is in another mode, than before."""
    hooks = (
        (id(one), *map(id, hung.values()))
        for one in model.modules()
        for hung in forward_hooks_of(one)
        if hung
    )
    return hash((model.training, *hooks))


class FlightState:
    """Tells whether forwards leave state on a model that others in flight with them would read.

    Forwards are watched until those of a call have left nothing, and again where other hooks hang on modules. One that
    is seen to leave state does so from then on, for what it leaves may be equal by chance.
    """

    def __init__(self) -> None:
        self._left: str | None = None
        self._clean: int | None = None  # hooks and mode in which forwards left none, see `watching`

    @contextmanager
    def watched(self, model: nn.Module, device: torch.device) -> Iterator[Callable[[], bool]]:
        """Yield what tells whether forwards have left state so far."""
        sign, modules = watching(model), list(model.modules())
        if self._left is not None or self._clean == sign:
            yield lambda: self._left is not None
            return
        before = LeftState(modules, device, moves=False)

        def leaves() -> bool:
            if self._left is None:
                self._left = before.changed(in_place=True)
                if self._left is not None:
                    what = f"a forward changes {self._left}, which others would read"
                    _log.warning("sequences go one behind the other from here: %s", what)
            return self._left is not None

        yield leaves
        if not leaves():
            self._clean = sign


def is_watched(unit: nn.Module) -> bool:
    """Whether forward hooks look at modules inside ``unit``; those with which transformers collects outputs do not."""
    if has_hooks_of_all():
        return True
    return any(
        not str(getattr(hook, "__module__", "")).startswith("transformers.")
        for module in unit.modules()
        if module is not unit  # hooks of the unit itself run around it
        for hooks in forward_hooks_of(module)
        for hook in hooks.values()
    )


class States(NamedTuple):
    """States of the random generators; None for absent ones."""

    cpu: Tensor
    device: Tensor | None
    python: Any
    numpy: Any


def random_states(device: torch.device) -> States:
    """Return where the generators are."""
    of_device = module_of(device).get_rng_state(device) if is_accelerator(device) else None
    numpy = sys.modules.get("numpy")
    return States(
        torch.get_rng_state(),
        of_device,
        random.getstate(),
        None if numpy is None else numpy.random.get_state(),
    )


def set_random_states(device: torch.device, states: States) -> None:
    """Have the generators go on from ``states``."""
    torch.set_rng_state(states.cpu)
    if states.device is not None:
        module_of(device).set_rng_state(states.device, device)
    random.setstate(states.python)
    if states.numpy is not None:
        sys.modules["numpy"].random.set_state(states.numpy)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators from which code of a model draws on ``device``.

    Args:
        device: that is computed on.
        seed: below 2**63.
    """
    torch.default_generator.manual_seed(seed)
    if is_accelerator(device):
        with module_of(device).device(device):
            module_of(device).manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
