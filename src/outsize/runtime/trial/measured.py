"""Scale what trials took at short lengths to what a microbatch takes at long ones. No torch.

The bytes alive at one op are a polynomial of second degree in the length of a sequence (attention without a fused
kernel is quadratic), so three lengths determine it. Their peak is no polynomial: for another length it is at another
op. So every op is extrapolated by itself, and the largest counts. Where the lengths did not run the same ops (a loop
over chunks or over the experts that were chosen) there is only the peak to go by.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from math import prod
from operator import or_
from typing import Any, NamedTuple

from outsize.runtime.forward.unit_facts import Needed, SideEffects, UnitFlops, Yield, Yields

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

    What does not depend on the length (gradients of weights) is there once, the rest for each sequence; but not
    what two sequences have twice (patches of images), where a trace shows that.

    Args:
        lengths: what was measured, ascending.
        traces: for each of them, with one sequence; perhaps one more, of two sequences of the first length.
        length: what is asked for.
        num_sequences: sequences at once.
    """
    if len({len(trace) for trace in traces}) == 1:
        columns: list[tuple[int, ...]] = list(zip(*traces, strict=True))
    else:
        columns = [tuple(max(trace, default=0) for trace in traces)]
    return max((_at(lengths, column, length, num_sequences) for column in columns), default=0)


def _at(lengths: tuple[int, ...], values: Sequence[int], length: int, num_sequences: int) -> int:
    if len(values) > len(lengths):
        *values, two = values
        once = min(max(2 * values[0] - two, 0), values[0])
        return once + _at(lengths, [value - once for value in values], length, 1) * num_sequences
    if len(lengths) == 1:
        return max(values[0], 0) * num_sequences
    total, fixed = _through(lengths, values, length), _through(lengths, values, 0)
    slope = (values[-1] - values[-2]) / (lengths[-1] - lengths[-2])
    straight = values[-1] + slope * (length - lengths[-1])
    if (
        straight > total
    ):  # a curve that flattens has reached a window or is noise: it does not go on to flatten
        total, fixed = straight, values[-1] - slope * lengths[-1]
    fixed = min(max(fixed, 0.0), total)
    return max(round(fixed + (total - fixed) * num_sequences), 0)


def _through(xs: tuple[int, ...], ys: Sequence[int], x: int) -> float:
    """Value at ``x`` of the polynomial through the points."""
    return sum(weight * y for weight, y in zip(_weights(xs, x), ys, strict=True))


@cache
def _weights(xs: tuple[int, ...], x: int) -> tuple[float, ...]:
    """Lagrange's weights of the values at ``xs`` in the value at ``x``."""
    return tuple(prod((x - other) / (x_i - other) for other in xs if other != x_i) for x_i in xs)


@dataclass(frozen=True, slots=True)
class Flops:
    """What units compute for sequences of any length, by what they did for some.

    Attributes:
        lengths: of the sequences that were run, ascending; none where nothing is known.
        units: for each of them, what each unit computed for one sequence.
    """

    lengths: tuple[int, ...] = ()
    units: tuple[tuple[UnitFlops, ...], ...] = ()

    def of(self, sequences: int, seq_len: int) -> tuple[UnitFlops, ...]:
        """Return what each unit computes for ``sequences`` sequences of ``seq_len`` tokens."""
        if len(self.units) == 1:
            tokens = sequences * seq_len / self.lengths[0]
            return tuple(UnitFlops(*(one * tokens for one in unit)) for unit in self.units[0])

        def at(values: tuple[float, ...]) -> float:
            points = tuple((int(value),) for value in values)
            return float(sequences * extrapolate(self.lengths, points, seq_len))

        return tuple(UnitFlops(*map(at, zip(*unit, strict=True))) for unit in zip(*self.units, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes that one microbatch needs on the device.

    Attributes:
        boundary_bytes: per unit, what it receives and what must be kept for its backward.
        forward_bytes: per unit, the most alive during its forward, beyond its input.
        backward_bytes: per unit, the most alive during recompute and backward; for the last unit, of FB.
        saved_bytes: per unit, what its forward leaves alive for its backward besides its input and its output; 0 for
            the last where the loss is taken in chunks.
        output_bytes: what the model returns: logits, mostly.
        held_bytes: what the model's own code keeps from the first unit to the last: masks, position tables, glue.
        inputs_shared: whether an activation is an input of more than one unit, or the model returns it or its code uses
            it behind the unit, or a unit takes several, so that they stay on the device.
        side_bytes: of activations that carry gradients and that several units, or code behind them, use.
        plain_head: whether the model's loss is the cross-entropy of the head's own output, shifted by one token.
        shifted: whether the model's loss is of the next token, so that the first label of a sequence is no target.
        graph_matters: whether a unit computes other bits when it makes a graph, as with kernels that are chosen by
            whether a mask needs a gradient; then a forward must make one too, to be what a resident forward is.
        rest_users: units whose backward, with the code before them, adds to the gradient of a rest that trains.
        outside: names of parameters of units that the model's own code computes with outside of them.
        draws_random: whether units, or the code between them, draw random numbers.
        needed: by unit, how far its recompute has to go; for those that may end early.
        attention: per unit, what its attention returns; zeros for the last.
        products: per unit, the same of its attention and of those products that its backward needs.
        num_products: by unit, how many of its products that are; for those where lengths agree on it.
        num_saved: per unit, tensors that its forward saves for its backward.
        effects: what units do besides returning tensors.
        flops: of units, for any microbatch.
        num_sequences: of the microbatch.
        seq_len: tokens of each.
    """

    boundary_bytes: tuple[int, ...]
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    output_bytes: int
    held_bytes: int
    inputs_shared: bool
    side_bytes: int
    plain_head: bool
    shifted: bool
    graph_matters: bool
    rest_users: frozenset[int] = frozenset()
    outside: frozenset[str] = frozenset()
    draws_random: bool = True
    needed: Mapping[int, Needed] = field(default_factory=dict)
    attention: tuple[Yield, ...] = ()
    products: tuple[Yield, ...] = ()
    num_products: Mapping[int, int] = field(default_factory=dict)
    num_saved: tuple[int, ...] = ()
    effects: SideEffects = field(default_factory=SideEffects)
    flops: Flops = Flops()
    num_sequences: int = 1
    seq_len: int = 1


class Kept(NamedTuple):
    """What a unit's forward makes for its backward, at one length; see `Measured`."""

    num_bytes: int = 0
    needed: Needed | None = None
    yields: Yields = Yields(Yield(0, 0), Yield(0, 0), 0)
    num_saved: int = 0
    flops: UnitFlops = UnitFlops()


@dataclass(slots=True)
class Row:
    """What one forward over the units has noted, at one length; see `Measured`."""

    boundary: list[int]
    forward: list[Trace]
    backward: list[Trace]
    kept: list[Kept]
    held: int
    shared: bool
    plain: bool
    glue: int = 0
    side: int = 0
    output: int = 0
    chunk_tokens: tuple[int, ...] = ()
    chunk: tuple[Trace, ...] = ()
    shifted: bool = True
    graph_matters: bool = False
    rest_users: set[int] = field(default_factory=set)
    outside: set[str] = field(default_factory=set)
    random: bool = False
    effects: SideEffects = field(default_factory=SideEffects)


class KnownRows:
    """Notes of the passes of a trial, by a name for each size, so that none is run twice.

    Attributes:
        effects: by kind of unit, what is known of it besides what it returns.
    """

    def __init__(self) -> None:
        self.effects: dict[Any, Any] = {}
        self._noted: dict[str, list[Row]] = {}

    def get(self, name: str) -> list[Row] | None:
        """Return the notes of passes; None where they have not been run."""
        return self._noted.get(name)

    def put(self, name: str, rows: list[Row]) -> None:
        """Remember the notes of passes."""
        self._noted[name] = rows


def scale(
    rows: list[Row],
    lengths: tuple[int, ...],
    num_sequences: int,
    seq_len: int,
    chunk_tokens: int | None,
    full: Row | None = None,
) -> Measured:
    """Return what microbatches of ``num_sequences`` sequences of ``seq_len`` tokens need.

    Args:
        rows: one for each length that was run; perhaps one more, of two sequences of the first length.
        lengths: tokens of each.
        num_sequences: sequences per microbatch.
        seq_len: tokens per sequence.
        chunk_tokens: tokens per chunk of the loss; None for the model's own loss.
        full: of a pass over a microbatch itself, up to the last unit; None where there was none.
    """

    def at(values: Iterable[Trace]) -> int:
        return extrapolate(lengths, tuple(values), seq_len, num_sequences)

    def of_units(traces: Callable[[Row], list[Trace]]) -> list[int]:
        """Return the most bytes alive of each unit: as they were there, else by short lengths."""
        exact = [] if full is None else [max(trace, default=0) for trace in traces(full)]
        return [*exact, *(at(traces(row)[unit] for row in rows) for unit in range(len(exact), len(boundary)))]

    singles, kept_by_unit = rows[: len(lengths)], list(zip(*(row.kept for row in rows), strict=True))
    last = singles[-1]
    boundary = tuple(at((row.boundary[unit],) for row in rows) for unit in range(len(last.boundary)))
    backward = of_units(lambda row: row.backward)
    if chunk_tokens is not None and last.plain:
        count = min(num_sequences * seq_len, chunk_tokens)
        backward[-1] = extrapolate(last.chunk_tokens, last.chunk, count) + 3 * boundary[-1]
    backward[-1] += at((row.glue,) for row in rows)
    return Measured(
        boundary_bytes=boundary,
        forward_bytes=tuple(of_units(lambda row: row.forward)),
        backward_bytes=tuple(backward),
        saved_bytes=tuple(of_units(lambda row: [(one.num_bytes,) for one in row.kept])),
        output_bytes=at((row.output,) for row in rows),
        held_bytes=at((row.held,) for row in rows) if full is None else full.held,
        inputs_shared=rows[0].shared,
        side_bytes=at((row.side,) for row in rows),
        plain_head=rows[0].plain,
        shifted=rows[0].shifted,
        graph_matters=any(row.graph_matters for row in (rows if full is None else [*rows, full])),
        rest_users=frozenset().union(*(row.rest_users for row in rows)),
        outside=frozenset().union(*(row.outside for row in rows)),
        draws_random=any(row.random for row in rows),
        needed=_same_needs(rows, full),
        attention=tuple(_yield([one.yields.attention for one in unit], at) for unit in kept_by_unit),
        products=tuple(_yield([one.yields.products for one in unit], at) for unit in kept_by_unit),
        num_products=_same_counts(kept_by_unit),
        effects=reduce(or_, (row.effects for row in rows)),
        flops=Flops(lengths, tuple(tuple(one.flops for one in row.kept) for row in singles)),
        num_saved=tuple(max(one.num_saved for one in unit) for unit in kept_by_unit),
        num_sequences=num_sequences,
        seq_len=seq_len,
    )


def _yield(lengths: Sequence[Yield], at: Callable[[Iterable[Trace]], int]) -> Yield:
    return Yield(*(at((one[part],) for one in lengths) for part in range(2)))


def _same_counts(kept_by_unit: Sequence[Sequence[Kept]]) -> dict[int, int]:
    counts = enumerate({one.yields.num_products for one in unit} for unit in kept_by_unit)
    return {unit: counts_of.pop() for unit, counts_of in counts if len(counts_of) == 1}


def _same_needs(rows: list[Row], full: Row | None) -> dict[int, Needed]:
    """What recomputes of units need, where that is the same at all lengths."""
    needs = [[one.needed for one in row.kept] for row in rows]
    if full is not None:  # which has not met the last unit
        needs.append(
            [one.needed for one in full.kept] + [one.needed for one in rows[-1].kept[len(full.kept) :]]
        )
    return {
        unit: first
        for unit, (first, *others) in enumerate(zip(*needs, strict=True))
        if first is not None and all(other == first for other in others)
    }
