"""Latency and bandwidth of a link from the times of copies of many sizes. Arithmetic only."""

import statistics
from collections.abc import Iterator, Mapping
from itertools import combinations

from outsize.hardware.readings import Record


class LinkFit(Record):
    """``latency_s + num_bytes / bytes_per_s``, and how far copies lie from it, as shares of their time.

    Attributes:
        latency_s: fixed cost of a copy.
        bytes_per_s: rate per direction beyond it.
        residual_median: over the sizes that the fit has seen.
        residual_max: the worst of them.
        held_out_median: over sizes that it has not seen; None where there are none.
        held_out_max: the worst of them.
    """

    latency_s: float
    bytes_per_s: float
    residual_median: float
    residual_max: float
    held_out_median: float | None
    held_out_max: float | None

    def copy_s(self, num_bytes: int) -> float:
        """Return the predicted time of a copy in seconds."""
        return self.latency_s + num_bytes / self.bytes_per_s


def fit_link(seconds_by_size: Mapping[int, float], held_out: Mapping[int, float] | None = None) -> LinkFit:
    """Fit ``latency + num_bytes / rate`` so that the *relative* errors have the least sum of absolute values.

    With absolute errors the largest copy alone would set both, and a copy of 4 KB be off by its whole time. Squares
    would let one disturbed size bend the line. Some best line of this kind runs through two of the points, or through
    one and the origin where a latency would be negative, so all of them are tried.

    Args:
        seconds_by_size: time of a copy by its bytes, at least two sizes.
        held_out: the same for sizes that only judge the fit.

    Raises:
        ValueError: fewer than two sizes, or times that are not above zero.
    """
    if len(seconds_by_size) < 2 or min(seconds_by_size.values()) <= 0:
        raise ValueError(f"a line needs two sizes and times above zero, not {dict(seconds_by_size)}")

    def errors(line: tuple[float, float], times: Mapping[int, float]) -> list[float]:
        return [abs(line[0] + size * line[1] - seconds) / seconds for size, seconds in times.items()]

    best = min(_lines(seconds_by_size), key=lambda line: sum(errors(line, seconds_by_size)))
    seen, unseen = errors(best, seconds_by_size), errors(best, held_out or {})
    return LinkFit(
        latency_s=best[0],
        bytes_per_s=1 / best[1],
        residual_median=statistics.median(seen),
        residual_max=max(seen),
        held_out_median=statistics.median(unseen) if unseen else None,
        held_out_max=max(unseen) if unseen else None,
    )


def _lines(times: Mapping[int, float]) -> Iterator[tuple[float, float]]:
    """Yield latency and seconds per byte of every line that may be the best."""
    yield from ((0.0, seconds / size) for size, seconds in times.items())
    for (size, seconds), (larger, later) in combinations(sorted(times.items()), 2):
        s_per_byte = (later - seconds) / (larger - size)
        latency_s = seconds - size * s_per_byte
        if s_per_byte > 0 and latency_s >= 0:
            yield latency_s, s_per_byte
