"""A streamed training run: tiers opened and filled, an engine over them, and steps that overlap at their ends."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize import files
from outsize.config import Config
from outsize.data.batch import Batch
from outsize.model.spec import UnitSpec
from outsize.model.walk import Boundaries
from outsize.optim.schedule import Schedule
from outsize.optim.shares import home_granule
from outsize.optim.spec import WEIGHTS
from outsize.planner.idle import Window
from outsize.planner.net_memory import net_staging
from outsize.planner.timeline import Timeline
from outsize.runtime.activations import ActivationOps
from outsize.runtime.allocator import ResidentLimit
from outsize.runtime.binding import TORCH_DTYPE, buffers_on
from outsize.runtime.carriers import packed_codec
from outsize.runtime.context import Microbatch, StepContext
from outsize.runtime.device import Device, open_device
from outsize.runtime.engine import Engine, EngineSettings, StepHandle
from outsize.runtime.exchange import Shared
from outsize.runtime.gradients import GradientObserver
from outsize.runtime.scratches import open_rooms, open_scratch
from outsize.runtime.workers import open_workers, tier_of
from outsize.storage.arena import Arena, CudaPinner
from outsize.storage.committed import CommittedHome
from outsize.storage.directory import needed_directory
from outsize.storage.home import DiskHome, HostHome
from outsize.storage.ledger import Ledger
from outsize.storage.pool import IOPool
from outsize.storage.record import Record
from outsize.storage.scratch import DiskScratch
from outsize.train.fill import FILL_ELEMENTS, fill
from outsize.train.loss_scale import LossScale
from outsize.train.prepare import Prepared, model_inputs, num_targets
from outsize.train.standing import Position, Standing, position_in
from outsize.train.state import max_norm_of, rule_of

# The file of a disk home whose name goes at once.
TEMPORARY = "temporary.bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one step came to, known before its optimizer has finished.

    Attributes:
        number: of the step, from 0.
        loss: token-weighted mean over the batch.
        gradient_norm: before clipping; NaN where no norm is taken.
        learning_rate: that it used.
        tokens: trained tokens.
        seconds: since the step before was known.
        data_s: of them, waiting for the batch.
        between_s: of them, before the batch was asked for.
        ended_s: when it was known, on the clock of the timeline.
        skipped: whether no weight changes.
    """

    number: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    data_s: float
    between_s: float
    ended_s: float
    skipped: bool

    @property
    def window(self) -> Window:
        """The step on the clock of its events."""
        began_s = self.ended_s - self.seconds
        asked_s = began_s + self.between_s
        return Window(began_s=began_s, asked_s=asked_s, given_s=asked_s + self.data_s, ended_s=self.ended_s)


def microbatches_of(batch: Batch, count: int, shifted: bool = True) -> tuple[Microbatch, ...]:
    """Cut a batch, and give each part the divisors that make their losses add up to the mean over all targets.

    A part without a single target weighs nothing. Of a rank's share the mean is that over the targets of all ranks.
    """
    parts = [(part, num_targets(part, shifted)) for part in batch.split(count)]
    total = num_targets(batch.whole or batch, shifted)
    return tuple(
        Microbatch(
            inputs=model_inputs(part),
            divisor=total / targets if targets else float("inf"),
            targets=max(total, 1),
        )
        for part, targets in parts
    )


def schedule_of(config: Config) -> Schedule:
    """The learning-rate schedule of a run."""
    return Schedule(
        kind=config.optimizer.schedule,
        lr=config.optimizer.lr,
        num_warmup_steps=config.warmup_steps,
        num_training_steps=config.train.steps,
    )


class StreamedTrainer:
    """Trains a prepared model, streamed. A context manager; everything it holds is gone when it closes.

    Args:
        prepared: model, plan and budgets.
        store_dir: directory of the disk home.
        observe_gradient: sees each gradient before it leaves the device, for tests and diagnosis.
        home_file: of a home that commits, which stays; without a name it is gone with the process.
        config: as the user gave it, where ``prepared`` reads the model from a checkpoint of the run.
        record: of the committed home in ``home_file``, to go on with it; see `resume`.

    Attributes:
        errors: what codecs have done to frozen weights, by name, see `fill`.
    """

    def __init__(
        self,
        prepared: Prepared,
        store_dir: Path,
        observe_gradient: GradientObserver | None = None,
        *,
        home_file: Path | None = None,
        config: Config | None = None,
        record: Record | None = None,
    ) -> None:
        self.prepared = prepared
        config = self._run_config = config or prepared.config
        machine, plan = prepared.machine, prepared.plan
        self.spec = prepared.split.spec
        self.loss_scale = LossScale(enabled="fp16" in self.spec.dtypes)
        self.position = Position(0, 0, 0)
        self.errors: dict[str, float] = {}
        self._home_file = home_file
        self._standing: list[Standing] = []  # one, as soon as there are steps
        self._arenas: list[Arena] = []
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            tiers = [tier_of(worker, machine.num_workers) for worker in range(machine.num_workers)]
            budgets = dict.fromkeys(tiers, machine.device_bytes)
            self.ledger = Ledger({**budgets, "host": machine.host_bytes, "disk": machine.disk_bytes})
            cuda = machine.device.startswith("cuda")
            self._host = stack.enter_context(contextlib.closing(self._arena("host", cuda)))
            # Buffers between the device and the tier below: on a CPU over a disk they are the device's own RAM.
            tier = "device" if machine.below == "disk" else "host"
            buffers = stack.enter_context(contextlib.closing(self._arena(tier, cuda)))
            if machine.home == "disk":
                stack.enter_context(needed_directory(store_dir, "memory.store_dir"))
            self.pool = stack.enter_context(IOPool())
            self.home = self._open_home(store_dir, buffers, record)
            stack.callback(self._close_home)
            self.scratch = open_scratch(
                plan,
                prepared.measured.boundary_bytes,
                store_dir / "activations.bin",
                self.pool,
                buffers,
                self.ledger,
            )
            if self.scratch is not None:
                stack.enter_context(contextlib.closing(self.scratch))
            self.rooms = open_rooms(plan, store_dir / "kept.bin", self.pool, buffers, self.ledger)
            for room in self.rooms.values():
                stack.enter_context(contextlib.closing(room))
            device = stack.enter_context(contextlib.closing(self._open_device()))
            # What torch's own allocator will take: it is reserved like everything else, so the budget is the sum.
            for tier, name in itertools.product(tiers, ("activations", "workspace", "shared")):
                num_bytes = plan.memory["device"].get(name, 0)
                stack.enter_context(self.ledger.reserve(tier, name, num_bytes))
            stack.enter_context(buffers_on(prepared.split.model, device.torch_device))
            boundaries = stack.enter_context(Boundaries(prepared.split.modules))
            settings = EngineSettings(
                optimizer=rule_of(config.optimizer),
                max_grad_norm=max_norm_of(config),
                skip_nonfinite=self.loss_scale.enabled or config.train.on_nonfinite == "skip",
                chunk_tokens=prepared.chunk_tokens,
                seed=config.train.seed,
                graph_in_forward=prepared.measured.graph_matters,
                needed=prepared.measured.needed,
                num_products=prepared.measured.num_products,
                num_threads=torch.get_num_threads(),
                draws_random=prepared.measured.draws_random,
                observe_gradient=observe_gradient,
                describe=partial(_describe, self._standing),
            )
            prepared.split.model.train()
            self.engine = Engine(
                prepared.split,
                boundaries,
                plan,
                device,
                self.home,
                buffers,
                self.scratch,
                settings,
                self.rooms,
                _shared(prepared),
            )
            stack.callback(self.engine.close)
            self._stack = stack.pop_all()
        self._last: StepHandle | None = None

    def fill(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Copy the weights of the model's checkpoint into the home; see `outsize.train.fill.fill`."""
        state, own = self.prepared.plan.state, self.prepared.own
        self.errors = fill(self.home, self.spec, self.prepared.source, progress, state, own)

    def steps(self, batches: Iterable[Batch], first: int = 0) -> Iterator[StepOutcome]:
        """Train on ``batches``, numbered from ``first``; yields as soon as a step's loss and norm are known.

        The optimizer of the last step may still run; `settle` waits for it.

        Raises:
            OutsizeError: a step failed or is not finite; the weights are those after the step before.
        """
        config = self.prepared.config
        schedule = schedule_of(config)
        shifted = self.prepared.measured.shifted
        self.position = replace(self.position, step=first)
        self._standing[:] = [
            Standing(
                self.position,
                self.loss_scale,
                self.engine.optimizer.updates,
                self._run_config,
                self.prepared.dtype,
            )
        ]
        began = asked = time.perf_counter()
        for number, batch in zip(itertools.count(first), batches):
            data_s = time.perf_counter() - asked
            context = StepContext(
                number=number,
                learning_rate=schedule.learning_rate(number),
                microbatches=microbatches_of(batch, config.microbatches, shifted),
                tokens=num_targets(batch.whole or batch, shifted),
                loss_scale=self.loss_scale.value,
                first_microbatch=self.prepared.group.rank * config.microbatches,
            )
            self._last = self.engine.begin(context)
            self.engine.forward_backward_done(self._last)
            self.loss_scale.update(context.skipped)
            ended = time.perf_counter()
            yield StepOutcome(
                number=number,
                loss=context.loss(),
                gradient_norm=context.norm(),
                learning_rate=context.learning_rate,
                tokens=context.tokens,
                seconds=ended - began,
                data_s=data_s,
                between_s=asked - began,
                ended_s=ended,
                skipped=context.skipped,
            )
            began, asked = ended, time.perf_counter()

    def resume(self, record: Record) -> Position:
        """Go on from ``record``, that of the home which this was made with, once all of it has been read and checked.

        Raises:
            StorageError: it is damaged; says where.
        """
        assert isinstance(self.home, CommittedHome)
        self.home.check(self._borrow)
        return self._stand(record)

    def take_over(self, path: Path, record: Record) -> Position:
        """Copy the state of a committed home at ``path`` into this one, which is of another kind.

        Raises:
            StorageError: it is damaged; says where.
        """
        planes = self.prepared.plan.state.planes
        with (
            Arena() as arena,
            CommittedHome(self.spec, planes, path, self.pool, arena=arena, record=record) as former,
        ):
            piece = arena.take(FILL_ELEMENTS * 4, "a part of a plane")
            former.copy_to(self.home, piece)
        return self._stand(record)

    def settle(self) -> None:
        """Return when the optimizer of the last step is done, so that the home holds the weights after it."""
        if self._last is not None:
            self.engine.finish(self._last)
            self._last = None

    @property
    def updates(self) -> dict[str, int]:
        """How often each parameter was stepped."""
        return self.engine.optimizer.updates

    def read_unit(self, unit: UnitSpec, plane: str = WEIGHTS) -> dict[str, Tensor]:
        """Read one plane of a unit, as tensors by name; valid until the next call.

        Call it between steps only: it borrows memory of the engine.
        """
        dtype = TORCH_DTYPE[self.spec.dtype] if plane == WEIGHTS else torch.float32
        buffer = self._borrow(unit.numel * dtype.itemsize).view(dtype)
        self.home.read(unit.index, plane, 0, buffer)
        return {t.name: buffer[t.offset : t.offset + t.numel].view(t.shape) for t in unit.tensors}

    def write_unit(self, unit: UnitSpec, plane: str, tensors: dict[str, Tensor]) -> None:
        """Write one plane of a unit from tensors by name; between steps only."""
        dtype = TORCH_DTYPE[self.spec.dtype] if plane == WEIGHTS else torch.float32
        buffer = self._borrow(unit.numel * dtype.itemsize).view(dtype)
        buffer.zero_()
        for tensor in unit.tensors:
            buffer[tensor.offset : tensor.offset + tensor.numel].copy_(tensors[tensor.name].reshape(-1))
        self.home.write(unit.index, plane, 0, buffer)

    def disk_bytes(self) -> tuple[int, int]:
        """Bytes read from and written to disk so far."""
        read = written = 0
        if isinstance(self.home, DiskHome):
            statistics = self.home.statistics()
            read, written = statistics.bytes_read, statistics.bytes_written
        for scratch in (self.scratch, *self.rooms.values()):
            if isinstance(scratch, DiskScratch):
                moved = scratch.statistics()
                read, written = read + moved.bytes_out, written + moved.bytes_in
        return read, written

    def fallbacks(self) -> dict[str, int]:
        """What could not be had as asked so far, and how often: pinned memory, direct I/O, room for what was kept."""
        found = {"pageable": sum(arena.statistics().num_pageable_fallbacks for arena in self._arenas)}
        if isinstance(self.home, DiskHome):
            found["buffered"] = self.home.file.statistics().num_buffered_fallbacks
        if isinstance(self.engine.activations, ActivationOps):
            found["recomputed"] = self.engine.activations.num_let_go
        return found

    def take_timeline(self) -> Timeline:
        """What the lanes did since the last call."""
        return self.engine.take_timeline()

    def close(self) -> None:
        """Give everything back; idempotent."""
        self._stack.close()

    def __enter__(self) -> "StreamedTrainer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _arena(self, tier: str, pin: bool) -> Arena:
        self._arenas.append(Arena(ledger=self.ledger, tier=tier, pinner=CudaPinner() if pin else None))
        return self._arenas[-1]

    def _open_device(self) -> Device:
        machine, rate = self.prepared.machine, self.prepared.config.memory.link_gb_per_s
        bytes_per_s = rate * 1e9 if rate else None
        if machine.num_workers > 1:
            return open_workers(machine.device, self.ledger, bytes_per_s)
        host_bytes = self.prepared.plan.total_bytes("host")
        limit = ResidentLimit(self.prepared.before_bytes, machine.device_bytes, host_bytes)
        return open_device(machine.device, self.ledger, bytes_per_s, limit)

    def _open_home(self, store_dir: Path, buffers: Arena, record: Record | None) -> HostHome | DiskHome:
        plan = self.prepared.plan
        planes = plan.state.planes
        if self.prepared.machine.home == "host":
            return HostHome(self.spec, planes, self._host, packed_codec(plan.transport), self.prepared.own)
        if not plan.layout.commits:
            path = store_dir / TEMPORARY
            return DiskHome(
                self.spec,
                planes,
                path,
                self.pool,
                ledger=self.ledger,
                temporary=True,
                own=self.prepared.own,
            )
        return CommittedHome(
            self.spec,
            planes,
            self._home_file or store_dir / TEMPORARY,
            self.pool,
            arena=buffers,
            granule_elements=home_granule(self.spec, plan.tile_elements, self.prepared.group.size),
            record=record,
            temporary=self._home_file is None,
            ledger=self.ledger,
            own=self.prepared.own,
        )

    def _close_home(self) -> None:
        """Close the home; one that stays but has nothing committed is of no use to anyone."""
        self.home.close()
        if isinstance(self.home, CommittedHome) and self._home_file and self.home.record is None:
            with contextlib.suppress(OSError):
                files.system().unlink(self.home.file.path)

    def _stand(self, record: Record) -> Position:
        self.engine.optimizer.updates.update(record.state["updates"])
        self.loss_scale.restore(record.state["loss_scale"])
        self.position = position_in(record.state)
        return self.position

    def _borrow(self, num_bytes: int) -> Tensor:
        """Memory of a slot, an accumulator or a host buffer that lies in RAM; else fresh memory.

        Above a disk home there always is one that is large enough, aligned for direct I/O.
        """
        for buffer in self.engine.buffers:
            if buffer.device.type == "cpu" and buffer.nbytes >= num_bytes:
                return buffer[:num_bytes]
        return torch.empty(num_bytes, dtype=torch.uint8)


def _shared(prepared: Prepared) -> Shared | None:
    """With whom this rank shares its steps; None for a single process."""
    group, wire = prepared.group, prepared.plan.wire
    if group.size == 1:
        return None
    return Shared(group, wire, net_staging(prepared.split.spec, group.size, wire, prepared.machine.home))


def _describe(standing: list[Standing], context: StepContext) -> Mapping[str, Any]:
    """What a commit says of the run. Not a method: engine and trainer would hold each other, and the slots."""
    return standing[0].after(context)
