"""Records of a run: a line of the heartbeat for each step, and the result.

What a run reports: a record per step, and one result at its end. Plain data; no torch.

Rates are over wall-clock time. Trained tokens are those that carry loss: neither padding nor masked prompts.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from outsize import files
from outsize.errors import Closing, StorageError, explain
from outsize.telemetry.run_reading import SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Measurements of an optimizer step.

    `outsize.telemetry.run_reading.Line` says what each field means, and its unit. A loss that is not finite is NaN
    here; bytes are those that the step's ops have moved so far.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    seconds: float
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    stall_share: float = 0.0
    stall_owner: str | None = None
    skipped: bool = False
    skipped_steps: int = 0
    busy_s: dict[str, float] = field(default_factory=dict)
    stall_s: dict[str, float] = field(default_factory=dict)
    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    rss_bytes: int = 0
    peak_rss_bytes: int = 0
    data_s: float = 0.0
    between_s: float = 0.0
    cpu_s: float = 0.0
    slowed_s: float | None = None
    idle_s: dict[str, float] = field(default_factory=dict)
    waits_s: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    num_compute_ops: int = 0
    mfu: float | None = None
    wire_bytes: dict[str, int] = field(default_factory=dict)
    logical_bytes: dict[str, int] = field(default_factory=dict)
    tiers: dict[str, dict[str, int | None]] = field(default_factory=dict)
    device_bytes: dict[str, int] = field(default_factory=dict)
    gpus: tuple[dict[str, Any], ...] = ()
    host: dict[str, Any] | None = None
    num_steps: int = 0
    epoch: float | None = None
    eval_loss: float | None = None
    eval_perplexity: float | None = None
    eval_tokens: int | None = None
    fallbacks: dict[str, int] = field(default_factory=dict)
    time: float = field(default_factory=time.time)

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def up_bytes_per_s(self) -> float:
        """Mean rate to the device over the whole step."""
        return self.bytes_up / self.seconds if self.seconds > 0 else 0.0

    @property
    def down_bytes_per_s(self) -> float:
        """Mean rate from the device over the whole step."""
        return self.bytes_down / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return all attributes and ``tokens_per_s``, ready for JSON."""
        # Not asdict, which copies every mapping: this is asked for in every step.
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**values, "tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run came to.

    Attributes:
        steps: optimizer steps done in all, those before a resume included.
        loss: loss of the last step, in nats per trained token.
        tokens_per_s: trained tokens per second over all steps of this run.
        peak_rss_bytes: largest resident memory of the process.
        budget_bytes: memory that the run was allowed on its device.
        stall_share: share of the run, 0 to 1, in which the device waited for bytes; of several, the largest.
        bytes_read: bytes read from disk in all steps.
        bytes_written: bytes written to disk in all steps.
        run_dir: directory of the run.
        skipped_steps: steps whose update was left out because something was not finite.
        stall_owner: lane that most of the waiting was for.
        export_dir: directory of the trained model in Hugging Face layout, where one was written.
        failed_saves: checkpoints on the way that could not be written; the run went on.
        failed_writes: lines of the heartbeat and other files that tell of the run which could not be written.
        predicted_step_s: seconds of a step as predicted before the run; None where there was no prediction.
        measured_step_s: seconds of the first steps but one, which the prediction was compared with; None for fewer.
        expected_step_s: seconds of a step from the trace of those, or as predicted where there is no trace.
        eval_loss: loss of the last evaluation, in nats per predicted token; None where there was none.
        eval_perplexity: of that.
        best_dir: directory of the checkpoint with the least loss of those that were evaluated and kept.
        num_steps: optimizer steps that the run was to have.
        all_tokens_per_s: tokens per second with prompts and padding, as `outsize plan` counts them; None where nobody
            counts them.
        stopped_early: whether the run ended since evaluations did not get better.
    """

    steps: int
    loss: float
    tokens_per_s: float
    peak_rss_bytes: int
    budget_bytes: int
    stall_share: float
    bytes_read: int
    bytes_written: int
    run_dir: str
    skipped_steps: int = 0
    stall_owner: str | None = None
    export_dir: str | None = None
    failed_saves: int = 0
    failed_writes: int = 0
    predicted_step_s: float | None = None
    measured_step_s: float | None = None
    expected_step_s: float | None = None
    eval_loss: float | None = None
    eval_perplexity: float | None = None
    best_dir: str | None = None
    num_steps: int = 0
    stopped_early: bool = False
    all_tokens_per_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all attributes, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """What the comparison of a streamed with a resident run came to.

    Attributes:
        equal: whether every loss and every weight has the same bits in both.
        steps: optimizer steps that were compared.
        loss_streamed: loss per step of the streamed run.
        loss_resident: loss per step of the run that holds everything in memory.
        max_weight_difference: largest absolute difference of two weights.
        num_weights: weights that were compared.
        differing: names of the parameters that differ, the largest difference first.
        digest_streamed: SHA-256 of all weights of the streamed run, by name, as hexadecimal text.
        digest_resident: the same of the resident run.
        plan_id: of the plan that the streamed run followed, see `outsize.planner.search.step_plan.Plan`.
    """

    equal: bool
    steps: int
    loss_streamed: list[float]
    loss_resident: list[float]
    max_weight_difference: float
    num_weights: int = 0
    differing: list[str] = field(default_factory=list)
    digest_streamed: str = ""
    digest_resident: str = ""
    plan_id: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return all attributes, ready for JSON."""
        return asdict(self)


HEARTBEAT = "heartbeat.jsonl"


class Telling:
    """Writes what tells of a run: whatever becomes of that does not end what trains.

    Args:
        announce: told once of each kind of thing that could not be written.

    Attributes:
        num_failed: writes that failed so far.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._told: set[str] = set()
        self.num_failed = 0

    def tell(self, what: str, write: Callable[[], object]) -> bool:
        """Call ``write``, and count where it fails; returns whether it went well. ``what`` is its kind, for people."""
        try:
            write()
        except (OSError, StorageError) as error:
            self.num_failed += 1
            if what not in self._told:
                self._told.add(what)
                self._announce(f"warning: {what} cannot be told, and the run goes on: {error}")
            return False
        return True


class Heartbeat(Closing):
    """Appends to the heartbeat of a run directory; a context manager. A half line that is there already is ended.

    Args:
        run_dir: of the run.
        announce: told once where a line cannot be written.

    Attributes:
        telling: counts those, and what else cannot be told of the run.

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(self, run_dir: Path, announce: Callable[[str], None]) -> None:
        self._path = run_dir / HEARTBEAT
        self.telling = Telling(announce)
        try:
            self._is_torn = _ends_within_a_line(self._path)
            self._file = files.open_binary(self._path, "a", buffered=False)
        except OSError as error:
            raise explain(error, f"write {self._path}") from error

    def beat(self, record: StepRecord) -> None:
        """Write one record, with the schema's version; one that cannot be written is counted."""
        line: dict[str, Any] = {"schema": SCHEMA_VERSION, **record.to_dict()}
        # NaN and infinity are not JSON; a missing number is null.
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in line.items()
        }
        text = json.dumps(clean, allow_nan=False) + "\n"
        self.telling.tell("a line of the heartbeat", lambda: self._write(text.encode()))

    def _write(self, line: bytes) -> None:
        """Write a line; what is written of one that fails is ended before the next one."""
        left = memoryview(b"\n" + line if self._is_torn else line)
        self._is_torn = True
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise explain(error, f"write {self._path}") from error
        self._is_torn = False

    def close(self) -> None:
        """Close the file; idempotent."""
        with contextlib.suppress(OSError):
            self._file.close()


def _ends_within_a_line(path: Path) -> bool:
    """Whether a file ends with half a line, as one that was cut off does."""
    if not path.is_file():
        return False
    with files.open_binary(path, "r") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, see `write_whole`."""
    write_whole(path, json.dumps(content, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that it is there whole or not at all, after a loss of power too.

    Raises:
        StorageError: it cannot be written; what was there before still is.
    """
    try:
        files.write_whole(path, text)
    except OSError as error:
        raise explain(error, f"write {path}") from error
