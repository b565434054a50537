"""A streamed training run: tiers opened and filled, an engine over them, and steps that overlap at their ends."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outsize.config import Config
from outsize.model.spec import PLANE_ELEMENTS, UnitSpec
from outsize.model.walk import Boundaries
from outsize.optim.adamw import AdamW
from outsize.optim.schedule import Schedule
from outsize.optim.spec import MASTER, WEIGHTS, planes_for
from outsize.planner.timeline import Timeline
from outsize.runtime.allocator import ResidentLimit
from outsize.runtime.binding import TORCH_DTYPE, buffers_on
from outsize.runtime.context import Microbatch, StepContext
from outsize.runtime.device import open_device
from outsize.runtime.engine import Engine, EngineSettings, StepHandle
from outsize.runtime.gradients import GradientObserver
from outsize.storage.arena import Arena, CudaPinner
from outsize.storage.directory import needed_directory
from outsize.storage.home import DiskHome, HostHome
from outsize.storage.ledger import Ledger
from outsize.storage.pool import IOPool
from outsize.storage.scratch import DiskScratch, HostScratch, Scratch
from outsize.train.data.batch import Batch
from outsize.train.loss_scale import LossScale
from outsize.train.prepare import Prepared, model_inputs, num_targets

FILL_ELEMENTS = 512 * PLANE_ELEMENTS


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
        skipped: whether no weight changes.
    """

    number: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    data_s: float
    skipped: bool


def microbatches_of(batch: Batch, count: int, shifted: bool = True) -> tuple[Microbatch, ...]:
    """Cut a batch, and give each part the divisors that make their losses add up to the mean over all targets.

    A part without a single target weighs nothing.
    """
    parts = [(part, num_targets(part, shifted)) for part in batch.split(count)]
    total = num_targets(batch, shifted)
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
    """

    def __init__(
        self, prepared: Prepared, store_dir: Path, observe_gradient: GradientObserver | None = None
    ) -> None:
        self.prepared = prepared
        config, machine, plan = prepared.config, prepared.machine, prepared.plan
        self.spec = prepared.split.spec
        self.loss_scale = LossScale(enabled=self.spec.dtype == "fp16")
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            self.ledger = Ledger(
                {"device": machine.device_bytes, "host": machine.host_bytes, "disk": machine.disk_bytes}
            )
            cuda = machine.device.startswith("cuda")
            self._host = stack.enter_context(contextlib.closing(self._arena("host", cuda)))
            # Buffers between the device and the tier below: on a CPU over a disk they are the device's own RAM.
            tier = "device" if machine.below == "disk" else "host"
            buffers = stack.enter_context(contextlib.closing(self._arena(tier, cuda)))
            if machine.home == "disk":
                stack.enter_context(needed_directory(store_dir, "memory.store_dir"))
            self.pool = stack.enter_context(IOPool())
            self.home = stack.enter_context(contextlib.closing(self._open_home(store_dir)))
            self.scratch = self._open_scratch(stack, store_dir, buffers)
            rate = config.memory.link_gb_per_s
            device = stack.enter_context(
                contextlib.closing(
                    open_device(
                        machine.device,
                        self.ledger,
                        rate * 1e9 if rate else None,
                        ResidentLimit(prepared.before_bytes, machine.device_bytes, plan.total_bytes("host")),
                    )
                )
            )
            # What torch's own allocator will take: it is reserved like everything else, so the budget is the sum.
            for name in ("activations", "workspace", "shared"):
                num_bytes = plan.memory["device"].get(name, 0)
                stack.enter_context(self.ledger.reserve("device", name, num_bytes))
            stack.enter_context(buffers_on(prepared.split.model, device.torch_device))
            boundaries = stack.enter_context(Boundaries(prepared.split.modules))
            settings = EngineSettings(
                optimizer=AdamW(
                    betas=config.optimizer.betas,
                    eps=config.optimizer.eps,
                    weight_decay=config.optimizer.weight_decay,
                ),
                max_grad_norm=config.optimizer.max_grad_norm or float("inf"),
                skip_nonfinite=self.loss_scale.enabled or config.train.on_nonfinite == "skip",
                chunk_tokens=prepared.chunk_tokens,
                seed=config.train.seed,
                graph_in_forward=prepared.measured.graph_matters,
                num_threads=torch.get_num_threads(),
                observe_gradient=observe_gradient,
            )
            prepared.split.model.train()
            self.engine = Engine(
                prepared.split, boundaries, plan, device, self.home, buffers, self.scratch, settings
            )
            stack.callback(self.engine.close)
            self._stack = stack.pop_all()
        self._last: StepHandle | None = None

    def fill(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Copy the weights of the model's checkpoint into the home, tensor by tensor, in bounded memory.

        Args:
            progress: called with ``(elements done, elements in all)``.

        Raises:
            CheckpointError: a tensor cannot be read.
        """
        total = sum(unit.numel for unit in self.spec.units)
        done = 0
        with Arena() as arena:
            size = min(FILL_ELEMENTS, max(unit.numel for unit in self.spec.units))
            values = arena.take(size * 4, "fill").view(torch.float32)
            rounded = arena.take(size * 2, "fill, rounded") if self.spec.dtype != "fp32" else None
            for unit in self.spec.units:
                for start in range(0, unit.numel, size):
                    stop = min(start + size, unit.numel)
                    self._fill_range(unit, start, values[: stop - start], rounded)
                    done += stop - start
                    if progress is not None:
                        progress(done, total)

    def steps(self, batches: Iterable[Batch], first: int = 0) -> Iterator[StepOutcome]:
        """Train on ``batches``, numbered from ``first``; yields as soon as a step's loss and norm are known.

        The optimizer of the last step may still run; `settle` waits for it.

        Raises:
            OutsizeError: a step failed or is not finite; the weights are those after the step before.
        """
        config = self.prepared.config
        schedule = schedule_of(config)
        shifted = self.prepared.measured.shifted
        began = asked = time.perf_counter()
        for number, batch in zip(itertools.count(first), batches):
            data_s = time.perf_counter() - asked
            context = StepContext(
                number=number,
                learning_rate=schedule.learning_rate(number),
                microbatches=microbatches_of(batch, config.train.microbatches, shifted),
                loss_scale=self.loss_scale.value,
            )
            self._last = self.engine.begin(context)
            self.engine.forward_backward_done(self._last)
            self.loss_scale.update(context.skipped)
            ended = time.perf_counter()
            norm = context.gradient_norm
            yield StepOutcome(
                number=number,
                loss=context.loss(),
                gradient_norm=float("nan") if norm is None else norm,
                learning_rate=context.learning_rate,
                tokens=num_targets(batch, shifted),
                seconds=ended - began,
                data_s=data_s,
                skipped=context.skipped,
            )
            began, asked = ended, time.perf_counter()

    def settle(self) -> None:
        """Return when the optimizer of the last step is done, so that the home holds the weights after it."""
        if self._last is not None:
            self.engine.finish(self._last)
            self._last = None

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
        if isinstance(self.scratch, DiskScratch):
            moved = self.scratch.statistics()
            read, written = read + moved.bytes_out, written + moved.bytes_in
        return read, written

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
        return Arena(ledger=self.ledger, tier=tier, pinner=CudaPinner() if pin else None)

    def _open_home(self, store_dir: Path) -> HostHome | DiskHome:
        planes = planes_for(self.spec.dtype)
        if self.prepared.machine.home == "host":
            return HostHome(self.spec, planes, self._host)
        return DiskHome(
            self.spec, planes, store_dir / "home.bin", self.pool, ledger=self.ledger, temporary=True
        )

    def _open_scratch(self, stack: contextlib.ExitStack, store_dir: Path, buffers: Arena) -> Scratch | None:
        plan = self.prepared.plan
        if not plan.layout.offload:
            return None
        extents = len(plan.layout.offload) * plan.layout.num_microbatches
        size = max(self.prepared.measured.boundary_bytes[unit] for unit in plan.layout.offload)
        scratch: Scratch
        if self.prepared.machine.below == "disk":
            path = store_dir / "activations.bin"
            scratch = DiskScratch(extents, size, path, self.pool, buffers, ledger=self.ledger)
        else:
            scratch = HostScratch(extents, size, buffers)
        return stack.enter_context(contextlib.closing(scratch))

    def _fill_range(self, unit: UnitSpec, start: int, values: Tensor, rounded: Tensor | None) -> None:
        values.zero_()
        stop = start + values.numel()
        for tensor in unit.tensors:
            low, high = max(tensor.offset, start), min(tensor.offset + tensor.numel, stop)
            if low < high:
                into = values[low - start : high - start]
                self.prepared.source.read(tensor.name, low - tensor.offset, high - tensor.offset, into)
        if rounded is None:
            self.home.write(unit.index, WEIGHTS, start, values)
            return
        weights = rounded[: 2 * values.numel()].view(TORCH_DTYPE[self.spec.dtype])
        weights.copy_(values)
        self.home.write(unit.index, WEIGHTS, start, weights)
        if unit.trainable:
            self.home.write(unit.index, MASTER, start, values)

    def _borrow(self, num_bytes: int) -> Tensor:
        """Memory of a slot, an accumulator or a host buffer that lies in RAM; else fresh memory.

        Above a disk home there always is one that is large enough, aligned for direct I/O.
        """
        for buffer in self.engine.buffers:
            if buffer.device.type == "cpu" and buffer.nbytes >= num_bytes:
                return buffer[:num_bytes]
        return torch.empty(num_bytes, dtype=torch.uint8)
