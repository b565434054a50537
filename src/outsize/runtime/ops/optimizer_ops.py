"""STEP, UPDATE, and READ and WRITE of tiles: the optimizer on the host, on disk and on the device."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.model.sizes.model_spec import ModelSpec, UnitSpec
from outsize.optim.muon import Muon, newton_schulz
from outsize.optim.optimizer_spec import GRADIENT, MASTER, WEIGHTS, StateLayout
from outsize.optim.planes import StatePlanes, UpdateRule, WholeRule
from outsize.optim.step import step_state, step_whole
from outsize.planner.program.program import Kind, Op
from outsize.runtime.device.device import Device
from outsize.runtime.ops.context import Moved, StepContext, handles
from outsize.runtime.ops.gradient_ops import GradientOps
from outsize.runtime.ops.link_codecs import EncodedWeights
from outsize.storage.home import Home
from outsize.storage.home_layout import ITEM_DTYPE

LANE = "products"


class DeviceProducts:
    """Makes matrices orthogonal on devices, see `outsize.optim.muon.Products`.

    All else of a STEP stays on the host. The story of a matrix, on the thread of the STEP:

    1. It is rounded to bf16 into the scratch in host memory, which is pinned where the device copies from it.
    2. Copies and products are enqueued on a stream of their own, so that the units that compute meanwhile do not wait
       for them, and they not for units: the device shares itself among both.
    3. The thread waits for the mark behind the copy down. Then the scratch is the host's again, and the room on the
       device that of the next matrix.

    Units are dealt out among several devices, one after the other, so a unit is always with the same one.

    Args:
        devices: of all workers.
        room_bytes: of each of the two rooms that it takes on each of them, as `StateLayout.products_room` says.

    Attributes:
        moved: what has gone up, and come down again as much.
    """

    def __init__(self, devices: Sequence[Device], room_bytes: int) -> None:
        self.moved = Moved()
        self._devices = tuple(devices)
        self._rooms = [
            [device.allocate(room_bytes, "products of Muon").view(torch.bfloat16) for _ in range(2)]
            for device in devices
        ]

    def __call__(self, update: Tensor, scratch: Tensor, iterations: int, unit: int) -> Tensor:
        """See `outsize.optim.muon.orthogonal`; what is returned lies in the memory of ``scratch``."""
        number = unit % len(self._devices)
        device, rooms, numel = self._devices[number], self._rooms[number], update.numel()
        staged = scratch.view(-1).view(torch.bfloat16)[:numel].view(update.shape).copy_(update)
        with device.behind(LANE):
            device.copy(rooms[0][:numel].view(update.shape), staged)
            direction = newton_schulz(rooms, update.shape, iterations)
            # A transposed copy would be made of pieces, or by way of more memory: what comes down lies as it is there.
            tall = not direction.is_contiguous()
            direction = direction.T if tall else direction
            back = staged.view(direction.shape)
            device.copy(back, direction)
            mark = device.record(LANE)
        if mark is not None:
            device.wait("", mark)
        self.moved = self.moved.and_then(back.nbytes, back.nbytes)
        return back.T if tall else back


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """What is set aside for an optimizer besides the home.

    Attributes:
        tile_buffers: byte buffers, each with room for all planes of one tile, or for its gradient over a host home.
        tile_elements: elements per tile.
        scratches: fp32, as many and as long as the state layout says, where whole parameters step.
    """

    tile_buffers: Sequence[Tensor] = ()
    tile_elements: int = 0
    scratches: Sequence[Tensor] = ()


class OptimizerOps:
    """Steps units whole, in their host home, or tile by tile from a disk home.

    Each tile buffer takes the roles of a ring in turn: ingest (READ fills it from disk), work (STEP), writeback
    (WRITE). Where gradients do not wait at home, a GRAD of the tile fills its gradient in as well, see
    `outsize.runtime.ops.gradient_ops`; over a home in host memory that is all a buffer holds, and the rest is stepped
    where it lies.

    Args:
        spec: the model.
        home: where weights, state and gradients rest.
        settings: of the optimizer.
        memory: that is set aside.
        encoded: told of units that have stepped in place; None where nobody wants to know.
        own: of several ranks, the elements of each unit that this one steps; None for all.
        state: how a trained unit lies at home; None for the plain layout of the model's dtype.
        seed: of the chances by which moments of fewer bits are rounded.

    Attributes:
        gradient_tiles: where GRADs of tiles put them, by tile buffer.
        updates: how often each trainable parameter has been stepped; one that got no gradient in a step is left alone
            in that step, as torch's optimizers do.
    """

    def __init__(
        self,
        spec: ModelSpec,
        home: Home,
        settings: UpdateRule | WholeRule,
        memory: StepMemory = StepMemory(),
        encoded: EncodedWeights | None = None,
        *,
        shares: Sequence[range] | None = None,
        state: StateLayout | None = None,
        seed: int = 0,
    ) -> None:
        self._memory = memory
        self._encoded = encoded
        self._own = [range(unit.numel) for unit in spec.units] if shares is None else shares
        self.state = state or StateLayout(dtype=spec.dtype)
        self._stepped = self.state.write_planes
        self._seed = seed
        self._spec = spec
        self._home = home
        self._settings = settings
        self._master = MASTER if MASTER in self.state.planes else WEIGHTS
        self._buffers = [self._cut(buffer) for buffer in memory.tile_buffers]
        self.gradient_tiles = [planes[GRADIENT] for planes in self._buffers]
        self.updates = {t.name: 0 for unit in spec.units for t in unit.tensors if t.trainable}

    def products_moved(self) -> Moved:
        """What Muon has sent to devices so far, and got back from them as much."""
        products = self._settings.products if isinstance(self._settings, Muon) else None
        return products.moved if isinstance(products, DeviceProducts) else Moved()

    @handles(Kind.READ, tile=True)
    def read(self, op: Op, context: StepContext) -> None:
        """READ of a tile: disk → tile buffer."""
        if context.skipped:
            return
        unit, start, parts = self._parts(op, self.state.read_planes)
        self._home.read_planes(unit, start, parts)

    @handles(Kind.STEP)
    @handles(Kind.STEP, tile=True)
    def step(self, op: Op, context: StepContext) -> None:
        """STEP of a tile, or of a whole unit in place."""
        if context.skipped:
            return
        if op.tile is None:
            assert op.unit is not None
            self._step_whole(self._spec.units[op.unit], context)
            return
        unit, start, stop, planes = self._tile(op)
        if self._home.in_memory:
            self._step_in_place(unit, start, stop, planes[GRADIENT], context)
            return
        self._apply(unit, range(start, stop), planes, context, rounds=False)
        if self._master != WEIGHTS:
            # All of the tile is written, and its weights were not read: those that do not step are made again.
            planes[WEIGHTS][: stop - start].copy_(planes[self._master][: stop - start])

    def update(self, unit: int, gradient: Tensor, context: StepContext) -> None:
        """Step a unit whose planes are lent out on the device where its ``gradient`` [unit.numel] is."""
        self._step_in_place(self._spec.units[unit], 0, gradient.numel(), gradient, context)

    def _step_in_place(
        self, unit: UnitSpec, start: int, stop: int, gradient: Tensor, context: StepContext
    ) -> None:
        """Step a range of a unit in its host home by a gradient that has just arrived."""
        planes = {name: self._home.view(unit.index, name, range(start, stop)) for name in self._stepped}
        planes[GRADIENT] = gradient
        self._apply(unit, range(start, stop), planes, context)
        if self._encoded is not None and stop == unit.numel:
            self._encoded.stepped(unit.index)

    def _step_whole(self, unit: UnitSpec, context: StepContext) -> None:
        """Step all that this rank steps of a unit, in place."""
        share = self._own[unit.index]
        if not share:
            self._count(unit, context)
            return
        part = None if share == range(unit.numel) else share
        planes = {name: self._home.view(unit.index, name, part) for name in self.state.planes}
        self._apply(unit, share, planes, context)
        if self._encoded is not None:
            self._encoded.stepped(unit.index)

    @handles(Kind.WRITE, tile=True)
    def write(self, op: Op, context: StepContext) -> None:
        """WRITE of a tile: tile buffer → disk."""
        if context.skipped:
            return
        unit, start, parts = self._parts(op, self._stepped)
        self._home.write_planes(unit, start, parts)

    def _apply(
        self,
        unit: UnitSpec,
        part: range,
        planes: dict[str, Tensor],
        context: StepContext,
        *,
        rounds: bool = True,
    ) -> None:
        """Step elements of a unit in ``planes``, which begin with them; ``rounds`` weights from separate masters."""
        if part.start == self._own[unit.index].start:
            self._count(unit, context)
        rounds = rounds and self._master != WEIGHTS
        coefficient, skip = context.coefficient_of(unit.index), _untouched(unit, context)
        if isinstance(self._settings, WholeRule):
            step_whole(
                self._settings,
                unit,
                planes,
                self._memory.scratches,
                step=self.updates,
                lr=context.learning_rate,
                clip_coefficient=coefficient,
                skip=skip,
                rounds=rounds,
                seed=self._seed,
            )
            return
        step_state(
            self._settings,
            unit,
            self._state_planes(planes, len(part), rounds=rounds),
            planes[GRADIENT][: len(part)],
            start=part.start,
            step=self.updates,
            lr=context.learning_rate,
            clip_coefficient=coefficient,
            skip=skip,
            seed=self._seed,
        )

    def _state_planes(self, planes: Mapping[str, Tensor], numel: int, *, rounds: bool) -> StatePlanes:
        """The planes of a range of ``numel`` elements, without what fills up their last sectors.

        Weights beside separate masters are made of these by the step where it ``rounds``, and else by the caller.
        """
        forms = self.state.planes
        items = {name: planes[name][: -(-numel // forms[name].group)] for name in self._stepped}
        if self._master != WEIGHTS and not rounds:
            items[WEIGHTS] = items.pop(self._master)
        return StatePlanes.of(items)

    def _count(self, unit: UnitSpec, context: StepContext) -> None:
        """Count one more update of each parameter that steps; tiles of a unit come in order, by one lane."""
        skipped = _untouched(unit, context)
        for tensor in unit.tensors:
            if tensor.trainable and tensor.name not in skipped:
                self.updates[tensor.name] += 1

    def _tile(self, op: Op) -> tuple[UnitSpec, int, int, dict[str, Tensor]]:
        assert op.unit is not None
        assert op.tile is not None
        assert op.buffer is not None
        unit = self._spec.units[op.unit]
        share = self._own[unit.index]
        start = share.start + op.tile * self._memory.tile_elements
        return unit, start, min(start + self._memory.tile_elements, share.stop), self._buffers[op.buffer]

    def _parts(self, op: Op, names: Iterable[str]) -> tuple[int, int, dict[str, Tensor]]:
        """The unit and the first element of a tile, and what of its buffer is its elements in those planes."""
        unit, start, stop, planes = self._tile(op)
        forms = self.state.planes
        return unit.index, start, {n: planes[n][: forms[n].items_of(unit, stop - start)] for n in names}

    def _cut(self, buffer: Tensor) -> dict[str, Tensor]:
        """Cut one tile buffer into its planes; every plane of a tile is a whole number of sectors."""
        size, by_sector = self._memory.tile_elements, not self._home.in_memory
        planes = {}
        offset = 0
        for name, items in self.state.tile_room(self._spec, size, with_state=by_sector).items():
            dtype = ITEM_DTYPE[self.state.tile_planes[name].item]
            end = offset + items * dtype.itemsize
            planes[name] = buffer[offset:end].view(dtype)
            offset = end
        return planes


def _untouched(unit: UnitSpec, context: StepContext) -> AbstractSet[str]:
    touched = context.touched[unit.index]
    return {tensor.name for position, tensor in enumerate(unit.tensors) if position not in touched}


class ResidentOps:
    """Steps the resident units of a worker.

    The arithmetic is that of a STEP, over planes which a home lends out on the device. What a GRAD does beside its copy
    is done here: the sums are closed, a step or a unit that is not finite goes no further, and observers see the
    gradient.
    """

    def __init__(self, gradients: GradientOps, optimizer: OptimizerOps) -> None:
        self._gradients = gradients
        self._optimizer = optimizer

    @handles(Kind.UPDATE)
    def update(self, op: Op, context: StepContext) -> None:
        """UPDATE: step a unit by the gradient in its accumulator.

        Raises:
            NonFiniteError: no norm is waited for, and the loss or the gradient is not finite.
        """
        assert op.unit is not None
        gradient = self._gradients.take(op.unit, context)
        if not context.skipped:
            self._optimizer.update(op.unit, gradient, context)
