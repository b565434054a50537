"""What the model's own code has turned on around a unit: no gradients, another autocast.

Such modes belong to a thread, and a forward that pauses at its units (`outsize.model.walk`) shares its thread with
whoever goes on meanwhile. So a boundary tells a unit's forward the modes that it was called in, where they are others
than those that the model's forward runs in, and takes them again when the model goes on.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch

from outsize.accelerators import VENDORS
from outsize.errors import ModelError

# The keyword argument that tells a unit's forward what to run in.
MODES = "_outsize_modes"


@cache
def _kinds() -> tuple[str, ...]:
    """Return the types of devices that this torch knows; those of extensions once they are imported."""
    return ("cpu", *(kind for kind in VENDORS if hasattr(torch, kind)))


@dataclass(frozen=True, slots=True)
class Modes:
    """Modes of a thread.

    Attributes:
        grad: whether graphs are made.
        autocast: the dtype of each type of device, where its operations are cast.
    """

    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def of_now(cls) -> Self:
        """Return those of the calling thread."""
        active = [kind for kind in _kinds() if torch.is_autocast_enabled(kind)]
        return cls(torch.is_grad_enabled(), tuple((kind, torch.get_autocast_dtype(kind)) for kind in active))

    def take(self) -> None:
        """Have the calling thread in these modes."""
        torch.set_grad_enabled(self.grad)
        given = dict(self.autocast)
        for kind in _kinds():
            if torch.is_autocast_enabled(kind) != (kind in given):
                torch.set_autocast_enabled(kind, kind in given)
            if kind in given and torch.get_autocast_dtype(kind) != given[kind]:
                torch.set_autocast_dtype(kind, given[kind])

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Run in these modes while the context lasts; graphs are made where both have them."""
        outer_modes = Modes.of_now()
        cached = torch.is_autocast_cache_enabled()
        Modes(self.grad and outer_modes.grad, self.autocast).take()
        torch.set_autocast_cache_enabled(False)  # it would keep casts of weights that have left their slot
        try:
            yield
        finally:
            outer_modes.take()
            torch.set_autocast_cache_enabled(cached)


def check_inference(before: bool) -> None:
    """Check that code of the model has not turned inference mode on before it calls a unit.

    Raises:
        ModelError: it has.
    """
    if torch.is_inference_mode_enabled() != before:
        raise ModelError(
            "the model calls a unit within torch.inference_mode() of its own, which cannot pause; write torch.no_grad()"
        )
