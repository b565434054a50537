"""Fewer points for the same picture.

Curves keep the least and the greatest point of each of some hundred buckets of equal width (min-max): a spike of one
step in 50,000 stays visible, which a mean or every n-th point would lose. Shares of a step are means over a bucket,
since they are stacked and have to add up.
"""

import itertools
import math
from collections.abc import Sequence

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
    kept: list[Point] = [points[0]]
    for start, end in _buckets(len(points), most_buckets):
        bucket = range(start, end)
        low, high = min(bucket, key=lambda i: points[i][1]), max(bucket, key=lambda i: points[i][1])
        kept += [points[i] for i in sorted({low, high})]
    kept.append(points[-1])
    return list(dict.fromkeys(kept))


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
    known = [y is not None and math.isfinite(y) for y in ys]
    for y, is_known in zip(ys, known, strict=True):
        sums.append(sums[-1] + (y or 0.0) if is_known else sums[-1])
        counts.append(counts[-1] + is_known)
    reach = max(1, len(ys) // _SMOOTHED_PARTS // 2)
    found: list[float | None] = []
    for index, is_known in enumerate(known):
        half = min(reach, index, len(ys) - 1 - index)
        start, end = index - half, index + half + 1
        found.append((sums[end] - sums[start]) / (counts[end] - counts[start]) if is_known else None)
    return found


def _buckets(length: int, count: int) -> list[tuple[int, int]]:
    """Cut ``length`` into ``count`` ranges of nearly the same size."""
    edges = [length * index // count for index in range(count + 1)]
    return list(itertools.pairwise(edges))
