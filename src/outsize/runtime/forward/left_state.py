"""What a call leaves on a model besides its output: attributes, lists, dicts, objects, what hooks have captured.

Microbatches take turns between units, so that what the code of one leaves there is overwritten by the next. Such a
batch has to go whole. What is made once and stays (a table, a cached mask) does no harm.
"""

from collections.abc import Iterable

import torch
from torch import nn

from outsize.compat.torch_private import buffers_of, forward_hooks_of
from outsize.runtime.forward.outline import outline_of
from outsize.runtime.forward.short_recompute import random_states, set_random_states
from outsize.runtime.forward.unit_state import UnitState


class LeftState:
    """The state of modules of a model, and of generators, before a call.

    Args:
        modules: which are looked at, with what their code and hooks name.
        device: that computes.
        moves: whether buffers are exchanged for copies on other devices meanwhile.
    """

    def __init__(self, modules: Iterable[nn.Module], device: torch.device, *, moves: bool) -> None:
        self._device, self._random = device, random_states(device)
        state = UnitState(modules)
        self._leaves, self._outline = outline_of((), state.modules, state.others)
        buffers = {id(buffers_of(module)) for module in state.modules} if moves else set()
        self._moving = {n for n, place in enumerate(self._outline.places) if id(place.target) in buffers}
        self._values = [leaf.detach().clone() for leaf in self._leaves]

    def changed(self) -> str | None:
        """Return the name of something that is another by now; None where nothing is. Changes in place do not count."""
        written = self._outline.written(self._leaves)
        return next((self._outline.name_of(*key) for key in written if key[0] not in self._moving), None)

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
