"""State that a call of a unit changes besides its output: buffers, attributes, lists, objects, hooks, generators.

Few units do; a trial tells which (`runtime.trial.effects_trial`). Only of these is the state gone through in a step.

Microbatches take turns between units, so that what the code of one leaves there is overwritten by the next. Such a
batch has to go whole. What is made once and stays (a table, a cached mask) does no harm.
"""

import dis
import inspect
import logging
import random
import re
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from outsize.accelerators import is_accelerator, module_of
from outsize.compat.torch_private import (
    buffers_of,
    forward_hooks_of,
    has_hooks_of_all,
)
from outsize.compat.transformers_private import OUTPUT_HOOKS
from outsize.runtime.forward.outline import outline_of

_log = logging.getLogger(__name__)
# Of what code names outside of itself, what it may write into; other objects there belong to libraries.
_WRITABLE = (list, dict, set, deque, OrderedDict, defaultdict)
_NUMBERS = (int, float, str, torch.Tensor)
_LIBRARY = re.compile(
    r"(transformers|diffusers|peft|accelerate|huggingface_hub|torch)\b"
)  # their models assign none
_STORES = ("STORE_GLOBAL", "STORE_DEREF")


class UnitState:
    """Where the state of some modules lies.

    Args:
        modules: of a unit, or all of a model.

    Attributes:
        modules: those whose attributes and buffers are state.
        others: containers, objects and generators that code and hooks name.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules: list[nn.Module] = []
        self.others: list[Any] = []
        for module in modules:
            self.modules.append(module)
            for value in _named_by(module):
                if isinstance(value, nn.Module):
                    self.modules.append(value)
                elif type(value) in _WRITABLE or not _is_of_code(value):
                    self.others.append(value)


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
                if not torch.equal(leaf, value):
                    leaf.copy_(value)


def _named_by(module: nn.Module) -> Iterator[Any]:
    """Yield what the code of a module and of the hooks in it names outside of itself."""
    for function in _functions_of(cast("Hashable", type(module))):
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
        yield from _named_in(hook)
    elif not inspect.isbuiltin(hook):
        yield hook


def _named_in(function: Callable[..., Any]) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not yet filled
            continue
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if type(value) in _WRITABLE or isinstance(value, torch.Generator):
            yield value


@cache
def _classes_of(kind: Any) -> tuple[type, ...]:
    """Return a class of modules and those that it comes from, below PyTorch's own."""
    return tuple(one for one in kind.__mro__ if not one.__module__.startswith("torch.") and one is not object)


def _class_values(kinds: Iterable[Any], of: tuple[type, ...]) -> list[tuple[str, Any]]:
    """Return what classes of modules, and those that these come from, hold of some types, by name."""
    items = (item for kind in kinds for one in _classes_of(kind) for item in vars(one).items())
    return [item for item in items if isinstance(item[1], of)]


@cache
def _functions_of(kind: Any) -> tuple[Any, ...]:
    """Return the functions of a class of modules, below PyTorch's own."""
    values = (value for one in _classes_of(kind) for value in vars(one).values())
    return tuple(filter(inspect.isfunction, map(inspect.unwrap, filter(inspect.isfunction, values))))


def _assigned_by(modules: Iterable[nn.Module]) -> str | None:
    """Return a global name, or a variable of a closure, that the code of modules or of their hooks assigns to."""
    hooks = [hook for one in modules for hung in forward_hooks_of(one) for hook in hung.values()]
    kinds = {cast("Hashable", type(one)) for one in modules}
    waiting, functions = [*hooks, *(each for kind in kinds for each in _functions_of(kind))], set[Any]()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if (
            not inspect.isfunction(function)
            or function in functions
            or _LIBRARY.match(function.__module__ or "")
        ):
            continue
        functions.add(function)
        code, space = function.__code__, function.__globals__
        stores = {one.argval for one in dis.get_instructions(code) if one.opname in _STORES}
        if names := stores - {*code.co_varnames, *code.co_cellvars}:
            return f"{function.__module__}.{min(names)}"
        waiting += [
            one for one in map(space.get, code.co_names) if getattr(one, "__globals__", None) is space
        ]
    return None


def _is_of_code(value: Any) -> bool:
    """Whether a value that a closure names is code, or a class."""
    return isinstance(value, type) or inspect.isroutine(value) or inspect.ismodule(value)


class LeftState:
    """The state of modules of a model, and of generators, before a call.

    Args:
        modules: which are looked at, with what their code and hooks name.
        device: that computes.
        moves: whether buffers are exchanged for copies on other devices meanwhile.
        first: whether this call may make replicas, which puts hooks that record outputs.
        others: containers that are looked at, too.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        device: torch.device,
        *,
        moves: bool,
        first: bool = False,
        others: Iterable[Any] = (),
    ) -> None:
        self._device, self._random = device, random_states(device)
        self._expected = OUTPUT_HOOKS if moves and first else ()
        state = UnitState(modules)
        self._leaves, self._outline = outline_of((), state.modules, [*state.others, *others])
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
            others = (at for at, (leaf, value) in pairs if not torch.equal(leaf, value))
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
                if not torch.equal(leaf, value):
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
        kinds = {type(one) for one in modules}
        numbers = set(_class_values(kinds, _NUMBERS))
        shared = [value for _, value in _class_values(kinds, _WRITABLE)]
        before = LeftState(modules, device, moves=False, others=shared)

        def leaves() -> bool:
            if self._left is None:
                others = (name for name, _ in numbers ^ set(_class_values(kinds, _NUMBERS)))
                self._left = next(others, None) or before.changed(in_place=True) or _assigned_by(modules)
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
