"""Stages of several workers, and what becomes of what a backward needs of its forward.

Workers are stateless, so a stage is not bound to one: the stages of a step are dealt out in turn, the cursor
continuing from round to round. A *round* takes some of the microbatches through all stages. Within it come the
forward stages, then the stage that is last in forward and first in backward, then the other backward stages.
Forward and backward are cut separately, since a backward with recompute takes about three times as long.

==========================  ==========================================================================================
choice                      between forward and backward of a unit
==========================  ==========================================================================================
``recompute``               nothing is kept but the unit's input; the backward runs the unit again
``keep-attention``          what its attention returned (output, log-sum-exp) stays on the device; the rest runs again
``keep-products``           what its attention and its products returned stays; only what lies between runs again
``keep``                    all that its backward needs stays; nothing runs again
``offload-attention``, …    the same three, but it leaves the device after the forward and comes back for the backward
==========================  ==========================================================================================

Per byte, an attention over a long sequence is dear to compute, products less so, and norms, activations and copies
cheap: so of the bytes that a forward makes for its backward less than a half saves nearly all that a recompute takes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import gcd

from outsize.planner.program.program import Kind

Span = tuple[int, int]
# Sets of slots and of accumulators that a worker may have, the fastest first: where memory is tight the larger of the
# two, which are fp32 gradients beside weights in half precision, gives up its second set first.
HALVES = ((2, 2), (2, 1), (1, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """How a step is cut and dealt out.

    Attributes:
        forward: units ``[first, end)`` of the stages that only run forward, in order, from unit 0.
        backward: units of the stages that run backward, in order, from the last unit down; the first of them
            runs its units forward as well.
        round_size: microbatches per round; the last round may be smaller.
        cursor: worker of the first stage.
        slot_halves: sets of slots that each worker has for a visit: with two, one fills while the other is used.
        accumulator_halves: the same of accumulators.
        overlaps: whether a round begins while the one before still ends, for which the room of two is set aside.
    """

    forward: tuple[Span, ...]
    backward: tuple[Span, ...]
    round_size: int
    cursor: int = 0
    slot_halves: int = 2
    accumulator_halves: int = 2
    overlaps: bool = True

    def __post_init__(self) -> None:
        if not {self.slot_halves, self.accumulator_halves} <= {1, 2}:
            raise ValueError("a worker has one set of places for a visit, or two")
        if not self.backward or self.round_size < 1 or self.cursor < 0:
            raise ValueError("there is a backward stage, a microbatch in a round, and a first worker")
        # Searches make thousands of these, of hundreds of stages: plain loops, and one look at each stage.
        joined, at = True, 0
        for first, end in self.forward:
            joined &= at == first < end
            at = end
        fused, top = self.backward[0]
        joined &= at == fused < top
        for first, end in self.backward[1:]:
            joined &= first < end == fused
            fused = first
        if not joined:
            raise ValueError(
                "every stage has a unit, they are consecutive, and the last forward one ends where the fused one begins"
            )

    @property
    def num_stages(self) -> int:
        """Stages of a round."""
        return len(self.forward) + len(self.backward)


def rounds_in_turn(num_stages: int, num_workers: int) -> int:
    """Return the number of rounds after which each stage is with the same worker again."""
    return num_workers // gcd(num_stages, num_workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """Run of a stage of a round on its worker.

    Attributes:
        worker: who runs it.
        units: ``[first, end)``.
        microbatches: of the round.
        forward: whether it runs forward.
        backward: whether it runs backward; the fused stage does both.
        round: number of the round.
    """

    worker: int
    units: Span
    microbatches: range
    forward: bool
    backward: bool
    round: int


def visits_of(
    stages: Stages, num_microbatches: int, num_workers: int, *, apart: bool = False
) -> Iterator[Visit]:
    """Yield the visits of a step in order.

    Args:
        stages: of the step.
        num_microbatches: of the step.
        num_workers: that stages are dealt out to.
        apart: whether the fused stage runs forward in one visit and backward in another, which somebody else begins.
    """
    turn = stages.cursor
    fused = stages.backward[0]
    ways = [(span, True, False) for span in stages.forward]
    ways += [(fused, True, False), (fused, False, True)] if apart else [(fused, True, True)]
    ways += [(span, False, True) for span in stages.backward[1:]]
    starts = range(0, num_microbatches, stages.round_size)
    for number, start in enumerate(starts):
        microbatches = range(start, min(start + stages.round_size, num_microbatches))
        for span, forward, backward in ways:
            yield Visit(
                worker=turn % num_workers,
                units=span,
                microbatches=microbatches,
                forward=forward,
                backward=backward,
                round=number,
            )
            turn += 1


def cursor_after(stages: Stages, num_microbatches: int, num_workers: int) -> int:
    """Return the worker that runs the first stage of the next step."""
    num_rounds = -(-num_microbatches // stages.round_size)
    return (stages.cursor + num_rounds * stages.num_stages) % num_workers


def spans_up(sizes: Sequence[int]) -> tuple[Span, ...]:
    """Return spans of ``sizes`` units from 0 up."""
    spans, at = [], 0
    for size in sizes:
        spans.append((at, at + size))
        at += size
    return tuple(spans)


def spans_down(sizes: Sequence[int], top: int) -> tuple[Span, ...]:
    """Return spans of ``sizes`` units from ``top`` down."""
    spans = []
    for size in sizes:
        spans.append((top - size, top))
        top -= size
    return tuple(spans)


def slots_for(stages: Stages, sizes: Sequence[int], *, only_backward: bool = False) -> tuple[int, ...]:
    """Return slots that hold any stage, twice where one half is filled while the other is used.

    Args:
        stages: of which any must fit.
        sizes: bytes by unit; a unit of 0 bytes needs no slot.
        only_backward: whether only backward stages count, as for accumulators.
    """
    spans = stages.backward if only_backward else (*stages.forward, *stages.backward)
    alike = {tuple(sizes[first:end]) for first, end in spans}
    held = [sorted(filter(None, of_span), reverse=True) for of_span in alike]
    deepest = max(map(len, held))
    half = tuple(max(sizes[j] for sizes in held if len(sizes) > j) for j in range(deepest))
    return half * (stages.accumulator_halves if only_backward else stages.slot_halves)


class Extent(StrEnum):
    """How much of what a backward needs is kept."""

    __hash__ = str.__hash__  # that of an Enum is no C: searches hash millions
    ATTENTION = "attention"
    PRODUCTS = "products"
    WHOLE = "whole"


class Choice(StrEnum):
    """What becomes of it; the values are those of ``memory.activations``."""

    __hash__ = str.__hash__
    RECOMPUTE = "recompute"
    KEEP_ATTENTION = "keep-attention"
    KEEP_PRODUCTS = "keep-products"
    KEEP = "keep"
    OFFLOAD_ATTENTION = "offload-attention"
    OFFLOAD_PRODUCTS = "offload-products"
    OFFLOAD = "offload"

    @property
    def extent(self) -> Extent | None:
        """How much is kept; None where nothing is."""
        return _EXTENTS[self]

    @property
    def leaves(self) -> bool:
        """Whether it leaves the device between forward and backward."""
        return self in _LEAVING

    @property
    def forward(self) -> Kind:
        """The op of the forward."""
        return FORWARDS[self.extent]


_LEAVING = frozenset({Choice.OFFLOAD_ATTENTION, Choice.OFFLOAD_PRODUCTS, Choice.OFFLOAD})
_EXTENTS: Mapping[Choice, Extent | None] = {
    Choice.RECOMPUTE: None,
    Choice.KEEP_ATTENTION: Extent.ATTENTION,
    Choice.KEEP_PRODUCTS: Extent.PRODUCTS,
    Choice.KEEP: Extent.WHOLE,
    Choice.OFFLOAD_ATTENTION: Extent.ATTENTION,
    Choice.OFFLOAD_PRODUCTS: Extent.PRODUCTS,
    Choice.OFFLOAD: Extent.WHOLE,
}
FORWARDS: Mapping[Extent | None, Kind] = {
    None: Kind.FORWARD,
    Extent.ATTENTION: Kind.FORWARD_ATTENTION,
    Extent.PRODUCTS: Kind.FORWARD_PRODUCTS,
    Extent.WHOLE: Kind.FORWARD_KEEP,
}
ON_DEVICE = {
    extent: choice for choice, extent in _EXTENTS.items() if not choice.leaves and extent is not None
}
OFFLOADED = {extent: choice for choice, extent in _EXTENTS.items() if choice.leaves and extent is not None}

# What may become of it where forward and backward of a unit are stages apart: a graph stays with its worker.
LEAVING_STAGES = frozenset({Choice.RECOMPUTE, Choice.OFFLOAD_ATTENTION, Choice.OFFLOAD_PRODUCTS})

KeptBytes = Mapping[Extent, Sequence[int]]
"""Bytes that forwards of each extent keep, by streamed unit, for one microbatch."""

Kept = tuple[tuple[Choice, ...], ...]
"""A choice for each streamed unit and each of its microbatches; empty where all is recomputed."""


def bytes_of(choice: Choice, unit: int, sizes: KeptBytes) -> int:
    """Return the bytes that a forward of ``unit`` keeps by ``choice``; 0 where ``sizes`` do not tell."""
    extent = choice.extent
    return sizes[extent][unit] if extent is not None and extent in sizes else 0


def everywhere(choice: Choice, units: Sequence[int], num_streamed: int, num_microbatches: int) -> Kept:
    """Return ``choice`` for all microbatches of ``units``; empty where that keeps nothing."""
    if choice is Choice.RECOMPUTE or not units:
        return ()
    return tuple(
        ((choice if unit in units else Choice.RECOMPUTE),) * num_microbatches for unit in range(num_streamed)
    )


def merged(one: Kept, other: Kept) -> Kept:
    """Merge two keep policies; ``one`` wins wherever it keeps something."""
    if not one or not other:
        return one or other
    return tuple(
        tuple(b if a is Choice.RECOMPUTE else a for a, b in zip(first, second, strict=True))
        for first, second in zip(one, other, strict=True)
    )
