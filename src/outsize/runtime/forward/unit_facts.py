"""Facts about units that trials measure: recompute needs, side effects, FLOPs. No torch."""

from dataclasses import dataclass
from typing import NamedTuple


class Needed(NamedTuple):
    """What a unit's backward needs of its forward.

    Attributes:
        num_saved: tensors that autograd saves.
        enter_at: of these, how many have been saved before the last operation that saves any.
        in_parts: whether what an MLP in parts makes is left out.
    """

    num_saved: int
    enter_at: int
    in_parts: bool = False


@dataclass(frozen=True, slots=True)
class SideEffects:
    """What units do besides returning tensors.

    Attributes:
        state: units that change their state.
        outlets: those of them that leave tensors with a history there.
        stashes: units whose graph reads weights that autograd has not saved: it cannot wait for its backward
            while other weights come to lie in their place.
        shared: unit and position of each of its inputs that others use as well.
        changed: unit and position of each of its inputs that code changes in place behind it.
        constants: unit and position of each tensor that it returns that has no gradient though it could.
        crosses: the name of something by which code between units takes values past a unit, see `CrossedState`;
            empty for nothing.
    """

    state: frozenset[int] = frozenset()
    outlets: frozenset[int] = frozenset()
    stashes: frozenset[int] = frozenset()
    shared: frozenset[tuple[int, int]] = frozenset()
    changed: frozenset[tuple[int, int]] = frozenset()
    constants: frozenset[tuple[int, int]] = frozenset()
    crosses: str = ""

    def __or__(self, other: "SideEffects") -> "SideEffects":
        """Return what either says."""
        return SideEffects(
            self.state | other.state,
            self.outlets | other.outlets,
            self.stashes | other.stashes,
            self.shared | other.shared,
            self.changed | other.changed,
            self.constants | other.constants,
            self.crosses or other.crosses,
        )


NO_EFFECTS = SideEffects()


class Yield(NamedTuple):
    """What operations of a unit return, in one forward.

    Attributes:
        num_bytes: of the memory that they return.
        flops: that computing them takes, a multiply-add counting two.
    """

    num_bytes: int
    flops: int


class Yields(NamedTuple):
    """What may be kept of a unit's forward.

    Attributes:
        attention: of its attention.
        products: of its attention and of those products that its backward needs.
        num_products: how many these products are, the first ones.
    """

    attention: Yield
    products: Yield
    num_products: int


class UnitFlops(NamedTuple):
    """FLOPs of a unit for one sequence, a multiply-add counting two.

    Attributes:
        forward: of its forward.
        needed: of as much of it as its backward needs.
        gradient: of its backward.
        routed: of its forward, those of tokens with the experts that they visit.
        moved: elements that its forward's products of tokens with weights read and return, those of experts left out.
        routed_moved: the same of experts.
        low_rank: the same of products that are not worth keeping, as of adapters.
    """

    forward: float = 0
    needed: float = 0
    gradient: float = 0
    routed: float = 0
    moved: float = 0
    routed_moved: float = 0
    low_rank: float = 0
