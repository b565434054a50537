"""What a model is measured on while it trains: when, what came of it, which step was best, and when to stop.

Every evaluation is a line of ``evaluations.jsonl``. What was best, and for how long nothing has been better, is read
off these lines, so that a run that goes on knows it: lines of steps that it does again are left out.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from outsize import files
from outsize.checkpoint.checkpoint_state import name_of, set_best
from outsize.config import Config
from outsize.data.batch import Batch
from outsize.data.packed_dataset import PackedDataset
from outsize.errors import ConfigError
from outsize.session.job.prepare import Job
from outsize.session.steps import Measure
from outsize.session.stream import StreamedTrainer
from outsize.storage.prealloc import explain
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
        known = [record for record in self.records if record.loss is not None]
        return min(known, key=lambda record: record.loss or 0.0, default=None)

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
        found: Measure = self._trainer.evaluate(self._batches())
        record = EvaluationRecord(
            step=step,
            loss=_finite(found.loss),
            perplexity=_finite(found.perplexity),
            tokens=found.tokens,
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
