"""A training run from its configuration to its result."""

import contextlib
import math
import resource
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from outsize.config import Config, dump_config
from outsize.errors import NonFiniteError
from outsize.planner.plan import Plan
from outsize.report.chrome import to_chrome
from outsize.runtime.allocator import begin_run, resident_bytes, set_thresholds
from outsize.train import checkpoint
from outsize.train.checkpoint_dir import CHECKPOINTS, latest, remove_litter
from outsize.train.checkpoint_state import check_same_run, describe, position_of, read_state
from outsize.train.data.batch import Batch
from outsize.train.data.packed import PackedDataset
from outsize.train.data.prefetch import Prefetcher
from outsize.train.heartbeat import Heartbeat, write_json, write_whole
from outsize.train.home_file import newest_home, remove_home, start
from outsize.train.interrupt import Interrupt
from outsize.train.lane_times import lane_times
from outsize.train.machine import choose_device
from outsize.train.prepare import Prepared, prepare
from outsize.train.records import StepRecord, TrainResult
from outsize.train.run_dir import choose_run_dir, claimed
from outsize.train.saver import Saver
from outsize.train.sources import open_dataset
from outsize.train.standing import Position, check_same_method
from outsize.train.stream import StepOutcome, StreamedTrainer
from outsize.train.torch_state import borrowed_torch
from outsize.train.watchdog import Watchdog

Announce = Callable[[str], None]
Progress = Callable[[StepRecord], None]
# The step whose timeline is kept: by then kernels and caches are warm.
TIMELINE_STEP = 2


def plan(config: Config) -> Plan:
    """Return the plan of a run without starting it: nothing is written, no data is read.

    Raises:
        OutsizeError: what would keep the run from starting.
    """
    with borrowed_torch(deterministic=False):
        return prepare(config, choose_run_dir(config), lambda _: None).plan


def train(
    config: Config, *, progress: Progress | None = None, announce: Announce = lambda _: None
) -> TrainResult:
    """Train as ``config`` says.

    On a CPU this chooses what malloc keeps of freed memory, for the whole process and for good.

    Args:
        config: the run.
        progress: called after each step.
        announce: called with lines for people: what was found, chosen, and fallen back to.

    Raises:
        OutsizeError: the run cannot start, or a step failed. What was saved before stays.
    """
    for note in config.notes():
        announce(f"note: {note}")
    run_dir = choose_run_dir(config)
    with contextlib.ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        stack.enter_context(claimed(run_dir, config))
        stack.enter_context(
            borrowed_torch(
                deterministic=config.train.deterministic, device=choose_device(config.memory.device)
            )
        )
        set_thresholds(heap=False)
        resumed = checkpoint.find(config.train.resume, run_dir)
        # Last on the way out, when no lane can write any more.
        stack.callback(remove_litter, run_dir / CHECKPOINTS)
        if resumed is not None:
            check_same_method(read_state(resumed), resumed, config)
        started = config if resumed is None else _from_checkpoint(config, resumed)
        prepared = prepare(started, run_dir, announce, adapters_from=resumed)
        if resumed is not None:
            check_same_run(resumed, config, prepared.dtype)
        record = newest_home(config, run_dir, prepared, resumed, announce)
        if resumed is not None:
            done = position_of(resumed)
            if done.step >= config.train.steps:
                announce(f"{resumed} has {done.step} of {config.train.steps} steps: nothing is left to do")
                return _nothing_done(prepared, run_dir, done)
        dataset = stack.enter_context(open_dataset(config, prepared, run_dir, announce))
        # Until here nothing was kept: what is measured and tokenised must not leave holes in the heap of the run.
        begin_run(heap=prepared.heap)
        # Entered first, so that it still watches while everything else is given back.
        watchdog = stack.enter_context(
            Watchdog(
                run_dir,
                announce,
                action=config.train.on_stall,
                factor=config.train.stall_factor,
                floor_s=config.train.stall_floor_s,
            )
        )
        trainer = start(stack, config, prepared, run_dir, record, resumed, announce)
        # Only now is there a run: one that could not start leaves nothing but tokenised data.
        write_whole(run_dir / "config.yaml", dump_config(config))
        write_json(run_dir / "plan.json", prepared.plan.to_dict())
        heartbeat = stack.enter_context(Heartbeat(run_dir))
        saver = stack.enter_context(_saver(config, trainer, run_dir, dataset, announce))
        run = _Run(
            config,
            prepared,
            run_dir,
            trainer,
            heartbeat,
            watchdog,
            saver,
            progress,
            announce,
            trainer.position,
        )
        return run.go(dataset, interrupt)


@dataclass(slots=True)
class _Run:
    """The loop over steps, and what it keeps count of."""

    config: Config
    prepared: Prepared
    run_dir: Path
    trainer: StreamedTrainer
    heartbeat: Heartbeat
    watchdog: Watchdog
    saver: Saver
    progress: Progress | None
    announce: Announce
    position: Position
    tokens: int = 0
    seconds: float = 0.0
    stalled_s: float = 0.0
    owners_s: dict[str, float] = field(default_factory=dict)
    disk: tuple[int, int] = (0, 0)
    link: tuple[int, int] = (0, 0)
    moved: tuple[int, int] = (0, 0)

    def go(self, dataset: PackedDataset, interrupt: Interrupt) -> TrainResult:
        """Train the steps that are left; Ctrl-C ends after the step under way, saved."""
        config = self.config
        self.disk, self.link = self.trainer.disk_bytes(), self._link()
        interrupt.can_finish = True
        self.watchdog.watch(self.trainer.engine, self.position.step + 1)
        with _batches(dataset, config, self.position.step) as batches:
            for outcome in self.trainer.steps(batches, self.position.step):
                self._note(outcome)
                if interrupt.requested:
                    self.announce(f"interrupted after step {self.position.step}; saving")
                    break
                self.saver.between_steps(self.position)
            self.trainer.settle()
            self._account_end()
            with self.watchdog.paused():
                self.saver.finish(self.position)
            saved = latest(self.run_dir)
            if saved is not None and self.position.step >= config.train.steps:
                remove_home(config, self.run_dir, saved, self.announce)
        owner = max(self.owners_s, key=lambda lane: self.owners_s[lane], default=None)
        return TrainResult(
            steps=self.position.step,
            loss=self.position.loss,
            tokens_per_s=self.tokens / self.seconds if self.seconds else 0.0,
            peak_rss_bytes=peak_rss_bytes(),
            budget_bytes=self.prepared.machine.device_bytes,
            stall_share=self.stalled_s / self.seconds if self.seconds else 0.0,
            bytes_read=self.moved[0],
            bytes_written=self.moved[1],
            run_dir=str(self.run_dir),
            skipped_steps=self.position.skipped,
            stall_owner=owner,
            export_dir=str(latest(self.run_dir)),
            failed_saves=self.saver.num_failed,
        )

    def _note(self, outcome: StepOutcome) -> None:
        """Keep count of one step, and tell the heartbeat and whoever watches."""
        former = self.position
        self.position = Position(
            former.step + 1, former.tokens + outcome.tokens, former.skipped + outcome.skipped, outcome.loss
        )
        self.watchdog.step_ended(outcome.seconds)
        self.tokens += outcome.tokens
        self.seconds += outcome.seconds
        record = self._record(outcome)
        self.heartbeat.beat(record)
        if self.progress is not None:
            self.progress(record)
        if outcome.skipped and self.config.train.on_nonfinite == "raise" and not math.isfinite(outcome.loss):
            raise NonFiniteError(
                f"step {record.step}: loss {outcome.loss:g}; no weight was changed. Loss scaling cannot mend that: try "
                "bf16 or fp32 instead of fp16, a lower optimizer.lr, or train.on_nonfinite=skip to go on"
            )

    def _record(self, outcome: StepOutcome) -> StepRecord:
        timeline = self.trainer.take_timeline()
        if outcome.number == self.config.train.steps - 1 or outcome.number == TIMELINE_STEP:
            write_json(self.run_dir / "timeline.json", to_chrome(timeline))
        times = lane_times(timeline)
        stalls = times.stall_s
        for lane, seconds in stalls.items():
            self.owners_s[lane] = self.owners_s.get(lane, 0.0) + seconds
        stalled = sum(stalls.values())
        self.stalled_s += stalled
        disk, link = self.trainer.disk_bytes(), self._link()
        read, written = disk[0] - self.disk[0], disk[1] - self.disk[1]
        up, down = link[0] - self.link[0], link[1] - self.link[1]
        self.disk, self.link = disk, link
        self.moved = (self.moved[0] + read, self.moved[1] + written)
        return StepRecord(
            step=outcome.number + 1,
            loss=outcome.loss,
            lr=outcome.learning_rate,
            grad_norm=outcome.gradient_norm,
            tokens=outcome.tokens,
            seconds=outcome.seconds,
            bytes_up=up,
            bytes_down=down,
            bytes_read=read,
            bytes_written=written,
            stall_share=min(stalled / outcome.seconds, 1.0),
            stall_owner=next(iter(stalls), None),
            skipped=outcome.skipped,
            skipped_steps=self.position.skipped,
            busy_s=times.busy_s,
            stall_s=times.stall_s,
            forward_s=times.forward_s,
            backward_s=times.backward_s,
            update_s=times.update_s,
            rss_bytes=resident_bytes(),
            peak_rss_bytes=peak_rss_bytes(),
            data_s=outcome.data_s,
        )

    def _account_end(self) -> None:
        """Count what the optimizer of the last step moved after that step was reported."""
        disk = self.trainer.disk_bytes()
        self.moved = (self.moved[0] + disk[0] - self.disk[0], self.moved[1] + disk[1] - self.disk[1])
        self.disk = disk

    def _link(self) -> tuple[int, int]:
        return self.trainer.engine.link_bytes()


def peak_rss_bytes() -> int:
    """Largest resident memory of the process so far, in bytes (Linux counts it in KiB).

    The kernel's high-water mark, where it tells: what `getrusage` says begins with that of the process's parent.
    """
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def _batches(dataset: PackedDataset, config: Config, first: int) -> Iterator[Iterator[Batch]]:
    with Prefetcher(dataset, config.sequences_per_step, first) as prefetcher:
        yield (prefetcher.next() for _ in range(first, config.train.steps))


def _nothing_done(prepared: Prepared, run_dir: Path, position: Position) -> TrainResult:
    """The result of a run that was at its end already."""
    return TrainResult(
        steps=position.step,
        loss=position.loss,
        tokens_per_s=0.0,
        peak_rss_bytes=peak_rss_bytes(),
        budget_bytes=prepared.machine.device_bytes,
        stall_share=0.0,
        bytes_read=0,
        bytes_written=0,
        run_dir=str(run_dir),
        skipped_steps=position.skipped,
        export_dir=str(latest(run_dir)),
    )


def _saver(
    config: Config, trainer: StreamedTrainer, run_dir: Path, dataset: PackedDataset, announce: Announce
) -> Saver:
    """Who writes the checkpoints of a run. One that goes on in its own directory stays the run that it was."""
    newest = latest(run_dir)
    run = uuid.uuid4().hex if newest is None else read_state(newest)["run"]
    scale, dtype = trainer.loss_scale, trainer.prepared.dtype
    return Saver(
        trainer,
        run_dir,
        config.train,
        commits=trainer.prepared.plan.layout.commits,
        state_of=lambda position: describe(position, config, dtype, scale, dataset.num_sequences, run),
        announce=announce,
        saved_step=-1 if newest is None else position_of(newest).step,
    )


def _from_checkpoint(config: Config, directory: Path) -> Config:
    """The same run, with its weights read from one of its checkpoints; one of adapters holds no others."""
    if config.train.method == "lora":
        return config
    model = config.model.model_copy(update={"path": str(directory)})
    return config.model_copy(update={"model": model})
