"""Read the heartbeat of a run into columns, once and then as it grows, and make series of points from them.

A line is some kilobytes and a run may have 50,000 of them, so lines are not kept: each is taken apart when it is read.
A step that was repeated after a crash counts once, as it ended the last time. The other files of a run directory, read
as far as they are there; a report is made of whatever a run has left.
"""

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outsize.doctor.run_record import KEPT_LINES
from outsize.errors import ConfigError
from outsize.planner.program.program import op_or_text
from outsize.planner.simulate.simulator import Event, Timeline
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
_READ = ("config.yaml", "plan.json", "prediction.json", "run.json", "timeline.json")


def empty_files(directory: Path) -> list[Path]:
    """Return the files of a run that have no bytes, as a loss of power leaves them: they count as absent."""
    paths = [directory / name for name in _READ]
    return [path for path in paths if path.is_file() and not path.stat().st_size]


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


# A chart is some 1,000 pixels wide; two points for each bucket of two pixels.
MOST_BUCKETS = 500
STACK_BUCKETS = 250
_SMOOTHED_PARTS = 100

Point = tuple[float, float]


def min_max(xs: Sequence[float], ys: Sequence[float | None], most_buckets: int = MOST_BUCKETS) -> list[Point]:
    """Return points of a curve, those of least and greatest value in each bucket, in order.

    So a spike of one step in 50,000 stays visible, which a mean or every n-th point would lose.

    Args:
        xs: ascending.
        ys: of the same length; None and what is not finite leaves a point out.
        most_buckets: at most twice as many points are returned, besides the first and the last.
    """
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None and math.isfinite(y)]
    if len(points) <= 2 * most_buckets:
        return points
    extremes: list[Point] = [points[0]]
    for start, end in _buckets(len(points), most_buckets):
        bucket = range(start, end)
        low, high = min(bucket, key=lambda i: points[i][1]), max(bucket, key=lambda i: points[i][1])
        extremes += [points[i] for i in sorted({low, high})]
    extremes.append(points[-1])
    return list(dict.fromkeys(extremes))


def means(
    xs: Sequence[float], rows: Sequence[Sequence[float]], most_buckets: int = STACK_BUCKETS
) -> tuple[list[float], list[list[float]]]:
    """Return the last ``x`` and the mean of each row in every bucket, of as many buckets as asked for at most.

    It is for shares of a step, which are stacked and have to add up.

    Args:
        xs: ascending.
        rows: values by row, each as long as ``xs``.
        most_buckets: of the result.
    """
    count = min(len(xs), most_buckets)
    spans = _buckets(len(xs), count) if count else []
    return (
        [xs[end - 1] for _, end in spans],
        [[sum(row[start:end]) / (end - start) for start, end in spans] for row in rows],
    )


def smoothed(ys: Sequence[float | None]) -> list[float | None]:
    """Return the mean of a curve over a hundredth of its length around each point; None stays None.

    Towards both ends the window narrows with the room that is left on its shorter side, so that no end lags behind.
    """
    sums, counts = [0.0], [0]
    is_finite = [y is not None and math.isfinite(y) for y in ys]
    for y, is_known in zip(ys, is_finite, strict=True):
        sums.append(sums[-1] + (y or 0.0) if is_known else sums[-1])
        counts.append(counts[-1] + is_known)
    reach = max(1, len(ys) // _SMOOTHED_PARTS // 2)
    means: list[float | None] = []
    for index, is_known in enumerate(is_finite):
        half = min(reach, index, len(ys) - 1 - index)
        start, end = index - half, index + half + 1
        means.append((sums[end] - sums[start]) / (counts[end] - counts[start]) if is_known else None)
    return means


def _buckets(length: int, count: int) -> list[tuple[int, int]]:
    """Cut ``length`` into ``count`` ranges of nearly the same size."""
    edges = [length * index // count for index in range(count + 1)]
    return list(itertools.pairwise(edges))


# Curves of a page: key, heading, unit, column, and whether the axis begins at zero.
CURVES: Sequence[tuple[str, str, str, str, bool]] = (
    ("loss", "Loss", "nats", "loss", False),
    ("eval_loss", "Evaluation loss", "nats", "eval_loss", False),
    ("tokens_per_s", "Throughput", "tokens/s", "tokens_per_s", True),
    ("seconds", "Step time", "s", "seconds", True),
    ("grad_norm", "Gradient norm", "", "grad_norm", True),
    ("lr", "Learning rate", "", "lr", True),
    ("mfu", "MFU", "share", "mfu", True),
)
RATES: Sequence[tuple[str, str]] = (
    ("bytes_up", "to the device"),
    ("bytes_down", "from the device"),
    ("bytes_read", "from disk"),
    ("bytes_written", "to disk"),
)
# Curves that get a smooth one beside them, in runs of so many steps.
_NOISY, _SMOOTHED_FROM = ("loss", "tokens_per_s", "seconds", "grad_norm"), 60
# Digits that a picture can show.
_SIGNIFICANT = 5


def curves(history: History) -> list[dict[str, Any]]:
    """Return the curves of a page; those without a number are left out."""
    lines = []
    for key, heading, unit, column, zero in CURVES:
        values = history.columns[column]
        points = _points(min_max(history.steps, values))
        if points:
            curve = {"key": key, "heading": heading, "unit": unit, "zero": zero, "points": points}
            if column in _NOISY and len(values) >= _SMOOTHED_FROM:
                curve["smooth"] = _points(min_max(history.steps, smoothed(values)))
            lines.append(curve)
    return lines


def rates(history: History) -> list[dict[str, Any]]:
    """Return bytes per second on the wire, over whole steps; directions in which nothing moved are left out."""
    lines = []
    for column, name in RATES:
        sizes = [value or 0.0 for value in history.columns[column]]
        if any(sizes):
            seconds = [value or 0.0 for value in history.columns["seconds"]]
            steps, (moved, took) = means(history.steps, [sizes, seconds])
            points = [(step, size / s) for step, size, s in zip(steps, moved, took, strict=True) if s]
            lines.append({"name": name, "points": _points(points)})
    return lines


def memory(history: History, plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return bytes by tier over time, with the budget; the process beside them."""
    names = list(dict.fromkeys(name for tiers in history.tiers for name in tiers))
    newest = history.recent[-1].get("tiers", {}) if history.recent else {}
    lines = [
        {
            "name": name,
            "points": _points(min_max(history.steps, [tiers.get(name) for tiers in history.tiers])),
            "budget_bytes": newest.get(name, {}).get("budget_bytes"),
            "high_water_bytes": newest.get(name, {}).get("high_water_bytes"),
            "classes": plan.get("memory_bytes", {}).get(name.partition(":")[0], {}),
        }
        for name in names
    ]
    rss = _points(min_max(history.steps, history.columns["rss_bytes"]))
    if rss:
        lines.append({"name": "process", "points": rss, "high_water_bytes": history.last("peak_rss_bytes")})
    return lines


def shares(history: History) -> dict[str, Any]:
    """Return shares of a step by cause over time, compute first and then the largest, as means over buckets."""
    totals: defaultdict[str, float] = defaultdict(float)
    for of_step in history.shares:
        for cause, share in of_step.items():
            totals[cause] += share
    causes = sorted(totals, key=lambda cause: (cause != COMPUTE, -totals[cause]))
    rows = [[of_step.get(cause, 0.0) for of_step in history.shares] for cause in causes]
    steps, averaged = means(history.steps, rows)
    return {"steps": steps, "causes": causes, "rows": [[rounded(v) for v in row] for row in averaged]}


def _points(points: Sequence[tuple[float, float]]) -> list[list[float]]:
    return [[x, rounded(y)] for x, y in points]


def rounded(value: float) -> float:
    """Return a number with the digits that a picture can show."""
    return float(f"{value:.{_SIGNIFICANT}g}")
