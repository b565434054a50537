"""Gather the optimizer state of a unit from all ranks to the first, piece by piece, for a checkpoint.

So a checkpoint is that of a single process, and any number of ranks goes on from it. On the lane ``store`` of the first
rank a plane is asked for, and all ranks send their share of it; masters that are split are joined by the rank that has
them. The others stand by until they hear that the unit is done. What a checkpoint has asked for and then does not take,
because it was given up, is received all the same.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from outsize.group.group import Group
from outsize.model.sizes.model_spec import ITEMSIZE, ModelSpec, UnitSpec
from outsize.optim.optimizer_spec import MASTER, MASTER_LOW, MASTER_TIES, WEIGHTS, StateLayout
from outsize.optim.shares import shares
from outsize.optim.split_masters import join_master
from outsize.runtime.forward.binding import TORCH_DTYPE
from outsize.runtime.ops.exchange_ops import Shared
from outsize.storage.home import Home
from outsize.storage.home_layout import ITEM_DTYPE
from outsize.storage.ledger import Arena

STORE_CHANNEL = "store"
_DONE = -1


class Collector:
    """Collects planes on the first rank, and serves it on all others.

    Args:
        spec: the model.
        group: the ranks.
        home: of the own share.
        state: how a trained unit lies there.
        buffer: fp32, for a piece on its way.
        halves: bytes, for the planes of split masters in such a piece; None where they lie in memory, or are not split.
    """

    def __init__(
        self,
        spec: ModelSpec,
        group: Group,
        home: Home,
        state: StateLayout,
        buffer: Tensor,
        halves: Tensor | None = None,
    ) -> None:
        self._rank, self._size = group.rank, group.size
        self._made, self._halves = state.planes, halves
        self._channel = group.channel(STORE_CHANNEL)
        self._home = home
        self._buffer = buffer
        self._shares = shares(spec, group.size)
        self._planes = sorted({*self._made, MASTER})
        self._asked: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this rank writes checkpoints."""
        return self._rank == 0

    def plane(self, unit: UnitSpec, plane: str) -> Iterator[tuple[int, Tensor]]:
        """Yield a plane of a unit, ``(first element, items)``, each valid until the next; on the first rank."""
        yield from self._asks(self._collect(unit, plane))

    def done(self) -> None:
        """Tell the others that nothing more of this unit is asked for; on the first rank."""
        if self._asked is not None:
            self._asked.close()
            self._asked = None
        self._tell(_DONE)

    def serve(self, unit: UnitSpec) -> None:
        """Send what the first rank asks for of a unit, until it is done; on the others."""
        wanted = torch.empty(1, dtype=torch.int64)
        while True:
            self._channel.exchange({}, {0: wanted})
            if int(wanted) == _DONE:
                return
            plane = self._planes[int(wanted)]
            for start, numel in self._pieces(unit, self._rank):
                self._channel.exchange({0: self._own(unit, plane, start, numel)}, {})

    def _asks(self, pieces: Any) -> Any:
        """Return ``pieces``, when what was asked for before has been received."""
        if self._asked is not None:
            self._asked.close()
        self._asked = pieces
        return pieces

    def _collect(self, unit: UnitSpec, plane: str) -> Iterator[tuple[int, Tensor]]:
        self._tell(self._planes.index(plane))
        pieces = [(rank, *piece) for rank in range(self._size) for piece in self._pieces(unit, rank)]
        arrived = 0
        try:
            for rank, start, numel in pieces:
                arrived += 1
                if rank == 0:
                    yield start, self._own(unit, plane, start, numel)
                else:
                    yield start, self._receive(rank, plane, numel)
        finally:
            for rank, _, numel in pieces[arrived:]:
                if rank:
                    self._receive(rank, plane, numel)

    def _tell(self, wanted: int) -> None:
        self._channel.exchange(dict.fromkeys(range(1, self._size), torch.tensor([wanted])), {})

    def _receive(self, rank: int, plane: str, numel: int) -> Tensor:
        form = self._made.get(plane)
        items, item = (numel, "fp32") if form is None else (numel // form.group, form.item)
        piece = self._buffer.view(ITEM_DTYPE[item])[:items]
        self._channel.exchange({}, {rank: piece})
        return piece

    def _pieces(self, unit: UnitSpec, rank: int) -> Iterator[tuple[int, int]]:
        part = self._shares[unit.index][rank]
        size = len(self._buffer)
        return ((start, min(size, part.stop - start)) for start in range(part.start, part.stop, size))

    def _own(self, unit: UnitSpec, plane: str, start: int, numel: int) -> Tensor:
        """A piece of a plane of the own share; of the masters, too, where they are split."""
        if plane in self._made:
            return self._held(unit, plane, start, numel, self._buffer.view(torch.uint8))[0]
        parts, room = [], self._halves
        for name in (WEIGHTS, MASTER_LOW, MASTER_TIES):
            if name in self._made:
                part, room = self._held(unit, name, start, numel, room)
                parts.append(part)
        weights, low, *ties = parts
        join_master(weights, low, ties[0] if ties else None, self._buffer[:numel])
        return self._buffer[:numel]

    def _held(
        self, unit: UnitSpec, plane: str, start: int, numel: int, room: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """A piece of a plane that the home holds, where it lies or read into ``room``; and what is left of the room."""
        form = self._made[plane]
        lent = self._home.lend(unit.index, plane, range(start, start + numel))
        if lent is not None:
            return lent[: numel // form.group], room
        assert room is not None
        size = form.num_bytes(numel)
        piece = room[:size].view(ITEM_DTYPE[form.item])
        self._home.read(unit.index, plane, start, piece)
        return piece[: numel // form.group], room[size:]


def collector_of(
    spec: ModelSpec,
    shared: Shared,
    home: Home,
    state: StateLayout,
    host: Arena,
) -> tuple[Collector, Tensor]:
    """Return what brings shares of all ranks to a checkpoint, and room for the weights beside a piece."""
    numel = shared.staging.stored_elements
    beside = host.take(numel * ITEMSIZE[spec.dtype], "network").view(TORCH_DTYPE[spec.dtype])
    piece = host.take(numel * 4, "network").view(torch.float32)
    halves = host.take(shared.staging.halves, "network") if shared.staging.halves else None
    return Collector(spec, shared.group, home, state, piece, halves), beside
