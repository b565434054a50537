"""Whether the model's own code takes values from one side of a unit to the other by way of the model itself.

It sets an attribute, pushes onto a list, writes into a buffer, and looks there behind the unit. Microbatches take turns
at units, so that each would find what another has left.
"""

from typing import Any

from torch import Tensor

from outsize.compat.torch_private import version_of
from outsize.model.split import Split
from outsize.runtime.forward.outline import outline_of
from outsize.runtime.forward.unit_state import UnitState


class CrossedState:
    """State of the modules outside of units, from the start of a forward on.

    What differs at a unit and no longer at the end has crossed it, and so has a tensor with a history. Changes in place
    count as well, but for those of PyTorch's own modules (BatchNorm). What else is there in the end may have been made
    once for all.
    """

    def __init__(self, split: Split) -> None:
        inside = {id(child) for module in split.modules for child in module.modules()}
        outer = [module for module in split.model.modules() if id(module) not in inside]
        state = UnitState(outer)
        self._leaves, self._outline = outline_of((), state.modules, state.others)
        counting = {
            id(buffer)
            for module in outer
            if type(module).__module__.startswith("torch.nn.")
            for buffer in module.buffers(recurse=False)
        }
        self._versions = {
            at: _version(leaf) for at, leaf in enumerate(self._leaves) if id(leaf) not in counting
        }
        self._at_units: set[tuple[int, Any]] = set()
        self._crossed: tuple[int, Any] | None = None

    def reach_unit(self) -> None:
        """Note what is another where a unit is called."""
        written = self._outline.written(self._leaves)
        self._at_units |= written.keys()
        with_history = (key for key, one in written.items() if isinstance(one, Tensor) and one.requires_grad)
        self._crossed = self._crossed or next(with_history, None)

    def crossing(self) -> str:
        """Return the name of something that has crossed a unit, once the forward has returned; empty for nothing."""
        for at, former in self._versions.items():
            if _version(self._leaves[at]) != former:
                return self._outline.name_of_leaf(at)
        gone = self._at_units - self._outline.written(self._leaves).keys()
        crossed = self._crossed or next(iter(sorted(gone, key=str)), None)
        return "" if crossed is None else self._outline.name_of(*crossed)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)
