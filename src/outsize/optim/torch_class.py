"""Step by classes of ``torch.optim``, tensor by tensor or on planes at home.

What it keeps of a parameter lies in planes of a home, see `outsize.optim.torch_trial`. For an update it is handed to an
object of the class as its ``state``, and what comes out is put back where that is another tensor.
"""

import difflib
import importlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outsize.errors import ConfigError
from outsize.optim.optimizer_names import OWN, Factor
from outsize.optim.optimizer_spec import STATE
from outsize.optim.planes import StatePlanes, Update, WholeParameter

Optimizer = torch.optim.Optimizer
# What a learning rate is until that of a step is set.
ANY_LR = 1e-3
# What an update needs beside the state that it begins, of the size of the parameter: of the classes of torch 3 at most.
_WORKING = 3
_LION = "torch has no Lion; with `pip install lion-pytorch` it is optimizer.name=lion_pytorch.Lion"


@dataclass(frozen=True, slots=True)
class Entry:
    """What a class keeps of a parameter under a key.

    Attributes:
        key: in the state of a parameter.
        factor: shape of what is kept, see `outsize.optim.optimizer_names`; None for a number for each element.
        number: whether it is a number of Python.
    """

    key: str
    factor: Factor | None
    number: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchClass:
    """What is known of a class and its arguments.

    Attributes:
        path: of the class, e.g. ``torch.optim.SGD``.
        arguments: besides learning rate and weight decay, as JSON.
        entries: what it keeps of a parameter, the number of updates left out.
        count: what the number of updates is kept in; None where it is not.
        by_element: whether pieces of parameters step as the whole does.
        decays: whether it takes a ``weight_decay``.
    """

    path: str
    arguments: str
    entries: tuple[Entry, ...]
    count: "Count | None"
    by_element: bool
    decays: bool

    def with_decay(self, weight_decay: float) -> "TorchClass":
        """Return itself.

        Raises:
            ConfigError: there is to be a weight decay, and the class has none.
        """
        if weight_decay and not self.decays:
            raise ConfigError(f"optimizer.weight_decay: {self.path} has none; leave it out")
        return self

    @property
    def temporaries(self) -> int:
        """Tensors of the size of a parameter that a step makes for itself at most, where parameters step whole."""
        return _WORKING + sum(entry.factor is None for entry in self.entries)

    @property
    def state_of(self) -> tuple[tuple[str, Factor | None], ...]:
        """Names and shapes of the planes that it needs."""
        return tuple((STATE + entry.key, entry.factor) for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Count:
    """What a class keeps the number of updates in.

    Attributes:
        key: in the state of a parameter.
        dtype: of a tensor; None for a number of Python.
    """

    key: str
    dtype: torch.dtype | None

    def after(self, updates: int) -> Any:
        """Return the value after so many updates."""
        return updates if self.dtype is None else torch.tensor(float(updates), dtype=self.dtype)


def find_class(name: str) -> type[Optimizer]:
    """Return the class that ``optimizer.name`` means.

    Raises:
        ConfigError: there is none, or it is none of an optimizer.
    """
    classes = {
        key.lower(): member
        for key, member in vars(torch.optim).items()
        if isinstance(member, type) and issubclass(member, Optimizer) and member is not Optimizer
    }
    module, _, attribute = name.rpartition(".")
    if not module:
        if (cls := classes.get(name.lower())) is not None:
            return cls
        names = [*OWN, *sorted(member.__name__ for member in classes.values())]
        near = difflib.get_close_matches(name.lower(), [each.lower() for each in names], n=1)
        better = next((each for each in names if each.lower() in near), None)
        hint = f"did you mean {better}?" if better else f"there is {', '.join(names)}"
        if name.lower() == "lion":
            hint = _LION
        raise ConfigError(
            f"optimizer.name: there is no {name}; {hint}; a class of another package is written package.module.Class"
        )
    try:
        member = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"optimizer.name: {name} cannot be imported ({error}); is its package installed?"
        ) from error
    if not (isinstance(member, type) and issubclass(member, Optimizer)) or member is Optimizer:
        raise ConfigError(f"optimizer.name: {name} is no class of an optimizer of torch; name one")
    return member


def as_torch_takes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as classes of torch take them: lists of a configuration as tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}


class Stepper:
    """One object of a class, which steps one tensor after the other with a state of its own for each."""

    def __init__(self, about: TorchClass, weight_decay: float) -> None:
        self._about = about
        self._made = find_class(about.path)
        self._arguments = as_torch_takes(json.loads(about.arguments))
        self._weight_decay = weight_decay
        self._one: Optimizer | None = None

    def step(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state_items: Sequence[Tensor | None],
        count: int,
        lr: float,
        decay: float,
    ) -> None:
        """Step an fp32 tensor in place.

        Args:
            parameter: of any shape.
            gradient: of the same, spent.
            state_items: what is kept under each entry, in its shape; None where there is none. It is changed in place.
            count: how often it has been stepped, this update included.
            lr: learning rate.
            decay: factor of weight decay.
        """
        parameter = parameter.detach()
        parameter.grad = gradient
        optimizer = self._begun(parameter) if count == 1 else self._going_on(parameter, state_items, count)
        group = optimizer.param_groups[0]
        group["lr"] = lr
        if self._about.decays and "weight_decay" in group:
            group["weight_decay"] = self._weight_decay * decay
        optimizer.step()
        state = optimizer.state[parameter]
        for entry, held in zip(self._about.entries, state_items, strict=True):
            value = state.get(entry.key)
            if held is None or value is None:
                continue
            if entry.number:
                held.fill_(value)
            elif value.data_ptr() != held.data_ptr():
                held.copy_(value)
        optimizer.state.clear()

    def resident(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """Return an object of the class for whole parameters, which keeps its state itself."""
        return self._made(groups, lr=lr, **self._arguments)  # type: ignore[call-arg]

    def _begun(self, parameter: Tensor) -> Optimizer:
        """An object of its own for a tensor whose state begins, perhaps in the constructor."""
        optimizer = self._made([parameter], lr=ANY_LR, **self._arguments)  # type: ignore[call-arg]
        if self._one is None:
            self._one = self._made([torch.zeros(1)], lr=ANY_LR, **self._arguments)  # type: ignore[call-arg]
        return optimizer

    def _going_on(self, parameter: Tensor, state_items: Sequence[Tensor | None], count: int) -> Optimizer:
        if self._one is None:
            self._one = self._made([torch.zeros(1)], lr=ANY_LR, **self._arguments)  # type: ignore[call-arg]
        state: dict[str, Any] = {
            entry.key: held.item() if entry.number else held
            for entry, held in zip(self._about.entries, state_items, strict=True)
            if held is not None
        }
        if self._about.count is not None:
            state[self._about.count.key] = self._about.count.after(count - 1)
        self._one.param_groups[0]["params"] = [parameter]
        self._one.state = defaultdict(dict, {parameter: state})
        return self._one


class ElementRule:
    """A class of torch whose update looks at elements one by one, see `outsize.optim.planes.UpdateRule`."""

    def __init__(self, about: TorchClass, weight_decay: float) -> None:
        self._stepper = Stepper(about, weight_decay)
        self.num_moments = len(about.entries)

    def update(
        self, update: Update, master: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], *, exact: bool
    ) -> None:
        """Update in place, see `outsize.optim.planes.UpdateRule`."""
        self._stepper.step(master, gradient, moments, update.count, update.lr, update.decay)

    def resident(self, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        """Return an object of the class, see `outsize.optim.planes.UpdateRule`."""
        return self._stepper.resident(groups, lr)

    def step_native(self, update: Update, planes: StatePlanes, gradient: Tensor) -> int:
        """Leave all to `update`."""
        return 0


class ParameterRule:
    """A class of torch that steps whole parameters, see `outsize.optim.planes.WholeRule`."""

    def __init__(self, about: TorchClass, weight_decay: float) -> None:
        self._about = about
        self._stepper = Stepper(about, weight_decay)
        self.factors: tuple[Factor, ...] = tuple(
            dict.fromkeys(entry.factor for entry in about.entries if entry.factor is not None)
        )

    def step_parameter(self, parameter: WholeParameter, update: Update) -> None:
        """Step a parameter, see `outsize.optim.planes.WholeRule`."""
        master, gradient = parameter.master(), parameter.gradient()
        if update.clip != 1.0:
            gradient.mul_(update.clip)
        state = [self._kept(parameter, entry) for entry in self._about.entries]
        self._stepper.step(master, gradient, state, update.count, update.lr, update.decay)
        parameter.put_back(master, update.key)

    def resident(self, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        """Return an object of the class, see `outsize.optim.planes.WholeRule`."""
        return self._stepper.resident(groups, lr)

    def _kept(self, parameter: WholeParameter, entry: Entry) -> Tensor | None:
        flat = parameter.flat(STATE + entry.key, entry.factor)
        if flat is None:
            return None
        shape = parameter.tensor.shape if entry.factor is None else parameter.factors[entry.factor].shape
        return flat.view(shape)


def rule_of_class(about: TorchClass, weight_decay: float) -> ElementRule | ParameterRule:
    """Return how parameters step by a class."""
    return (ElementRule if about.by_element else ParameterRule)(about.with_decay(weight_decay), weight_decay)
