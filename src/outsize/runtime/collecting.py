"""The optimizer's state of a unit from all ranks to the first one, piece by piece, as a checkpoint there asks for it.

So a checkpoint is that of a single process, and any number of ranks goes on from it. On the lane ``store`` of the first
rank a plane is asked for, and all ranks send their share of it; the others stand by until they hear that the unit is
done. What a checkpoint has asked for and then does not take, because it was given up, is received all the same.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from outsize.group.group import Group
from outsize.model.spec import ModelSpec, UnitSpec
from outsize.optim.shares import shares
from outsize.optim.spec import planes_for
from outsize.storage.home import DiskHome, HostHome

STORE_CHANNEL = "store"
_DONE = -1


class Collector:
    """Collects planes on the first rank, and serves it on all others.

    Args:
        spec: the model.
        group: the ranks.
        home: of the own share.
        buffer: fp32, for a piece on its way.
    """

    def __init__(self, spec: ModelSpec, group: Group, home: HostHome | DiskHome, buffer: Tensor) -> None:
        self._rank, self._size = group.rank, group.size
        self._channel = group.channel(STORE_CHANNEL)
        self._home = home
        self._buffer = buffer
        self._shares = shares(spec, group.size)
        self._planes = sorted(planes_for(spec.dtype))
        self._asked: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this rank writes checkpoints."""
        return self._rank == 0

    def plane(self, unit: UnitSpec, plane: str) -> Iterator[tuple[int, Tensor]]:
        """Yield a plane of a unit, ``(first element, elements)``, each valid until the next; on the first rank."""
        if self._asked is not None:
            self._asked.close()
        self._asked = self._collect(unit, plane)
        yield from self._asked

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
                    yield start, self._receive(rank, numel)
        finally:
            for rank, _, numel in pieces[arrived:]:
                if rank:
                    self._receive(rank, numel)

    def _tell(self, wanted: int) -> None:
        self._channel.exchange(dict.fromkeys(range(1, self._size), torch.tensor([wanted])), {})

    def _receive(self, rank: int, numel: int) -> Tensor:
        piece = self._buffer[:numel]
        self._channel.exchange({}, {rank: piece})
        return piece

    def _pieces(self, unit: UnitSpec, rank: int) -> Iterator[tuple[int, int]]:
        part = self._shares[unit.index][rank]
        size = len(self._buffer)
        return ((start, min(size, part.stop - start)) for start in range(part.start, part.stop, size))

    def _own(self, unit: UnitSpec, plane: str, start: int, numel: int) -> Tensor:
        if isinstance(self._home, HostHome):
            first = self._shares[unit.index][self._rank].start
            return self._home.view(unit.index, plane)[start - first : start - first + numel]
        piece = self._buffer[:numel]
        self._home.read(unit.index, plane, start, piece)
        return piece
