"""Masters on their way into a home: weights, and what a trained unit keeps beside them, in whichever layout."""

from collections.abc import Sequence

from torch import Tensor

from outsize.optim.optimizer_spec import MASTER, MASTER_LOW, MASTER_TIES, WEIGHTS, StateLayout
from outsize.optim.split_masters import split_master
from outsize.storage.arena import Arena
from outsize.storage.home import Home
from outsize.storage.home_layout import ITEM_DTYPE

_KEPT = (WEIGHTS, MASTER, MASTER_LOW, MASTER_TIES)


class MasterWriter:
    """Writes fp32 masters of trained units, piece by piece.

    Args:
        home: where to.
        state: how a trained unit lies there.
        arena: where the memory of a piece comes from.
        size: elements of the largest piece.
        own: elements of each unit of which ``home`` holds more than weights; None for all. A piece lies within them, or
            without.
    """

    def __init__(
        self,
        home: Home,
        state: StateLayout,
        arena: Arena,
        size: int,
        own: Sequence[range] | None = None,
    ) -> None:
        self._home = home
        self._own = own
        self._made = {name: plane for name, plane in state.planes.items() if name in _KEPT}
        self._room = {
            name: arena.take(plane.num_bytes(size), name).view(ITEM_DTYPE[plane.item])
            for name, plane in self._made.items()
            if plane.item != "fp32"
        }

    def write(self, unit: int, start: int, master: Tensor) -> None:
        """Write the weights of a unit from element ``start`` on, and all that is kept of their masters.

        Args:
            unit: index.
            start: first element, a multiple of the layout's quantum.
            master: fp32, at an address that direct I/O takes.

        Raises:
            StorageError: the home cannot be written.
        """
        numel = master.numel()
        parts = {name: room[: self._made[name].items(numel)] for name, room in self._room.items()}
        if MASTER_LOW in parts:
            ties = parts.get(MASTER_TIES)
            if ties is not None:
                ties.zero_()
                ties = ties[: numel // 8]
            split_master(master, parts[WEIGHTS][:numel], parts[MASTER_LOW][:numel], ties)
        elif WEIGHTS in parts:
            parts[WEIGHTS].copy_(master)
        for name, plane in self._made.items():
            if plane.item == "fp32":
                parts[name] = master
        if self._own is None:
            self._home.write_planes(unit, start, parts)
            return
        self._home.write(unit, WEIGHTS, start, parts.pop(WEIGHTS))
        if parts and start in self._own[unit]:
            self._home.write_planes(unit, start, parts)
