"""What changes over a run, as points of a picture: curves, rates, memory, shares of a step."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from outsize.reporting.downsample import means, min_max, smoothed
from outsize.reporting.history import COMPUTE, History

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
    found = []
    for key, heading, unit, column, zero in CURVES:
        values = history.columns[column]
        points = _points(min_max(history.steps, values))
        if points:
            curve = {"key": key, "heading": heading, "unit": unit, "zero": zero, "points": points}
            if column in _NOISY and len(values) >= _SMOOTHED_FROM:
                curve["smooth"] = _points(min_max(history.steps, smoothed(values)))
            found.append(curve)
    return found


def rates(history: History) -> list[dict[str, Any]]:
    """Return bytes per second on the wire, over whole steps; directions in which nothing moved are left out."""
    found = []
    for column, name in RATES:
        sizes = [value or 0.0 for value in history.columns[column]]
        if any(sizes):
            seconds = [value or 0.0 for value in history.columns["seconds"]]
            steps, (moved, took) = means(history.steps, [sizes, seconds])
            points = [(step, size / s) for step, size, s in zip(steps, moved, took, strict=True) if s]
            found.append({"name": name, "points": _points(points)})
    return found


def memory(history: History, plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return bytes by tier over time, with the budget; the process beside them."""
    names = list(dict.fromkeys(name for tiers in history.tiers for name in tiers))
    newest = history.recent[-1].get("tiers", {}) if history.recent else {}
    found = [
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
        found.append({"name": "process", "points": rss, "high_water_bytes": history.last("peak_rss_bytes")})
    return found


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
