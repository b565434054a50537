"""A trial leaves nothing behind: buffers, attributes, and generators are as before it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from outsize.runtime.forward.random_states import random_states, set_random_states
from outsize.runtime.forward.unit_state import UnitState, untouched


@contextmanager
def without_trace(model: nn.Module, device: torch.device | None = None) -> Iterator[None]:
    """Leave the state of ``model`` and the generators of random numbers as they are, whatever runs meanwhile.

    Args:
        model: whose parameters may be changed.
        device: that computes; None for the CPU.
    """
    device = torch.device("cpu") if device is None else device
    states = random_states(device)
    try:
        with untouched(UnitState(model.modules())):
            yield
    finally:
        set_random_states(device, states)
