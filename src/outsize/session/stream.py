"""A streamed training run: tiers opened and filled, an engine over them, and steps that overlap at their ends."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.data.batch import Batch
from outsize.errors import Closing
from outsize.model.sizes.model_spec import UnitSpec
from outsize.optim.optimizer_spec import WEIGHTS
from outsize.optim.shares import home_granule
from outsize.planner.memory.step_bytes import net_staging
from outsize.planner.simulate.simulator import Timeline
from outsize.runtime.engine.engine import StepHandle
from outsize.runtime.engine.op_handlers import EngineSettings
from outsize.runtime.forward.binding import TORCH_DTYPE
from outsize.runtime.ops.context import StepContext
from outsize.runtime.ops.exchange_ops import Shared
from outsize.runtime.ops.gradient_ops import GradientObserver
from outsize.session.fill import FILL_ELEMENTS, fill
from outsize.session.job.optimizer_layout import max_norm_of, rule_of
from outsize.session.job.prepare import Job
from outsize.session.run_state import Position, Standing, position_in, state_of
from outsize.session.session import Session, Store
from outsize.session.steps import LossScale, Measure, StepOutcome, microbatches_of, schedule_of
from outsize.storage.committed import CommittedHome
from outsize.storage.home import Home
from outsize.storage.ledger import Arena, Ledger
from outsize.storage.record import CommitRecord


class StreamedTrainer(Closing):
    """Trains a prepared model, streamed. A context manager; everything it holds is gone when it closes.

    Args:
        prepared: model, plan and budgets.
        store_dir: directory of the disk home.
        observe_gradient: sees each gradient before it leaves the device, for tests and diagnosis.
        home_file: of a home that commits, which stays; without a name it is gone with the process.
        record: of the committed home in ``home_file``, to go on with it; see `resume`.
        data: what tells the sequences of the run from others, for commits.

    Attributes:
        errors: what codecs have done to frozen weights, by name, see `fill`.
    """

    def __init__(
        self,
        prepared: Job,
        store_dir: Path,
        observe_gradient: GradientObserver | None = None,
        *,
        home_file: Path | None = None,
        record: CommitRecord | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        self.prepared = prepared
        self._data = data
        self._num_microbatches = prepared.config.microbatches
        self._first_microbatch = prepared.group.rank * self._num_microbatches
        self.spec = prepared.split.spec
        self.loss_scale = LossScale(enabled="fp16" in self.spec.dtypes)
        self.position = Position(0, 0, 0)
        self.errors: dict[str, float] = {}
        self._standing: list[Standing] = []  # one, as soon as there are steps
        self._last: StepHandle | None = None
        with contextlib.ExitStack() as stack:
            self.session = stack.enter_context(_open_session(prepared, store_dir, home_file, record))
            prepared.split.model.train()
            self.engine = self.session.open_engine(
                prepared.split,
                prepared.plan,
                prepared.measured.boundary_bytes,
                self._settings(observe_gradient),
                _shared(prepared),
            )
            self._stack = stack.pop_all()

    @property
    def home(self) -> Home:
        """Where the training state lies."""
        return self.session.home

    @property
    def ledger(self) -> Ledger:
        """What of every budget is used."""
        return self.session.ledger

    def fill(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Copy the weights of the model's checkpoint into the home; see `outsize.session.fill.fill`."""
        state, share = self.prepared.plan.state, self.prepared.own
        self.errors = fill(self.home, self.spec, self.prepared.source, progress, state, share)

    def steps(
        self, batches: Iterable[Batch], first: int = 0, done: Callable[[], None] = lambda: None
    ) -> Iterator[StepOutcome]:
        """Train on ``batches``, numbered from ``first``; yields as soon as a step's loss and norm are known.

        The optimizer of the last step may still run; `settle` waits for it.

        Args:
            batches: of all steps.
            first: number of the first one.
            done: called when the last op of a step has ended, while the next one is under way.

        Raises:
            OutsizeError: a step failed or is not finite; the weights are those after the step before.
        """
        schedule = schedule_of(self.prepared.config)
        self.position = replace(self.position, step=first)
        updates, dtype = self.engine.optimizer.updates, self.prepared.dtype
        state_at = partial(state_of, config=self.prepared.config, dtype=dtype, data=self._data)
        self._standing[:] = [Standing(self.position, self.loss_scale, updates, state_at)]
        began = requested = time.perf_counter()
        left = iter(batches)
        for number in itertools.count(first):
            batch = next(left, None)  # not zip, which would hold on to it
            if batch is None:
                return
            data_s = time.perf_counter() - requested
            context = self._context_of(number, batch, schedule.learning_rate(number))
            previous, self._last = self._last, self.engine.begin(context)
            if previous is not None:
                self.engine.finish(previous)
                done()
            self.engine.forward_backward_done(self._last)
            self.loss_scale.update(context.skipped)
            ended = time.perf_counter()
            # Nothing reads the inputs any more, and the next batch may lie where they do.
            batch = None
            context.microbatches = ()
            yield StepOutcome(
                number=number,
                loss=context.loss(),
                gradient_norm=context.norm(),
                learning_rate=context.learning_rate,
                tokens=context.tokens,
                seconds=ended - began,
                data_s=data_s,
                between_s=requested - began,
                ended_s=ended,
                skipped=context.skipped,
                moved=context.bytes_moved,
            )
            began, requested = ended, time.perf_counter()

    def _context_of(self, number: int, batch: Batch, learning_rate: float) -> StepContext:
        """Return what the ops of a step share."""
        shifted = self.prepared.measured.shifted
        return StepContext(
            number=number,
            learning_rate=learning_rate,
            microbatches=microbatches_of(batch, self._num_microbatches, shifted),
            tokens=(batch.whole or batch).num_targets(shifted),
            loss_scale=self.loss_scale.value,
            first_microbatch=self._first_microbatch,
        )

    def resume(self, record: CommitRecord) -> Position:
        """Go on from ``record``, that of the home which this was made with, once all of it has been read and checked.

        Raises:
            StorageError: it is damaged; says where.
        """
        self.home.check(self._borrow)
        return self._stand(record)

    def take_over(self, path: Path, record: CommitRecord) -> Position:
        """Copy the state of a committed home at ``path`` into this one, which is of another kind.

        Raises:
            StorageError: it is damaged; says where.
        """
        planes, share, whole_planes = self.prepared.plan.state.planes, self.prepared.own, self.prepared.whole
        with (
            Arena() as arena,
            CommittedHome(
                self.spec,
                planes,
                path,
                self.session.pool,
                arena=arena,
                record=record,
                shares=share,
                full_planes=whole_planes,
            ) as source,
        ):
            piece = arena.take(FILL_ELEMENTS * 4, "a part of a plane")
            source.copy_to(self.home, piece)
        return self._stand(record)

    def evaluate(self, sequences: Iterable[Batch]) -> Measure:
        """Return the loss over ``sequences``, streamed forward without dropout; between steps, which it settles.

        Args:
            sequences: in batches of at most `num_measured` sequences.

        Raises:
            OutsizeError: an op failed.
        """
        self.settle()
        model, shifted = self.prepared.split.model.eval(), self.prepared.measured.shifted
        measure = Measure()
        try:
            self.engine.follow()
            for batch in sequences:
                count = min(self._microbatches_measured, batch.num_sequences)
                loss = self.engine.measure(microbatches_of(batch, count, shifted))
                measure = measure.and_then(loss, batch.num_targets(shifted))
        finally:
            model.train()
            self.engine.follow()
        return measure

    @property
    def num_measured(self) -> int:
        """Sequences that `evaluate` takes at a time: a step's, or a microbatch's where inputs leave the device."""
        microbatches = self._num_microbatches // self._microbatches_measured
        return max(1, self.prepared.config.sequences_per_step // microbatches)

    @property
    def _microbatches_measured(self) -> int:
        """Microbatches of a forward by itself: what waits between two units has to stay on the device there."""
        return 1 if self.prepared.plan.layout.offload else self._num_microbatches

    def settle(self) -> None:
        """Return when the optimizer of the last step is done, so that the home holds the weights after it."""
        if self._last is not None:
            self.engine.finish(self._last)

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

    def fallbacks(self) -> dict[str, int]:
        """What could not be had as asked so far, and how often: pinned memory, direct I/O, room for what was kept."""
        return self.session.fallbacks()

    def take_timeline(self) -> Timeline:
        """What the lanes did since the last call."""
        return self.engine.take_timeline()

    def close(self) -> None:
        """Give everything back; idempotent."""
        self._stack.close()

    def _settings(self, observe_gradient: GradientObserver | None) -> EngineSettings:
        """What the engine is to do, of a run and of what was measured of its model."""
        config = self.prepared.config
        return EngineSettings(
            optimizer=rule_of(config.optimizer),
            max_grad_norm=max_norm_of(config.optimizer),
            skip_nonfinite=self.loss_scale.enabled or config.train.on_nonfinite == "skip",
            chunk_tokens=self.prepared.chunk_tokens,
            seed=config.train.seed,
            graph_in_forward=self.prepared.measured.graph_matters,
            effects=self.prepared.measured.effects,
            needed=self.prepared.measured.needed,
            num_products=self.prepared.measured.num_products,
            num_threads=torch.get_num_threads(),
            draws_random=self.prepared.measured.draws_random,
            observe_gradient=observe_gradient,
            describe=partial(_describe, self._standing),
        )

    def _stand(self, record: CommitRecord) -> Position:
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


def _open_session(
    prepared: Job, directory: Path, home_file: Path | None, record: CommitRecord | None
) -> Session:
    """Return the session of a run, without an engine."""
    spec, plan = prepared.split.spec, prepared.plan
    commits = prepared.machine.home == "disk" and plan.layout.commits
    store = Store(
        state=plan.state,
        directory=directory,
        transport=plan.transport,
        own=prepared.own,
        whole=prepared.whole,
        granule_elements=home_granule(spec, plan.tile_elements, prepared.group.size) if commits else None,
        file=home_file,
        record=record,
        resident=plan.layout.resident,
    )
    return Session(prepared.split, prepared.machine, prepared.config.memory, store, prepared.before_bytes)


def _shared(prepared: Job) -> Shared | None:
    """With whom this rank shares its steps; None for a single process."""
    group, wire = prepared.group, prepared.plan.wire
    if group.size == 1:
        return None
    home, state = prepared.machine.home, prepared.plan.state
    return Shared(group, wire, net_staging(prepared.split.spec, group.size, wire, home, state))


def _describe(states: list[Standing], context: StepContext) -> Mapping[str, Any]:
    """What a commit says of the run. Not a method: engine and trainer would hold each other, and the slots."""
    return states[0].after(context)
