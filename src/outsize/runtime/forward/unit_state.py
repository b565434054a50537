"""State that a call of a unit changes besides its output: buffers, attributes, lists, objects, hooks.

Few units do; a trial tells which (`runtime.trial.effects_trial`). Only of these is the state gone through in a step.

Microbatches take turns between units, so that what the code of one leaves there is overwritten by the next. Such a
batch has to go whole. What is made once and stays (a table, a cached mask) does no harm.
"""

import inspect
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, cast

import torch
from torch import nn

from outsize.compat.torch_private import buffers_of, forward_hooks_of
from outsize.compat.transformers_private import OUTPUT_HOOKS
from outsize.runtime.forward.outline import outline_of
from outsize.runtime.forward.short_recompute import random_states, set_random_states

# Of what code names outside of itself, what it may write into; other objects there belong to libraries.
_WRITABLE = (list, dict, set, deque, OrderedDict, defaultdict)


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
def _functions_of(kind: Any) -> tuple[Any, ...]:
    """Return the functions of a class of modules, below PyTorch's own."""
    classes = [one for one in kind.__mro__ if not one.__module__.startswith("torch.") and one is not object]
    functions = [
        inspect.unwrap(value) for one in classes for value in vars(one).values() if inspect.isfunction(value)
    ]
    return tuple(value for value in functions if inspect.isfunction(value))


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
    """

    def __init__(
        self, modules: Iterable[nn.Module], device: torch.device, *, moves: bool, first: bool = False
    ) -> None:
        self._device, self._random = device, random_states(device)
        self._expected = OUTPUT_HOOKS if moves and first else ()
        state = UnitState(modules)
        self._leaves, self._outline = outline_of((), state.modules, state.others)
        buffers = {id(buffers_of(module)) for module in state.modules} if moves else set()
        self._moving = {n for n, place in enumerate(self._outline.places) if id(place.target) in buffers}
        self._values = [leaf.detach().clone() for leaf in self._leaves]

    def changed(self) -> str | None:
        """Return the name of something that is another by now; None where nothing is. Changes in place do not count."""
        written = self._outline.written(self._leaves)
        names = (self._outline.name_of(*key) for key in written if key[0] not in self._moving)
        return next((name for name in names if not name.endswith(self._expected)), None)

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
