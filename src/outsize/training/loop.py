"""The loop over the steps of a run, what it asks of who trains, and what it keeps count of."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from outsize.checkpoint.checkpoint_state import best, latest
from outsize.checkpoint.home_file import remove_home, tell_costs
from outsize.checkpoint.saver import Saver
from outsize.config import Config
from outsize.data.batch import Batch, BatchPinner
from outsize.data.packed_dataset import PackedDataset
from outsize.data.prefetch import Prefetcher, SharedData
from outsize.detail import Detail
from outsize.errors import NonFiniteError, OutsizeError
from outsize.group.group import Group
from outsize.planner.simulate.simulator import Timeline
from outsize.planner.simulate.stalls import Window
from outsize.reporting.html_page import to_chrome
from outsize.session.job.prepare import Job
from outsize.session.run_state import Position
from outsize.session.steps import StepOutcome
from outsize.session.stream import StreamedTrainer
from outsize.telemetry.writers import Writers
from outsize.training.evaluation import Evaluations, Interrupt
from outsize.training.forecast import Forecast
from outsize.training.measures import Accounts, resident_memory, stall_share
from outsize.training.ranks import Ranks
from outsize.training.records import Heartbeat, StepRecord, TrainResult, write_whole
from outsize.training.watchdog import PROFILE, StepProfiler, Watchdog
from outsize.units import format_seconds

Progress = Callable[[StepRecord], None]
# The step whose timeline is kept: by then kernels and caches are warm.
TIMELINE_STEP = 2


@dataclass(slots=True)
class Run:
    """The loop over steps, and what it keeps count of."""

    prepared: Job
    ranks: Ranks
    trainer: StreamedTrainer
    accounts: Accounts
    heartbeat: Heartbeat
    writers: Writers
    profiler: StepProfiler
    watchdog: Watchdog
    saver: Saver
    next_start: Callable[[], str]
    progress: Progress | None
    position: Position
    forecast: Forecast | None = None
    evaluations: Evaluations | None = None
    tokens: int = 0
    all_tokens: int = 0
    seconds: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0
    stopped_early: bool = False
    epoch_after: Callable[[int], float | None] = lambda _: None
    config: Config = field(init=False)
    _tokens_per_step: int = field(init=False)
    _known_s: float = field(default_factory=time.monotonic)
    _unwritten: tuple[StepRecord, StepOutcome] | None = None

    def __post_init__(self) -> None:
        self.config = self.prepared.config
        self._tokens_per_step = self.config.tokens_per_step

    def go(self, dataset: PackedDataset, interrupt: Interrupt) -> TrainResult:
        """Train the steps that are left; Ctrl-C ends after the step under way, saved."""
        interrupt.finish = self._awaited
        self.epoch_after = partial(dataset.epoch, num_sequences=self.config.sequences_per_step)
        # Over the saver alone: what the run holds must not hold the run.
        saver, commits, first = self.saver, self.prepared.plan.layout.commits, self.position.step
        self.watchdog.saved = lambda done: saver.has_saved or first > 0 or (commits and done > 0)
        self.watchdog.watch(self.trainer.engine, self.position.step + 1, dataset.num_made)
        try:
            first, stop = self.position.step, self.prepared.config.train.steps
            with batches_ahead(dataset, self.prepared, self.ranks.group, first, stop) as batches:
                self._train(batches, interrupt)
        except BaseException:
            with contextlib.suppress(OutsizeError):  # the run ends with the error that it failed of
                self._write_line()
            raise
        tell_costs(self.prepared, self.ranks.own_dir, self.ranks.announce)
        saved = latest(self.ranks.run_dir)
        if saved is not None and self.position.step >= self.config.train.steps:
            remove_home(self.config.memory, self.ranks.own_dir, saved, self.ranks.announce)
        return self._result(saved)

    def _awaited(self) -> str:
        """Say what a run that is asked to end waits for, and what becomes of it if it is not waited for."""
        if self.watchdog.doing:
            ends = f"the run ends with {self.watchdog.doing}"
        elif self.position.step >= self.config.train.steps:
            ends = f"the run ends after step {self.position.step}, its last one, and saves"
        else:
            left_s = max(0.0, self.watchdog.typical_step_s - (time.monotonic() - self._known_s))
            about = (
                f"in about {format_seconds(left_s)}"
                if self.watchdog.typical_step_s
                else "when that is computed"
            )
            ends = f"the run ends after step {self.position.step + 1}, {about}, and saves"
        try:
            return f"{ends}. A second one stops it at once: {self.next_start()}"
        except (OutsizeError, OSError):  # what is saved cannot be read just now
            return f"{ends}. A second one stops it at once"

    def _train(self, batches: Iterator[Batch], interrupt: Interrupt) -> None:
        for outcome in self.trainer.steps(batches, self.position.step, self._write_line):
            self._note(outcome)
            if self.ranks.any_wants(interrupt.requested):
                self.ranks.announce(f"interrupted after step {self.position.step}; saving")
                break
            is_best = self._evaluate()
            with self.accounts.saving():
                self.saver.between_steps(self.position, is_best)
            if self.evaluations is not None and self.evaluations.stops:
                self._stop_early(self.evaluations)
                break
        self.trainer.settle()
        self._write_line()
        with self.watchdog.during(f"the checkpoint after step {self.position.step}"):
            self.saver.finish(self.position)
        self.ranks.group.barrier()  # who holds a part of the state keeps it until the whole is saved

    def _evaluate(self) -> bool:
        """Measure the model where that is due; returns whether it is the best so far, and is to be kept."""
        if self.evaluations is None or not self.evaluations.is_due(self.position.step):
            return False
        with self.watchdog.during(f"the evaluation after step {self.position.step}"):
            record = self.evaluations.measure(self.position.step)
        self.trainer.take_timeline()  # of the evaluation, which is no part of the next step
        if self._unwritten is not None:
            unwritten, outcome = self._unwritten
            unwritten = replace(
                unwritten, eval_loss=record.loss, eval_perplexity=record.perplexity, eval_tokens=record.tokens
            )
            self._unwritten = unwritten, outcome
            self._write_line()
        is_best = self.evaluations.best is record
        loss = (
            "not finite" if record.loss is None else f"{record.loss:.4f}, perplexity {record.perplexity:.4g}"
        )
        self.ranks.announce(
            f"evaluation after step {record.step}: loss {loss}, {record.tokens:,} tokens in "
            f"{format_seconds(record.seconds)}{', the best so far' if is_best else ''}"
        )
        return is_best and self.config.eval.keep_best

    def _stop_early(self, evaluations: Evaluations) -> None:
        best = evaluations.best
        than = "none was finite" if best is None else f"none was better than that after step {best.step}"
        self.stopped_early = True
        self.ranks.announce(
            f"stopped after step {self.position.step}: of the last {self.config.eval.patience} evaluations {than}"
        )

    def _result(self, saved: Path | None) -> TrainResult:
        stalled_s = self.accounts.stalled_s
        return TrainResult(
            steps=self.position.step,
            loss=self.position.loss,
            tokens_per_s=self.tokens / self.seconds if self.seconds else 0.0,
            all_tokens_per_s=self.all_tokens / self.seconds if self.seconds else None,
            peak_rss_bytes=resident_memory()[1],
            budget_bytes=self.prepared.machine.device_bytes,
            stall_share=stall_share(stalled_s, self.seconds),
            bytes_read=self.bytes_read,
            bytes_written=self.bytes_written,
            run_dir=str(self.ranks.run_dir),
            skipped_steps=self.position.skipped,
            stall_owner=max(stalled_s, key=lambda lane: stalled_s[lane], default=None),
            export_dir=None if saved is None else str(saved),
            failed_saves=self.saver.num_failed,
            failed_writes=self.heartbeat.telling.num_failed,
            num_steps=self.config.train.steps,
            stopped_early=self.stopped_early,
            best_dir=None if (chosen := best(self.ranks.run_dir)) is None else str(chosen),
            **self._measured(),
            **_told(self.forecast),
        )

    def _measured(self) -> dict[str, Any]:
        """What a result says of the last evaluation."""
        if self.evaluations is None or not self.evaluations.records:
            return {}
        last = self.evaluations.records[-1]
        return {"eval_loss": last.loss, "eval_perplexity": last.perplexity}

    def _write_line(self) -> None:
        """Tell the heartbeat of the step that was known last, now that all of its bytes have moved."""
        if self._unwritten is None:
            return
        (unwritten, outcome), self._unwritten = self._unwritten, None
        record = self.accounts.counted(unwritten, outcome)
        self.bytes_read += record.bytes_read
        self.bytes_written += record.bytes_written
        self.heartbeat.beat(record)
        self.writers.tell(record)

    def _note(self, outcome: StepOutcome) -> None:
        """Keep count of one step, and tell whoever watches."""
        before = self.position
        self.position = Position(
            before.step + 1, before.tokens + outcome.tokens, before.skipped + outcome.skipped, outcome.loss
        )
        self.watchdog.step_ended(outcome.seconds)
        self._known_s = time.monotonic()
        self.tokens += outcome.tokens
        self.all_tokens += self._tokens_per_step
        self.seconds += outcome.seconds
        timeline = self.trainer.take_timeline()
        failed = {
            "failed_saves": self.saver.num_failed,
            "failed_writers": self.writers.num_failed,
            "failed_writes": self.heartbeat.telling.num_failed,
        }
        step_record = self.accounts.record(outcome, timeline, self.position.skipped, failed)
        record = replace(
            step_record,
            slowed_s=None if self.forecast is None else self.forecast.slowed_s(step_record.busy_s),
            num_steps=self.config.train.steps,
            epoch=self.epoch_after(self.position.step),
        )
        self._unwritten = record, outcome
        if outcome.number in (TIMELINE_STEP, self.config.train.steps - 1):
            path, trace = self.ranks.own_dir / "timeline.json", to_chrome(timeline)
            self.heartbeat.telling.tell("the timeline", lambda: write_whole(path, trace))
        self._foresee(outcome.window, timeline)
        if self.profiler.step_ended(self.trainer.settle):
            self.ranks.announce(
                f"profile of {self.config.train.profile_steps} steps: {self.ranks.own_dir / PROFILE}"
            )
        if self.progress is not None:
            self.progress(record)
        if outcome.skipped and self.config.train.on_nonfinite == "raise" and not math.isfinite(outcome.loss):
            raise NonFiniteError(
                f"step {record.step}: loss {outcome.loss:g}; no weight was changed. Loss scaling cannot mend that: try "
                "bf16 or fp32 instead of fp16, a lower optimizer.lr, or train.on_nonfinite=skip to go on"
            )

    def _foresee(self, window: Window, timeline: Timeline) -> None:
        """Once the first steps are known, say how far they are from what was predicted, and go by them."""
        if self.forecast is not None and self.forecast.step_ended(window, timeline):
            assert self.forecast.comparison is not None
            for line in self.forecast.comparison.lines():
                self.ranks.announce(Detail(line))
            self.heartbeat.telling.tell("the prediction", partial(self.forecast.write, self.ranks.own_dir))


@contextlib.contextmanager
def batches_ahead(
    dataset: PackedDataset, prepared: Job, group: Group, first: int, stop: int
) -> Iterator[Iterator[Batch]]:
    """Make the batches of steps ``first`` to ``stop``, without that, ahead of them, as the configuration says."""
    config = prepared.config
    source = dataset if group.size == 1 else SharedData(dataset, group.rank, group.size)
    with Prefetcher(
        source,
        config.sequences_per_step,
        first,
        depth=config.data.prefetch,
        num_workers=config.data.workers,
        finish=BatchPinner() if prepared.machine.devices.accelerated else lambda batch: batch,
    ) as prefetcher:
        try:
            yield (prefetcher.next() for _ in range(first, stop))
        finally:
            dataset.stop()  # batches ahead of the last step may wait for what is not tokenised


def _told(forecast: Forecast | None) -> dict[str, float]:
    """What a result says of predictions."""
    if forecast is None:
        return {}
    seconds_by_field = {"predicted_step_s": forecast.predicted.step_s, "expected_step_s": forecast.step_s}
    comparison = forecast.comparison
    return (
        seconds_by_field
        if comparison is None
        else {**seconds_by_field, "measured_step_s": comparison.measured_s}
    )
