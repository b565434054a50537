"""STORE and COMMIT: hand a unit to a checkpoint, and make the state of a step the one to return to.

The hazards of the program hold the unit's next STEP back until its STORE is done, so nothing is copied first: planes of
a host home are lent out whole, those of a disk home pass through one small buffer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from outsize.codecs.transport import PIECE_ELEMENTS
from outsize.model.sizes.model_spec import ModelSpec, UnitSpec
from outsize.optim.optimizer_names import factored
from outsize.optim.optimizer_spec import MASTER, MASTER_LOW, MASTER_TIES, WEIGHTS, StateLayout
from outsize.optim.split_masters import join_master
from outsize.planner.program.program import Kind, Op
from outsize.runtime.ops.context import StepContext, handles
from outsize.runtime.ops.gather_state import Collector
from outsize.storage.home import Home
from outsize.storage.home_layout import HomeLayout


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
