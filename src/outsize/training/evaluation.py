"""Evaluate a model while it trains, and end a run early: patience, signals, failures and the messages about them."""

import contextlib
import json
import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from outsize import files
from outsize.checkpoint.checkpoint_state import latest, name_of, set_best
from outsize.checkpoint.run_checkpoint import position_of
from outsize.config import Config
from outsize.data.batch import Batch
from outsize.data.packed_dataset import PackedDataset
from outsize.errors import ConfigError, OutsizeError, explain
from outsize.session.job.prepare import Job
from outsize.session.steps import Measure
from outsize.session.stream import StreamedTrainer
from outsize.training.records import Telling

EVALUATIONS = "evaluations.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """One evaluation.

    Attributes:
        step: steps done before.
        loss: in nats per predicted token; None where that is not finite.
        perplexity: of the loss.
        tokens: that were predicted.
        seconds: that the evaluation took.
    """

    step: int
    loss: float | None
    perplexity: float | None
    tokens: int
    seconds: float


def check_evaluates(prepared: Job) -> None:
    """Check that what trains can be measured.

    Raises:
        ConfigError: several devices or processes train.
    """
    if prepared.config.eval.on and (prepared.group.size > 1 or prepared.plan.layout.stages is not None):
        raise ConfigError(
            "eval: one device of one process measures, and here several train; leave section eval out, and measure the "
            "checkpoints afterwards"
        )


class Evaluations:
    """Measures a model between its steps.

    Every evaluation is a line of ``evaluations.jsonl``. What was best, and for how long nothing has been better, is
    read off these lines, so that a run that goes on knows it: lines of steps that it does again are left out.

    Args:
        config: of the run.
        trainer: streams the model.
        dataset: what the model is measured on.
        run_dir: of the run.
        first: steps that were done before.
        telling: counts lines that cannot be written.
    """

    def __init__(
        self,
        config: Config,
        trainer: StreamedTrainer,
        dataset: PackedDataset,
        run_dir: Path,
        first: int,
        telling: Telling,
    ) -> None:
        self._telling = telling
        self._config = config
        self._trainer = trainer
        self._dataset = dataset
        self._run_dir = run_dir
        self.records = [record for record in read_evaluations(run_dir) if record.step <= first]

    @property
    def best(self) -> EvaluationRecord | None:
        """The one with the least loss; None before there is one that is finite."""
        measured = [record for record in self.records if record.loss is not None]
        return min(measured, key=lambda record: record.loss or 0.0, default=None)

    @property
    def stops(self) -> bool:
        """Whether nothing has been better for as long as the run is to wait."""
        patience, best = self._config.eval.patience, self.best
        since = [record for record in self.records if best is None or record.step > best.step]
        return patience is not None and len(since) >= patience

    def is_due(self, step: int) -> bool:
        """Whether the model is measured after ``step`` steps."""
        every = self._config.eval.every
        if self.records and self.records[-1].step == step:
            return False
        return step >= self._config.train.steps or (every > 0 and step % every == 0)

    def measure(self, step: int) -> EvaluationRecord:
        """Measure the model after ``step`` steps, and keep what came of it.

        Raises:
            OutsizeError: an op failed. A line that cannot be written is counted, and written with the next one.
        """
        began = time.monotonic()
        measure: Measure = self._trainer.evaluate(self._batches())
        record = EvaluationRecord(
            step=step,
            loss=_finite(measure.loss),
            perplexity=_finite(measure.perplexity),
            tokens=measure.tokens,
            seconds=time.monotonic() - began,
        )
        self.records.append(record)
        self._telling.tell("an evaluation", lambda: self._keep(record))
        return record

    def _keep(self, record: EvaluationRecord) -> None:
        path = self._run_dir / EVALUATIONS
        try:
            files.write_whole(path, "".join(json.dumps(asdict(each)) + "\n" for each in self.records))
            if self._config.eval.keep_best and self.best is record:
                set_best(self._run_dir, name_of(record.step))
        except OSError as error:
            raise explain(error, f"write {path}") from error

    def _batches(self) -> Iterator[Batch]:
        most = min(self._dataset.num_sequences, self._config.eval.sequences or self._dataset.num_sequences)
        size = self._trainer.num_measured
        for first in range(0, most, size):
            yield self._dataset.sequences(first, min(size, most - first))


def read_evaluations(run_dir: Path) -> list[EvaluationRecord]:
    """Return the evaluations of a run, in order; none where the file is not there, or is not one."""
    path = run_dir / EVALUATIONS
    try:
        return [EvaluationRecord(**json.loads(line)) for line in files.read_text(path).splitlines()]
    except (OSError, ValueError, TypeError):
        return []


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class Aftermath:
    """A context manager that tells what a run which fails has left; it tells nothing of one that did not begin.

    Args:
        run_dir: its directory.
        announce: told.
        home: returns the step that its home on disk holds, and where that is; None where it holds none.

    Attributes:
        begun: whether there have been steps.
    """

    def __init__(
        self,
        run_dir: Path,
        announce: Callable[[str], None],
        home: Callable[[], tuple[int, str] | None] = lambda: None,
    ) -> None:
        self.begun = False
        self._run_dir, self._announce, self._home = run_dir, announce, home

    def __enter__(self) -> "Aftermath":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None and self.begun:
            with contextlib.suppress(OutsizeError, OSError):  # the run ends with the error that it failed of
                self._announce(f"the run failed: {self.next_start()}")

    def next_start(self) -> str:
        """Say what `--resume auto` will do, by what lies on the disk.

        Raises:
            OutsizeError: it cannot be read.
        """
        saved = latest(self._run_dir)
        starts = [(position_of(saved).step, saved.name)] if saved is not None else []
        if (committed := self._home()) is not None:
            starts.append(committed)
        if not starts:
            return "nothing is saved yet, --resume auto starts with step 1 again"
        step, where = max(starts)
        return f"--resume auto goes on after step {step}, from {where}"


# SIGHUP comes when a terminal closes; under nohup it is ignored, and stays so.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """While entered, a signal raises KeyboardInterrupt: whatever is under way is undone on its way out.

    Ctrl-C, SIGTERM, SIGHUP: while there are steps to save, the first asks the run to finish and save, the second stops.

    A signal is answered at once, though a step may take minutes: its handler puts an answer into a queue, and a thread
    that waits for it speaks. The handler may not speak itself, since what it interrupts may be writing to the same
    console.

    Where `finish` is set, the first signal only sets `requested`. Signal handlers belong to the main thread; in any
    other this does nothing.

    Args:
        announce: called with a line for people, from a thread of this.

    Attributes:
        doing: what is being done before there are steps; whoever is interrupted meanwhile is told.
        finish: says what a run that is to end waits for; None where nobody looks at `requested`.
        requested: whether a signal has come since.
    """

    def __init__(self, announce: Callable[[str], None] = lambda _: None) -> None:
        self.doing = "it began"
        self.finish: Callable[[], str] | None = None
        self.requested = False
        self._announce = announce
        self._former: dict[int, Any] = {}
        # Its put is made for signal handlers; locks of other kinds may be held by what they interrupt.
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._speaker: threading.Thread | None = None

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._speaker = threading.Thread(target=self._speak, name="outsize-interrupt", daemon=True)
            self._speaker.start()
            heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._former = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()
        if self._speaker is not None:
            self._answers.put(None)
            self._speaker.join()
            self._speaker = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.finish is None:
            raise KeyboardInterrupt(f"interrupted while {self.doing}; no step was under way, nothing is lost")
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._answers.put("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    def _speak(self) -> None:
        while (name := self._answers.get()) is not None:
            if self.finish is not None:
                self._announce(f"{name} was heard: {self.finish()}")
