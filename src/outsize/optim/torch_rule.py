"""Rules that step planes at home by the code of a class of torch, piece by piece or parameter by parameter."""

from typing import Any

import torch
from torch import Tensor

from outsize.optim.factors import Factor
from outsize.optim.optimizer_spec import STATE
from outsize.optim.planes import StatePlanes, Update, WholeParameter
from outsize.optim.torch_class import Entry, Stepper, TorchClass


class ElementRule:
    """A class of torch whose update looks at elements one by one, see `outsize.optim.planes.UpdateRule`.

    Args:
        about: the class.
        weight_decay: as the class has it.
    """

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
    """A class of torch that steps whole parameters, see `outsize.optim.planes.WholeRule`.

    Args:
        about: the class.
        weight_decay: as the class has it.
    """

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
        kept = [self._kept(parameter, entry) for entry in self._about.entries]
        self._stepper.step(master, gradient, kept, update.count, update.lr, update.decay)
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
