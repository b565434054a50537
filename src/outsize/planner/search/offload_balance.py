"""Choose what of forwards stays for their backwards: on the device, offloaded as the link allows, or recomputed.

A step of long sequences computes for seconds on weights that took milliseconds to arrive: the link stands idle. What it
could carry meanwhile need not be computed again. So units offload what they make, most seconds saved per byte first, as
long as

* what goes down in the forward takes no longer than the forward computes,
* what comes up in the backward takes no longer than the backward still computes, and
* the tiers have room.

At most two inputs or kept parts are on their way out at once, so units that move more than they hide behind take turns
with such as offload nothing.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from math import inf

from outsize.planner.memory.memory_table import Demand
from outsize.planner.passes.slots import assign_slots
from outsize.planner.program.stages import (
    OFFLOADED,
    ON_DEVICE,
    Choice,
    Extent,
    Kept,
    Stages,
    bytes_of,
    everywhere,
    merged,
)
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.simulate.costs import UnitTimes
from outsize.planner.simulate.gpu_times import SharedRates

# Units and microbatches that are told apart one by one.
FINE = 64

Raise = tuple[int, Choice]
"""A unit that keeps more than before, and what it keeps then."""


def keep_order(layout: StepLayout, demand: Demand) -> list[Raise]:
    """Return what units may keep, the most seconds gained per byte first, each unit from less to more.

    What a unit keeps costs its bytes for each microbatch, from its forward to its backward, and gains the part of its
    recompute that it spares. All that is kept is there at once when the step turns around. So units go from keeping
    less to keeping more by seconds gained per byte, until the memory is used up; among equals the last ones first,
    since theirs is held for the shortest time.
    """
    raises = [
        (gain, unit, extent) for unit in layout.keepable for gain, extent in worthwhile_extents(demand, unit)
    ]
    # A unit gains less per byte the more it keeps, so that its own order survives.
    return [
        (unit, ON_DEVICE[extent]) for _, unit, extent in sorted(raises, key=lambda r: r[:2], reverse=True)
    ]


def worthwhile_extents(demand: Demand, unit: int) -> list[tuple[float, Extent]]:
    """Return how much of a unit is worth keeping, from less to more, and what each gains per byte over the one before.

    These are the corners of the upper hull of gains over bytes; between two of them, some microbatches take either.
    """
    sizes = demand.kept_bytes
    points = [
        (bytes_of(ON_DEVICE[e], unit, sizes), demand.spared_s(e, unit), e) for e in Extent if e in sizes
    ]
    # What takes no memory is always kept.
    free: list[tuple[float, Extent]] = []
    free += ((float("inf"), e) for size, _, e in points if not size and e is Extent.WHOLE)
    slopes_by_extent: list[tuple[float, Extent]] = []
    at_bytes, at_s = 0, 0.0
    while not free:
        slopes = [
            ((gain_s - at_s) / (size - at_bytes), size, gain_s, extent)
            for size, gain_s, extent in points
            if size > at_bytes and gain_s > at_s
        ]
        if not slopes:
            break
        slope, at_bytes, at_s, extent = max(slopes, key=lambda slope: slope[:3])
        slopes_by_extent.append((slope, extent))
    return slopes_by_extent or free


def kept_so_far(layout: StepLayout, order: Sequence[Raise], count: int) -> Kept:
    """Return what units keep where the first ``count`` of ``order`` are taken, microbatch by microbatch."""
    size = layout.round_size
    choices = [[Choice.RECOMPUTE] * size for _ in range(layout.num_streamed)]
    for rank, (unit, choice) in enumerate(order):
        for microbatch in range(min(max(count - rank * size, 0), size)):
            choices[unit][microbatch] = choice
    return tuple(map(tuple, choices))


def kept_at_the_turn(
    stages: Stages, num_streamed: int, num_microbatches: int, choice: Choice = Choice.KEEP
) -> Kept:
    """Return what stages can keep: of all units that turn around, one microbatch at a time."""
    turning = range(stages.backward[0][0], num_streamed - 1)
    return everywhere(choice, turning, num_streamed, num_microbatches)


def most_kept(layout: StepLayout, order: Sequence[Raise], fits: Callable[[Kept], bool]) -> Kept:
    """Return the most of ``order`` that ``fits``; empty where that is nothing."""
    low, high = 0, len(order) * layout.round_size  # what fits, and what may
    near = high // FINE  # of thousands, a percent more or less is not worth as long a search again
    while low + near < high:
        middle = (low + high + 1) // 2
        if fits(kept_so_far(layout, order, middle)):
            low = middle
        else:
            high = middle - 1
    return kept_so_far(layout, order, low) if low else ()


# Multiples of it, without their whole parts, lie evenly between 0 and 1 however many are taken (Weyl's sequence).
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRates:
    """What a worker does in a second, for choices that trade compute for bytes.

    Attributes:
        times: seconds of its units, for one microbatch.
        up_bytes_per_s: of its link, towards the device.
        down_bytes_per_s: away from it.
        home_up_bytes_per_s: of the home, towards all workers at once, the share of each.
        home_down_bytes_per_s: towards the home, likewise.
        shared: of what it shares with other workers.
        host_step_s: seconds of an optimizer step in host memory, for each byte of a gradient in fp32.
        update_s: the same of a step on the device.
        decode_s: seconds that decoding the frozen parts of each unit adds to its load; empty of none.
    """

    times: UnitTimes
    up_bytes_per_s: float
    down_bytes_per_s: float
    home_up_bytes_per_s: float = inf
    home_down_bytes_per_s: float = inf
    shared: SharedRates = field(default_factory=SharedRates)
    host_step_s: float = 0.0
    update_s: float = 0.0
    decode_s: tuple[float, ...] = ()

    @property
    def load_bytes_per_s(self) -> float:
        """At which weights come up."""
        return min(self.up_bytes_per_s, self.home_up_bytes_per_s)

    @property
    def store_bytes_per_s(self) -> float:
        """At which gradients go down."""
        return min(self.down_bytes_per_s, self.home_down_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Seconds of the lanes in the forward of a step, and in its backward.

    Attributes:
        forward_s: computing.
        forward_up_s: weights coming up meanwhile.
        forward_down_s: activations going down meanwhile.
        backward_s: computing.
        backward_up_s: weights and activations coming up meanwhile.
        backward_down_s: gradients going down meanwhile.
        steps_s: optimizer steps in host memory, beside the next forward where a norm is waited for.
        updates_s: those on the device.
        first_load_s: weights of the first unit coming up, before which nothing computes.
        clips: whether a norm is waited for.
    """

    forward_s: float
    forward_up_s: float
    forward_down_s: float
    backward_s: float
    backward_up_s: float
    backward_down_s: float
    steps_s: float = 0.0
    updates_s: float = 0.0
    first_load_s: float = 0.0
    clips: bool = False

    @property
    def compute_bound(self) -> bool:
        """Whether activations move no longer than what computes meanwhile."""
        return self.forward_down_s <= self.forward_s and self.backward_up_s <= self.backward_s

    @property
    def compute_s(self) -> float:
        """Seconds of a step that waits for the link until its first unit is there, and never again."""
        return self.first_load_s + self.forward_s + self.backward_s

    @property
    def step_s(self) -> float:
        """Seconds of a step whose lanes never wait for each other within a phase."""
        forward_s = max(self.first_load_s + self.forward_s, self.forward_up_s, self.forward_down_s)
        return forward_s + max(self.backward_s, self.backward_up_s, self.backward_down_s)

    @property
    def stepped_s(self) -> float:
        """The same with the optimizer."""
        steps_s = self.steps_s if self.clips else 0.0
        computing_s = self.first_load_s + self.forward_s + self.updates_s
        forward_s = max(computing_s, self.forward_up_s, self.forward_down_s, steps_s)
        step_s = forward_s + max(self.backward_s, self.backward_up_s, self.backward_down_s)
        return max(step_s, self.steps_s)


def phases(layout: StepLayout, demand: Demand, rates: UnitRates) -> Phases:
    """Return what the lanes do in a step of ``layout``, over all its rounds."""
    count, rounds = layout.num_microbatches, layout.num_rounds
    times, sizes = rates.times, demand.kept_bytes
    part = count / layout.round_size  # of which a round is one: the last may be smaller
    cells = [
        (unit, choice, often)
        for unit in range(layout.first_backward, layout.last)
        for choice, often in layout.choices(unit, layout.round_size).items()
    ]
    moved = part * sum(
        often * bytes_of(choice, unit, sizes) for unit, choice, often in cells if choice.leaves
    )
    moved += count * sum(demand.boundary_bytes[unit] for unit in layout.offload)
    loads_s = [size / rates.load_bytes_per_s for size in _loaded_bytes(layout, rates, min(rounds, 2))]
    first_s, again_s = loads_s[:2], loads_s[-2:]
    forward_up_s, backward_up_s = (
        one + (rounds - 1) * more for one, more in zip(first_s, again_s, strict=True)
    )
    updated = sum(layout.gradient_bytes[unit] for unit in layout.resident)
    sums = sum(layout.gradient_bytes) - updated
    spared_s = part * sum(often * times.spared(choice, unit) for unit, choice, often in cells)
    return Phases(
        forward_s=count * sum(times.forward_s[: layout.last]),
        forward_up_s=forward_up_s,
        forward_down_s=moved / rates.down_bytes_per_s,
        backward_s=count * sum(times.backward_s[layout.first_backward :]) - spared_s,
        backward_up_s=backward_up_s
        + (rounds - 1) * sums / rates.load_bytes_per_s
        + moved / rates.up_bytes_per_s,
        backward_down_s=rounds * sums / rates.store_bytes_per_s,
        steps_s=sums * rates.host_step_s,
        updates_s=updated * rates.update_s,
        first_load_s=_moved_bytes(layout, rates)[0] / rates.load_bytes_per_s,
        clips=layout.clip,
    )


def _moved_bytes(layout: StepLayout, rates: UnitRates) -> tuple[int, ...]:
    """Return the bytes of each unit's weights that come up when it is loaded, with what decoding takes as bytes."""
    decoded = [round(seconds * rates.load_bytes_per_s) for seconds in rates.decode_s]
    decoded = decoded or [0] * layout.num_units
    return tuple(
        min(size, layout.gradient_bytes[unit] * (unit not in layout.resident))
        if unit in layout.stays
        else size + decoded[unit] - (layout.encoded_bytes[unit] if unit in layout.encoded else 0)
        for unit, size in enumerate(layout.link_bytes or layout.weight_bytes)
    )


def _loaded_bytes(layout: StepLayout, rates: UnitRates, rounds: int) -> list[int]:
    """Return the bytes of weights that come up in each forward and backward, by turns, of the first ``rounds``.

    The last units of a forward still lie in their slots when the backward begins, and so do the first of a round when
    the next one begins. Of units that stay what trains is loaded again, no larger than its gradient.
    """
    units = range(layout.num_streamed)
    forward, backward = list(units), list(units[layout.first_backward : layout.last])[::-1]
    places = (layout.weight_bytes, layout.slot_bytes, layout.prefetch_depth)
    return list(
        _loads(
            tuple(forward),
            tuple(backward),
            rounds,
            _moved_bytes(layout, rates),
            *places,
            tuple(layout.own_slots.items()),
        )
    )


@lru_cache(maxsize=256)
def _loads(
    forward: tuple[int, ...],
    backward: tuple[int, ...],
    rounds: int,
    moved_bytes: tuple[int, ...],
    weight_bytes: tuple[int, ...],
    slot_bytes: tuple[int, ...],
    depth: int,
    own_places: tuple[tuple[int, int], ...],
) -> tuple[int, ...]:
    """Return the same of units that are visited so, ``own_places`` those that stay in slots of their own."""
    ends = list(accumulate([len(forward), len(backward)] * rounds))
    loaded = [0] * len(ends)
    for stay in assign_slots(
        (forward + backward) * rounds, weight_bytes, slot_bytes, depth, dict(own_places)
    ):
        loaded[bisect_right(ends, stay.load_visit)] += moved_bytes[stay.unit]
    return tuple(loaded)


def offload_order(layout: StepLayout, demand: Demand, rates: UnitRates) -> list[Raise]:
    """Return what units may offload, the most seconds per byte first, and of equals the first units first.

    Those wait longest for their backward. Of units that move more than their own compute hides only some offload, for
    whose bytes the compute of others has time: such units follow each other as far apart as can be.
    """
    order: list[tuple[float, float, Raise]] = []
    for unit, choice in sorted(keep_order(layout, demand), key=lambda raised: raised[0]):
        assert choice.extent is not None
        size = bytes_of(choice, unit, demand.kept_bytes)
        down_s, up_s = size / rates.down_bytes_per_s, size / rates.up_bytes_per_s
        left_s = rates.times.backward_s[unit] - rates.times.spared(choice, unit)
        hidden = down_s <= rates.times.forward_s[unit] and up_s <= left_s
        if size:
            gain = demand.spared_s(choice.extent, unit) / size
            order.append((-gain, 0.0 if hidden else unit * GOLDEN % 1, (unit, OFFLOADED[choice.extent])))
    return [raised for *_, raised in sorted(order, key=lambda each: each[:2])]


def balanced(layout: StepLayout, demand: Demand, rates: UnitRates, fits: Callable[[Kept], bool]) -> Kept:
    """Return what to offload so that the link keeps up with compute, and what to keep on the device beside it.

    Args:
        layout: of the step, without anything kept.
        demand: of it.
        rates: of the worker.
        fits: whether the tiers have room.
    """

    def keeps_up(choices: Kept) -> bool:
        return fits(choices) and phases(replace(layout, kept=choices), demand, rates).compute_bound

    leaving = most_kept(layout, offload_order(layout, demand, rates), keeps_up)
    if not leaving:
        return ()
    order = keep_order(layout, demand)
    return merged(leaving, most_kept(layout, order, lambda choices: fits(merged(leaving, choices))))
