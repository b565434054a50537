"""Where the generators are from which code of a model draws: the CPU's, and that of the device that computes."""

import torch
from torch import Tensor

from outsize.accelerators import is_accelerator, module_of

States = tuple[Tensor, ...]


def random_states(device: torch.device) -> States:
    """Return where the generators are."""
    more = (module_of(device).get_rng_state(device),) if is_accelerator(device) else ()
    return torch.get_rng_state(), *more


def set_random_states(device: torch.device, states: States) -> None:
    """Have the generators go on from ``states``."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        module_of(device).set_rng_state(states[1], device)


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
