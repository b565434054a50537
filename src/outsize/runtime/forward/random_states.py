"""Where the generators are from which code of a model draws: Python's, numpy's, PyTorch's for CPU and device."""

import random
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outsize.accelerators import is_accelerator, module_of


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


class Drawing:
    """Lets pieces of a forward draw where the generators are, and a piece that runs again what it drew at first.

    Args:
        device: that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: dict[tuple[int, bool], States] = {}

    def __call__(self, unit: int, glue: bool) -> None:
        """Called before each piece: a unit, or the code before it."""
        if (unit, glue) in self._states:
            set_random_states(self._device, self._states[unit, glue])
        else:
            self._states[unit, glue] = random_states(self._device)
