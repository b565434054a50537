"""STORE and COMMIT: hand a unit to a checkpoint, and make the state of a step the one to return to.

The hazards of the program hold the unit's next STEP back until its STORE is done, so nothing is copied first: planes of
a host home are lent out whole, those of a disk home pass through one small buffer.

The state of a unit is gathered from all ranks to the first, piece by piece. So a checkpoint is that of a single
process, and any number of ranks goes on from it. On the lane ``store`` of the first rank a plane is asked for, and all
ranks send their share of it; masters that are split are joined by the rank that has them. The others stand by until
they hear that the unit is done. What a checkpoint has asked for and then does not take, because it was given up, is
received all the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from outsize.codecs.transport import PIECE_ELEMENTS
from outsize.group.group import Group
from outsize.model.sizes.model_spec import ITEMSIZE, ModelSpec, UnitSpec
from outsize.optim.optimizer_names import factored
from outsize.optim.optimizer_spec import MASTER, MASTER_LOW, MASTER_TIES, WEIGHTS, StateLayout
from outsize.optim.shares import shares
from outsize.optim.split_masters import join_master
from outsize.planner.program.program import Kind, Op
from outsize.runtime.forward.binding import TORCH_DTYPE
from outsize.runtime.ops.context import StepContext, handles
from outsize.runtime.ops.exchange_ops import Shared
from outsize.storage.home import Home
from outsize.storage.home_layout import ITEM_DTYPE, HomeLayout
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
    spec: ModelSpec, shared: Shared, home: Home, state: StateLayout, host: Arena
) -> tuple[Collector, Tensor]:
    """Return what brings shares of all ranks to a checkpoint, and room for the weights beside a piece."""
    numel = shared.staging.stored_elements
    beside = host.take(numel * ITEMSIZE[spec.dtype], "network").view(TORCH_DTYPE[spec.dtype])
    piece = host.take(numel * 4, "network").view(torch.float32)
    halves = host.take(shared.staging.halves, "network") if shared.staging.halves else None
    return Collector(spec, shared.group, home, state, piece, halves), beside


@dataclass(frozen=True, slots=True)
class UnitAtRest:
    """A unit between two steps; valid while its STORE runs.

    Attributes:
        unit: which one.
        updates: how often each of its trainable parameters has been stepped.
    """

    unit: UnitSpec
    updates: Mapping[str, int]
    _ops: "StoreOps"

    def chunks(self, *planes: str) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield planes side by side, in pieces ``(first element, elements of each)``, each valid until the next.

        Raises:
            StorageError: the home cannot be read.
        """
        return self._ops.chunks(self.unit, planes)


class Sink(Protocol):
    """Takes units, one after the other, on the lane ``store``."""

    def __call__(self, resting: UnitAtRest) -> None:
        """Write one unit; an error raised here ends the run."""


class Counted(Protocol):
    """What is asked of an optimizer."""

    @property
    def updates(self) -> Mapping[str, int]:
        """How often each parameter has been stepped."""

    @property
    def state(self) -> StateLayout:
        """How a trained unit lies at home."""


class StoreOps:
    """Reads units for checkpoints.

    Args:
        spec: the model.
        home: where its units rest.
        optimizer: knows how often each parameter has been stepped.
        buffer: for pieces of a disk home's planes: takes a granule of two of them, or the largest unit; None for a host
            home.
        collector: of several ranks, brings their shares to the first; None for a single process.
        beside: for the weights beside a piece of a collected plane.
    """

    def __init__(
        self,
        spec: ModelSpec,
        home: Home,
        optimizer: Counted,
        buffer: Tensor | None,
        collector: Collector | None = None,
        beside: Tensor | None = None,
    ) -> None:
        self._collector = collector
        self._beside = beside
        self._spec = spec
        self._home = home
        self._optimizer = optimizer
        self._buffer = buffer
        self._layout = HomeLayout(spec, optimizer.state.planes)

    @handles(Kind.STORE)
    def store(self, op: Op, sink: Sink) -> None:
        """STORE: home → whoever the program was submitted for."""
        assert op.unit is not None
        unit = self._spec.units[op.unit]
        if self._collector is not None and not self._collector.is_first:
            self._collector.serve(unit)
            return
        counts = self._optimizer.updates
        updates = {t.name: counts[t.name] for t in unit.tensors if t.name in counts}
        try:
            sink(UnitAtRest(unit, updates, self))
        finally:
            if self._collector is not None:
                self._collector.done()

    def chunks(self, unit: UnitSpec, planes: Sequence[str]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """See `UnitAtRest.chunks`; the masters can be asked for where they are split, too."""
        if self._collector is not None and set(planes) != {WEIGHTS}:
            yield from self._collected(self._collector, unit, planes)
            return
        if MASTER in planes and MASTER not in self._optimizer.state.planes:
            yield from self._joined(unit, planes)
            return
        views = [self._home.lend(unit.index, plane) for plane in planes]
        lent = [view for view in views if view is not None and view.device.type == "cpu"]
        if len(lent) == len(planes):
            yield 0, tuple(lent)
            return
        numel = self._numel(unit, planes[0])
        parts, size = self._cut(unit, planes, numel)
        for start in range(0, numel, size):
            length = min(size, numel - start)
            chunk = {plane: part[: self._items(unit, plane, length)] for plane, part in parts.items()}
            self._home.read_planes(unit.index, start, chunk)
            yield start, tuple(chunk.values())

    def _collected(
        self, collector: Collector, unit: UnitSpec, planes: Sequence[str]
    ) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Pieces of one plane of which each rank has a share, and of the weights beside it if they are asked for."""
        (shared,) = (plane for plane in planes if plane != WEIGHTS)
        for start, piece in collector.plane(unit, shared):
            pieces = {shared: piece}
            if WEIGHTS in planes:
                assert self._beside is not None
                pieces[WEIGHTS] = self._beside[: len(piece)]
                self._home.read(unit.index, WEIGHTS, start, pieces[WEIGHTS])
            yield start, tuple(pieces[plane] for plane in planes)

    def _joined(self, unit: UnitSpec, planes: Sequence[str]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Pieces of planes of which one is the masters, where these are split."""
        split = (WEIGHTS, MASTER_LOW, MASTER_TIES)
        plane_names = [plane for plane in split if plane in self._optimizer.state.planes]
        master = torch.empty(min(PIECE_ELEMENTS, unit.numel), dtype=torch.float32)
        for start, (weights, low, *ties) in self.chunks(unit, plane_names):
            length = min(len(weights), unit.numel - start)
            for first in range(0, length, PIECE_ELEMENTS):
                last = min(first + PIECE_ELEMENTS, length)
                pieces = {MASTER: master[: last - first], WEIGHTS: weights[first:last]}
                bits = ties[0][first // 8 : last // 8] if ties else None
                join_master(weights[first:last], low[first:last], bits, pieces[MASTER])
                yield start + first, tuple(pieces[plane] for plane in planes)

    def _items(self, unit: UnitSpec, plane: str, numel: int) -> int:
        """Items of ``numel`` elements of a plane, whole sectors where it has items for groups of them."""
        form = self._optimizer.state.planes.get(plane)
        if form is None or not unit.trainable:
            return numel
        return form.items(numel)

    def _numel(self, unit: UnitSpec, plane: str) -> int:
        """Elements of a plane: those of the factors where it holds these, which are asked for by themselves."""
        form = self._optimizer.state.planes.get(plane)
        return unit.numel if form is None or form.factor is None else factored(unit, form.factor).numel

    def _cut(self, unit: UnitSpec, planes: Sequence[str], numel: int) -> tuple[dict[str, Tensor], int]:
        """Cut the buffer into a part for each plane of ``numel`` elements; returns them, and what each takes."""
        extents = {plane: self._layout.extent(unit.index, plane) for plane in planes}
        element_bytes = sum(extent.dtype.itemsize / extent.group for extent in extents.values())
        buffer = self._buffer
        if buffer is None:  # a home in memory is read only where weights that do not train are kept encoded
            buffer = torch.empty(int(PIECE_ELEMENTS * element_bytes), dtype=torch.uint8)
        size = min(int(buffer.nbytes / element_bytes), numel)
        if size < numel:
            size -= size % max(self._home.granule_elements, *(e.least * e.group for e in extents.values()))
        parts, end = {}, 0
        for plane, extent in extents.items():
            start, end = end, end + self._items(unit, plane, size) * extent.dtype.itemsize
            parts[plane] = buffer[start:end].view(extent.dtype)
        return parts, size


Describe = Callable[[StepContext], Mapping[str, Any]]
"""What the run says of itself after a step, JSON; called once per step, in order, when all of its ops are done."""


class CommitOps:
    """Commits steps.

    Args:
        home: where the state rests; one that does not commit gets no COMMIT from the planner.
        describe: what a commit record says of the run.
    """

    def __init__(self, home: Home, describe: Describe) -> None:
        self._home = home
        self._describe = describe

    @handles(Kind.COMMIT)
    def commit(self, op: Op, context: StepContext) -> None:
        """COMMIT: the step of ``context``, skipped or not."""
        self._home.commit(self._describe(context))
