"""Which unit lies in which slot when: an offline choice, since the order of visits is known.

A *visit* is a run of compute ops of one unit: with N units there are N visits down and up to N-1 back up. A
unit that still lies in a slot is used again without a LOAD; a unit is visited at most twice in a round, so it is loaded
at most twice in one.

The slot of a missing unit is the one whose LOAD can start early enough for the prefetch depth, looking one
depth ahead so that a unit with only one slot to go to finds it free; among these, the one whose occupant is
needed again farthest in the future (Belady's rule, optimal in misses); then the smallest.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Stay:
    """A unit's stay in a slot.

    Attributes:
        unit: the unit.
        slot: where it lies.
        load_visit: the LOAD comes before the first op of this visit.
        last_visit: the FREE comes after the last op of this visit.
    """

    unit: int
    slot: int
    load_visit: int
    last_visit: int


class _Slot:
    """A slot during the sweep over the visits."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.unit: int | None = None
        self.load_visit = 0
        self.last_visit = -1


def assign_slots(
    visits: Sequence[int],
    weight_bytes: Sequence[int],
    slot_bytes: Sequence[int],
    depth: int,
    own: Mapping[int, int] = MappingProxyType({}),
) -> list[Stay]:
    """Return the stays of units in slots, in the order of the visits that begin them.

    Args:
        visits: unit of each visit.
        weight_bytes: bytes by unit; a unit of 0 bytes needs no slot.
        slot_bytes: sizes of the slots that units share; every unit must fit one.
        depth: how many visits ahead a LOAD should start.
        own: the slots, behind those, of units that stay from their first visit to their last.
    """
    slots = [_Slot(size) for size in (*slot_bytes, *[0] * len(own))]
    needed = [0 if unit in own else weight_bytes[unit] for unit in visits]
    stays: dict[int, Stay] = {}  # by the visit that begins the stay, since they end in another order
    begun: dict[int, int] = {}
    uses: defaultdict[int | None, list[int]] = defaultdict(list)
    for visit, unit in enumerate(visits):
        uses[unit].append(visit)

    def end(index: int) -> None:
        slot = slots[index]
        if slot.unit is not None:
            stays[begun[index]] = Stay(slot.unit, index, slot.load_visit, slot.last_visit)

    for visit, unit in enumerate(visits):
        if weight_bytes[unit] == 0:
            continue
        index = own.get(unit, next((i for i, slot in enumerate(slots) if slot.unit == unit), None))
        if index is None:
            index = _choose(slots, uses, needed, visit, depth)
        if slots[index].unit != unit:
            end(index)
            begun[index] = visit
            slots[index].unit = unit
            slots[index].load_visit = max(visit - depth, slots[index].last_visit + 1, 0)
        slots[index].last_visit = visit
    for index in range(len(slots)):
        end(index)
    return [stays[visit] for visit in sorted(stays)]


def _choose(
    slots: list[_Slot], uses: Mapping[int | None, list[int]], needed: list[int], visit: int, depth: int
) -> int:
    """Return the index of the slot that the unit of ``visit`` is loaded into; ``uses`` are the visits of each unit."""

    def fits(size: int) -> list[int]:
        return [i for i, slot in enumerate(slots) if slot.size_bytes >= size]

    # The next visit soon to come that has only one slot to go to.
    narrow = next(
        (v for v in range(visit + 1, min(visit + depth + 1, len(needed))) if len(fits(needed[v])) == 1),
        None,
    )

    def cost(index: int) -> tuple[int, bool, float, int, int]:
        slot = slots[index]
        late = max(0, slot.last_visit + 1 - (visit - depth))
        taken_soon = narrow is not None and fits(needed[narrow]) == [index]
        if narrow is not None and taken_soon:
            late += max(0, visit + 1 - (narrow - depth))
        later = uses.get(slot.unit, [])
        at = bisect_left(later, visit)
        next_use = later[at] if at < len(later) else inf
        return late, taken_soon, -next_use, slot.size_bytes, index

    return min(fits(needed[visit]), key=cost)
