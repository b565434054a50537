"""The heartbeat of a run as columns: read once, and from then on only what has been added since.

A line is some kilobytes and a run may have 50,000 of them, so lines are not kept: each is taken apart when it is
read. A step that was repeated after a crash counts once, as it ended the last time.

The other files of a run directory, read as far as they are there; a report is made of whatever a run has left.
"""

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outsize.doctor.run_record import KEPT_LINES
from outsize.errors import ConfigError
from outsize.planner.program.program import op_or_text
from outsize.planner.simulate.timeline import Event, Timeline
from outsize.telemetry.run_reading import lines_of, read_mapping, step_of
from outsize.telemetry.writers import shares_waited

HEARTBEAT = "heartbeat.jsonl"
# Fields of a line that become columns as they are.
FIELDS = (
    "time",
    "loss",
    "eval_loss",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "tokens",
    "seconds",
    "mfu",
    "rss_bytes",
    "peak_rss_bytes",
    "bytes_up",
    "bytes_down",
    "bytes_read",
    "bytes_written",
    "skipped_steps",
)
COMPUTE = "compute"


class History:
    """Steps of a heartbeat file, as columns.

    Attributes:
        num_broken: lines that tell of no step: half ones, of a run that was cut off, or of something else.
        steps: numbers of the steps, ascending.
        columns: values by field; None where a line does not have it.
        shares: of each step, by what compute lanes did or waited for, 0 to 1; from schema 4 on.
        tiers: bytes used, by tier.
        recent: the last lines, whole, as doctor wants them: with those of steps that were repeated.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / HEARTBEAT
        self._offset = 0
        self._first_broken = self._line_number = 0
        self.num_broken = 0
        self.steps: list[int] = []
        self.columns: dict[str, list[float | None]] = {name: [] for name in FIELDS}
        self.shares: list[dict[str, float]] = []
        self.tiers: list[dict[str, int]] = []
        self.recent: deque[Mapping[str, Any]] = deque(maxlen=KEPT_LINES)

    def advance(self) -> int:
        """Read what was added since the last call, and return how many steps that was.

        Raises:
            ConfigError: there is no heartbeat, or what is in it are no steps, none of them.
        """
        count = 0
        for line in lines_of(self._path, self._offset):
            if not line.endswith(b"\n"):
                break  # being written
            self._offset += len(line)
            self._line_number += 1
            count += self._take(line)
        if self.num_broken and not self.steps:
            raise ConfigError(
                f"{self._path}, line {self._first_broken}: not a step of a run, as all others; take them out"
            )
        return count

    def was_replaced(self) -> bool:
        """Whether the file is shorter than what was read of it, and so another one."""
        return self._path.exists() and self._path.stat().st_size < self._offset

    def last(self, name: str) -> float | None:
        """Return the newest value of a column that is one."""
        return next((value for value in reversed(self.columns[name]) if value is not None), None)

    def _take(self, line: bytes) -> bool:
        """Take a line apart; returns whether it tells of a step."""
        step = step_of(line)
        if step is None:
            self.num_broken += 1
            self._first_broken = self._first_broken or self._line_number
            return False
        number, seconds = step["step"], step["seconds"]
        while self.steps and self.steps[-1] >= number:
            self._drop()
        self.steps.append(number)
        for name, column in self.columns.items():
            value = step.get(name)
            column.append(float(value) if isinstance(value, int | float) else None)
        before = self.shares[-1] if self.shares else {}
        self.shares.append(shares_of(step, seconds) or before)  # waits are booked in one of several steps
        self.tiers.append({name: tier["used_bytes"] for name, tier in step.get("tiers", {}).items()})
        self.recent.append(step)
        return True

    def _drop(self) -> None:
        """Forget the newest step, which was repeated."""
        self.steps.pop()
        for column in self.columns.values():
            column.pop()
        self.shares.pop()
        self.tiers.pop()


def shares_of(step: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Return what share of a step compute lanes worked, and waited by cause, on the mean over workers."""
    waits = step.get("waits_s", {})
    if not waits or seconds <= 0:
        return {}
    shares = shares_waited(waits, seconds)
    return {COMPUTE: max(0.0, 1 - sum(shares.values())), **shares}


# Ops of a timeline that a page holds; a step of more loses its shortest ones, and says so.
MOST_OPS = 30_000


def read_timeline(path: Path) -> Timeline | None:
    """Return the timeline that `html_page.to_chrome` wrote; None where there is none, in seconds from its first event.

    Raises:
        ConfigError: it is not a trace.
    """
    trace = read_mapping(path)
    if not trace:
        return None
    try:
        events = trace["traceEvents"]
        names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
        read = tuple(
            Event(
                lane=names[e["tid"]],
                op=op_or_text(e["name"]),
                start_s=e["ts"] / 1e6,
                end_s=(e["ts"] + e["dur"]) / 1e6,
                waited_s=e["args"]["waited_us"] / 1e6,
                waited_for=op_or_text(text) if (text := e["args"].get("waited_for")) else None,
            )
            for e in events
            if e["ph"] == "X"
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{path}: not a timeline that outsize wrote; without the file the rest is told"
        ) from error
    return Timeline(read)
