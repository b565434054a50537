"""From what short sequences took to what long ones will take: the bytes alive at each op, as functions of the length.

The bytes alive at one op are a polynomial of second degree in the length of a sequence (attention without a fused
kernel is quadratic), so three lengths determine it. Their peak is no polynomial: for another length it is at another
op. So every op is extrapolated by itself, and the largest counts. Where the lengths did not run the same ops (a loop
over chunks or over the experts that were chosen) there is only the peak to go by.
"""

from collections.abc import Sequence
from functools import cache
from math import prod

Trace = tuple[int, ...]
"""Bytes alive, in the order of the ops that took some."""

SHORT_LENGTHS = (64, 128, 256)


def trial_lengths(seq_len: int, num_sequences: int) -> tuple[int, ...]:
    """Return the lengths to run: the real one where it is short, and more where several sequences are asked for."""
    if seq_len > SHORT_LENGTHS[-1]:
        return SHORT_LENGTHS
    return (seq_len,) if num_sequences == 1 or seq_len < 4 else (seq_len // 4, seq_len // 2, seq_len)


@cache
def extrapolate(
    lengths: tuple[int, ...], traces: tuple[Trace, ...], length: int, num_sequences: int = 1
) -> int:
    """Return the most bytes alive for ``num_sequences`` sequences of ``length``.

    What does not depend on the length (gradients of weights) is there once, the rest for each sequence.

    Args:
        lengths: what was measured, ascending.
        traces: for each of them, with one sequence.
        length: what is asked for.
        num_sequences: sequences at once.
    """
    if len({len(trace) for trace in traces}) == 1:
        columns: list[tuple[int, ...]] = list(zip(*traces, strict=True))
    else:
        columns = [tuple(max(trace, default=0) for trace in traces)]
    return max((_at(lengths, column, length, num_sequences) for column in columns), default=0)


def _at(lengths: tuple[int, ...], values: Sequence[int], length: int, num_sequences: int) -> int:
    if len(lengths) == 1:
        return max(values[0], 0) * num_sequences
    whole, fixed = _through(lengths, values, length), _through(lengths, values, 0)
    slope = (values[-1] - values[-2]) / (lengths[-1] - lengths[-2])
    straight = values[-1] + slope * (length - lengths[-1])
    if (
        straight > whole
    ):  # a curve that flattens has reached a window or is noise: it does not go on to flatten
        whole, fixed = straight, values[-1] - slope * lengths[-1]
    fixed = min(max(fixed, 0.0), whole)
    return max(round(fixed + (whole - fixed) * num_sequences), 0)


def _through(xs: tuple[int, ...], ys: Sequence[int], x: int) -> float:
    """Value at ``x`` of the polynomial through the points."""
    return sum(weight * y for weight, y in zip(_weights(xs, x), ys, strict=True))


@cache
def _weights(xs: tuple[int, ...], x: int) -> tuple[float, ...]:
    """Lagrange's weights of the values at ``xs`` in the value at ``x``."""
    return tuple(prod((x - other) / (own - other) for other in xs if other != own) for own in xs)
