"""State that a call of a unit changes besides its output: buffers, attributes, lists, objects, hooks, generators.

Few units do; a trial tells which (`runtime.trial.effects_trial`). Only of these is the state gone through in a step.

Microbatches take turns between units, so that what the code of one leaves there is overwritten by the next. Such a
batch has to go whole. What is made once and stays (a table, a cached mask) does no harm.
"""

import logging
import random
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import length_hint
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from outsize.accelerators import is_accelerator, module_of
from outsize.compat.torch_private import buffers_of, forward_hooks_of, has_hooks_of_all, version_of
from outsize.compat.transformers_private import OUTPUT_HOOKS
from outsize.runtime.forward.outline import MOST_ITEMS, outline_of
from outsize.runtime.forward.places import (
    OF_MODULES,
    State,
    Variables,
    kind_of,
    named_by,
    read_in_files,
    read_variables,
)

_log = logging.getLogger(__name__)
# What is its own mark; what of modules no forward reads; and how deep settings are looked for in objects.
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodType)
_MARKED = {int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, State, *_FUNCTIONS}
_OF_NO_EFFECT = OF_MODULES - {"forward", "training"}
_DEPTH = 3


def _fp32_precision() -> str:
    """Return how products in fp32 round, by the API of torch's two that it was set with: the older one refuses else."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return str(torch.backends.cuda.matmul.fp32_precision)


_FLAGS = {
    "default_dtype": torch.get_default_dtype,
    "fp32_precision": _fp32_precision,
    "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
}


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
            for value in named_by(module):
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
        _put_back(leaves[start:], copies)


@torch.no_grad()
def _put_back(leaves: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for leaf, value in zip(leaves, values, strict=True):
        if not same_values(leaf, value):
            leaf.copy_(value)


class LayerSettings:
    """What callers set of layers between a forward and its backward, which recomputes them as they are then.

    Args:
        modules: of the layers, before the forward.
        by_passes: what forwards and backwards set, by holder and name; what those of now set is added.
    """

    def __init__(self, modules: Sequence[nn.Module], by_passes: set[tuple[Any, str]]) -> None:
        self._modules, self._by_passes = modules, by_passes
        self._then = _settings_of(modules)

    def end_pass(self) -> None:
        """Note what has been set since: by the forward, or by the backward that `changed` came before."""
        self._by_passes |= self._since()

    def changed(self) -> str:
        """Return the name of something that is another since; empty for nothing, or for what passes set as well."""
        return min((name for _, name in self._since() - self._by_passes), default="")

    def _since(self) -> set[tuple[Any, str]]:
        then, self._then = self._then, _settings_of(self._modules)
        others = {key for key, value in self._then.items() if (value,) != (then.get(key, then),)}
        layers = set(map(id, self._modules))  # of which hooks may have gone again
        gone = (key for key in then.keys() - self._then.keys() if key[0] in layers)
        return others | {key for key in gone if "_forward_" not in key[1]}


def _settings_of(modules: Iterable[nn.Module]) -> dict[tuple[Any, str], Any]:
    """Return what callers can set of layers and of what these read and call, by holder and name.

    That is attributes, those of objects that layers hold (a config), variables and classes that their code names,
    buffers, hooks, functions of torch and of the layers' own files, and flags of torch. Marks of them hold no tensor.
    """
    state, marks = UnitState(modules), dict[int, Any]()
    settings: dict[tuple[Any, str], Any] = {(0, name): read() for name, read in _FLAGS.items()}
    bases = {base for module in state.modules for base in type(module).__mro__[:-1]}
    for holder in (torch, nn.functional, Tensor, *bases):
        of_holder = ((n, v) for n, v in vars(holder).items() if type(v) in _FUNCTIONS and n != "manual_seed")
        settings.update(((id(holder), name), function) for name, function in of_holder)
    for kind in set(map(type, state.modules)):
        for file, names in read_in_files(cast("Hashable", kind)):
            values = ((name, vars(file).get(name)) for name in names)
            settings.update(((id(file), name), one) for name, one in values if type(one) in _FUNCTIONS)
    for module in state.modules:
        at = id(module)
        for name, value in vars(module).items():
            if name not in _OF_NO_EFFECT and ("_forward_" not in name or value):
                settings[at, name] = "_forward_" in name or _mark_of(value, marks)
    for other in state.others:
        items = (
            read_variables(other)
            if isinstance(other, Variables)
            else [(f"what a hook holds ({type(other).__name__})", other)]
        )
        at = id(other.holder if isinstance(other, Variables) else other)
        settings.update(((at, name), _mark_of(value, marks)) for name, value in items)
    return settings


def _mark_of(value: Any, marks: dict[int, Any], depth: int = 0) -> Any:
    """Return what tells a value from others by its contents, but for tensors and objects of libraries."""
    kind = type(value)
    if kind in _MARKED:
        return value
    mark = marks.get(id(value))
    if mark is None:
        mark = marks[id(value)] = id(value)
        within = kind_of(value) if depth < _DEPTH and not isinstance(value, nn.Module) else None
        if isinstance(value, Tensor):
            mark = mark, 0 if value.is_inference() else version_of(value)
        elif kind is tuple or (within is not None and length_hint(value) <= MOST_ITEMS):
            items = enumerate(value) if within is None else within.read(value)
            mark = tuple((key, _mark_of(one, marks, depth + 1)) for key, one in items)
        marks[id(value)] = mark
    return mark


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
        _put_back(self._leaves, self._values)


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
