"""What changes over a run, as points of a picture: curves, rates, memory, shares of a step.

Fewer points for the same picture.

Curves keep the least and the greatest point of each of some hundred buckets of equal width (min-max): a spike of one
step in 50,000 stays visible, which a mean or every n-th point would lose. Shares of a step are means over a bucket,
since they are stacked and have to add up.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from outsize.reporting.history import COMPUTE, History

# A chart is some 1,000 pixels wide; two points for each bucket of two pixels.
MOST_BUCKETS = 500
STACK_BUCKETS = 250
_SMOOTHED_PARTS = 100

Point = tuple[float, float]


def min_max(xs: Sequence[float], ys: Sequence[float | None], most_buckets: int = MOST_BUCKETS) -> list[Point]:
    """Return points of a curve, those of least and greatest value in each bucket, in order.

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
