"""What of forwards leaves the device, so that the link is as busy as compute while that goes on, and no busier.

A step of long sequences computes for seconds on weights that took milliseconds to arrive: the link stands idle. What it
could carry meanwhile need not be computed again. So units offload what they make, most seconds saved per byte first, as
long as

* what goes down in the forward takes no longer than the forward computes,
* what comes up in the backward takes no longer than the backward still computes,
* no single unit moves more than it hides behind (at most two inputs or kept parts are on their way out at once), and
* the tiers have room.

Whatever is not offloaded is kept on the device as far as there is room (`planner.search.recompute_policy`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

from outsize.planner.memory.memory_table import Demand
from outsize.planner.program.activation_policy import OFFLOADED, Kept, bytes_of, merged
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.recompute_policy import Raise, keep_order, most_kept
from outsize.planner.simulate.costs import UnitTimes
from outsize.planner.simulate.stage_traffic import SharedRates


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
    """

    times: UnitTimes
    up_bytes_per_s: float
    down_bytes_per_s: float
    home_up_bytes_per_s: float = inf
    home_down_bytes_per_s: float = inf
    shared: SharedRates = field(default_factory=SharedRates)

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
    """

    forward_s: float
    forward_up_s: float
    forward_down_s: float
    backward_s: float
    backward_up_s: float
    backward_down_s: float

    @property
    def compute_bound(self) -> bool:
        """Whether activations move no longer than what computes meanwhile."""
        return self.forward_down_s <= self.forward_s and self.backward_up_s <= self.backward_s

    @property
    def step_s(self) -> float:
        """Seconds of a step whose lanes never wait for each other within a phase."""
        forward_s = max(self.forward_s, self.forward_up_s, self.forward_down_s)
        return forward_s + max(self.backward_s, self.backward_up_s, self.backward_down_s)


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
    stays = sum(layout.weight_bytes[unit] for unit in layout.stays)
    weights_s = rounds * (sum(layout.weight_bytes) - stays) / rates.load_bytes_per_s
    sums = sum(layout.gradient_bytes)
    spared_s = part * sum(often * times.spared(choice, unit) for unit, choice, often in cells)
    return Phases(
        forward_s=count * sum(times.forward_s[: layout.last]),
        forward_up_s=weights_s + stays / rates.load_bytes_per_s,
        forward_down_s=moved / rates.down_bytes_per_s,
        backward_s=count * sum(times.backward_s[layout.first_backward :]) - spared_s,
        backward_up_s=weights_s + (rounds - 1) * sums / rates.load_bytes_per_s + moved / rates.up_bytes_per_s,
        backward_down_s=rounds * sums / rates.store_bytes_per_s,
    )


def offload_order(layout: StepLayout, demand: Demand, rates: UnitRates) -> list[Raise]:
    """Return what units may offload, the most seconds per byte first, and of equals the first units first.

    Those wait longest for their backward. A unit goes only as far as its own compute hides.
    """
    found = []
    for unit, choice in sorted(keep_order(layout, demand), key=lambda found: found[0]):
        assert choice.extent is not None
        size = bytes_of(choice, unit, demand.kept_bytes)
        down_s, up_s = size / rates.down_bytes_per_s, size / rates.up_bytes_per_s
        left_s = rates.times.backward_s[unit] - rates.times.spared(choice, unit)
        if size and down_s <= rates.times.forward_s[unit] and up_s <= left_s:
            found.append((demand.spared_s(choice.extent, unit) / size, (unit, OFFLOADED[choice.extent])))
    return [each for _, each in sorted(found, key=lambda found: -found[0])]


def balanced(layout: StepLayout, demand: Demand, rates: UnitRates, fits: Callable[[Kept], bool]) -> Kept:
    """Return what to offload so that the link keeps up with compute, and what to keep on the device beside it.

    Args:
        layout: of the step, without anything kept.
        demand: of it.
        rates: of the worker.
        fits: whether the tiers have room.
    """

    def keeps_up(kept: Kept) -> bool:
        return fits(kept) and phases(replace(layout, kept=kept), demand, rates).compute_bound

    leaving = most_kept(layout, offload_order(layout, demand, rates), keeps_up)
    if not leaving:
        return ()
    order = keep_order(layout, demand)
    return merged(leaving, most_kept(layout, order, lambda kept: fits(merged(leaving, kept))))
