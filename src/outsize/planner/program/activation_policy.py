"""What becomes of what a backward needs of its forward: how much of it is kept, and where it waits.

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

from collections.abc import Mapping, Sequence
from enum import StrEnum

from outsize.planner.program.program import Kind


class Extent(StrEnum):
    """How much of what a backward needs is kept."""

    ATTENTION = "attention"
    PRODUCTS = "products"
    WHOLE = "whole"


class Choice(StrEnum):
    """What becomes of it; the values are those of ``memory.activations``."""

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
