"""Search microbatches and rounds for a step, and what to give up where no plan fits.

One worker moves no more weights for more microbatches, and needs less memory with them; a large one is never slower to
compute. Several workers hand microbatches on to each other: with few of them the filling and draining of stages shows.
Compute is taken to be as fast on small microbatches as on large ones, which flatters the small ones. So a search goes
from the largest microbatch that fits to smaller ones, which have to gain a percent. One that gains less ends nothing:
what a forward may keep of half a microbatch grows by steps, and so does what that spares.

A smaller round keeps more of what its backward needs, since less of it is there at once, and loads weights more often.
So as long as loads are hidden the smallest round is the fastest, and once they are not, no round is faster than its
loads.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from math import inf
from typing import TypeVar

from outsize.errors import InfeasiblePlanError
from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.memory.memory_table import Demand
from outsize.planner.program.stages import Choice, everywhere
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.offload_balance import Phases, UnitRates, phases
from outsize.planner.search.sizing import PlanOptions
from outsize.units import format_bytes

# Sequences per microbatch that several workers try; one worker tries no more than the last, unless they are short.
SIZES = (1, 2, 4, 8, 16)
# Tokens of the largest microbatch of short ones: layers have long reached their rate, and memory is better spent.
LARGEST_TOKENS = 32768
# Several GPUs get four each at least: with fewer the filling and draining of stages shows. And microbatches are no
# larger than what fills a GPU: on 4 x 2,048 tokens layers run at their rate (the published layer times of
# bench/bench_bubble.py).
PER_GPU, FULL_TOKENS = 4, 8192
# What fewer sequences per microbatch have to gain, as a share of the step.
NEAR = 1.01
# Places of one sort, slots or buffers, beyond which more of them hide no more.
PLACES = 3

T = TypeVar("T")


def cuts_to_try(sequences: int, seq_len: int, num_workers: int) -> Iterator[int]:
    """Yield numbers of microbatches, the largest microbatches first; several workers get microbatches of equal size."""
    if num_workers == 1:
        count, fewest = 1, min(sequences * seq_len / LARGEST_TOKENS, sequences / SIZES[-1])
        while count < sequences:
            if count >= fewest:
                yield count
            count *= 2
        yield sequences
        return
    counts = [sequences // size for size in reversed(SIZES) if sequences % size == 0]
    most = max(1, FULL_TOKENS // seq_len)
    enough = [count for count in counts if count >= PER_GPU * num_workers and sequences <= most * count]
    yield from enough or counts[-1:]


def may_shorten(waiting_s: float, step_s: float, microbatches: int, count: int) -> bool:
    """Return whether ``count`` microbatches could shorten what stages wait for each other by a percent of the step.

    Filling and draining are as long as microbatches are, and smaller ones leave memory for larger stages.

    Args:
        waiting_s: for how long stages wait with ``microbatches``.
        step_s: what a step takes with them.
        microbatches: of the step so far.
        count: more of them.
    """
    return waiting_s * (1 - microbatches / count) >= step_s * (1 - 1 / NEAR)


def search_cuts(
    counts: Iterable[int],
    take: Callable[[int], T],
    is_less: Callable[[T, T], bool],
    *,
    may_gain: Callable[[T, int], bool] = lambda best, count: True,
    is_enough: Callable[[T], bool] = lambda best: False,
    may_fit: Callable[[InfeasiblePlanError], bool] = lambda error: True,
) -> T:
    """Return the best that was made of a number of microbatches.

    Args:
        counts: numbers to try, the largest microbatches first.
        take: makes of a number what is compared; raises InfeasiblePlanError where that does not fit.
        is_less: whether a step of the first takes a percent less than one of the second.
        may_gain: whether a number is worth trying after the best so far; may raise the same.
        is_enough: whether the best so far leaves nothing to gain.
        may_fit: whether smaller microbatches may fit where these do not.

    Raises:
        InfeasiblePlanError: none fits; of the number that is short by the least.
    """
    best: T | None = None
    failures: list[InfeasiblePlanError] = []
    for count in counts:
        try:
            if best is not None and not may_gain(best, count):
                continue
            first = take(count)
        except InfeasiblePlanError as error:
            failures.append(error)
            if not may_fit(error):
                break
            continue
        if best is None or is_less(first, best):
            best = first
        if is_enough(best):
            break
    if best is None:
        raise min(failures, key=lambda error: sum(error.short_by.values()))
    return best


def smaller_rounds(size: int) -> Iterator[int]:
    """Yield how many microbatches smaller rounds than those of ``size`` take, the most first."""
    while size > 1:
        size = -(-size // 2)
        yield size


def rounds_to_try(
    layout: StepLayout, demand: Demand, rates: UnitRates, sizes: Sequence[int], *, may_rest: bool = False
) -> Iterator[int]:
    """Yield those of ``sizes`` whose rounds could take a percent less than those of ``layout``, the most first.

    Args:
        layout: of the largest rounds that fit.
        demand: of a microbatch.
        rates: of the worker.
        sizes: microbatches of smaller rounds, the most first.
        may_rest: whether units may be resident where activations leave room: most do in the smallest rounds.
    """
    step_s = phases(layout, demand, rates).step_s
    least = {size: _all_kept(layout, demand, rates, size) for size in sizes}
    hidden = [size for size, lanes in least.items() if lanes.step_s <= lanes.compute_s]
    for size in sizes:
        is_less = least[size].step_s * NEAR < step_s and size <= min(hidden, default=size)
        if is_less or (may_rest and size == sizes[-1] and len(layout.resident) < len(layout.step_order)):
            yield size


def most_gained_s(one: tuple[StepLayout, Phases], other: tuple[StepLayout, Phases]) -> float:
    """Return the seconds by which lanes do less in ``one`` step than in the ``other``; inf with more places for it."""

    def places(layout: StepLayout) -> tuple[int, ...]:
        shared = len(layout.slot_bytes), len(layout.accumulator_bytes)
        return *shared, layout.prefetch_depth + 1, layout.num_host_buffers, layout.num_tile_buffers

    (layout, lanes), (other_layout, other_lanes) = one, other
    pairs = zip(places(layout), places(other_layout), strict=True)
    if any(min(PLACES, more) > most for more, most in pairs):
        return inf
    seconds: Iterator[tuple[float, float]] = zip(astuple(lanes), astuple(other_lanes), strict=True)
    return sum(max(0.0, most_s - least_s) for least_s, most_s in seconds)


def _all_kept(layout: StepLayout, demand: Demand, rates: UnitRates, size: int) -> Phases:
    """Return what lanes take in rounds of ``size`` with room for everything on the device."""
    choices = everywhere(Choice.KEEP, layout.keepable, layout.num_streamed, size)
    tiles = (0,) * layout.num_units
    sizes = zip(layout.weight_bytes[: layout.num_streamed], layout.gradient_bytes, strict=False)
    frozen = {unit for unit, (weights, gradient) in enumerate(sizes) if weights > gradient}
    roomy = replace(
        layout,
        round_microbatches=size,
        offload=frozenset(),
        kept=choices,
        ring=False,
        tiles=tiles,
        stays=layout.stays | frozen,
        encoded=frozenset(),
    )
    return phases(roomy, demand, rates)


SPLIT, BY_UNIT, INT8 = "optimizer.masters=split", "optimizer.clip=unit", "optimizer.state=int8"
SPLIT24 = "optimizer.masters=split24"
# What codecs of a frozen model leave of 16-bit weights at most, with their scales; what rounds least comes first.
BASE_SHARES = {"int8": 0.54, "nf4": 0.29}
_FEWER_TOKENS = "fewer tokens per step"
# Classes of memory that are smaller with fewer tokens at once.
OF_TOKENS = ("activations", "workspace", "shared", "saved activations")


def smaller_states(options: PlanOptions, state: StateLayout) -> Iterator[tuple[str, PlanOptions]]:
    """Yield settings, as a user writes them, and the options that they make; each takes less than those before.

    Args:
        options: as they are.
        state: how a trained unit lies at home with them.
    """
    # A training loop of the user's own decides on these.
    if options.cut:
        return
    keys: list[str] = []
    options = replace(options, resident=0)
    if state.dtype == "bf16" and not state.splits:
        keys = [SPLIT]
        state = replace(state, masters="split")
        yield _joined(keys), replace(options, state=state)
    steps_at_once = options.nodes == options.num_workers == 1 and not options.may_skip
    ways = [(keys, options, state)]
    if state.gradients != "none" and steps_at_once and options.transport.is_raw("gradients"):
        by_unit = [BY_UNIT] if options.clip else []
        # What has no gradients at home cannot sum them there from round to round.
        unit_clip = options.clip or options.unit_clip
        ringed = replace(options, clip=False, unit_clip=unit_clip, round_microbatches=None)
        ways.append(([*keys, *by_unit], ringed, replace(state, gradients="none")))
        yield _joined(ways[-1][0] or [BY_UNIT]), replace(ringed, state=ways[-1][2])
    if state.moments != "int8" and state.num_moments:
        ways = [([INT8, *names], other, replace(layout, moments="int8")) for names, other, layout in ways]
        yield from ((_joined(names), replace(other, state=layout)) for names, other, layout in ways)
    keys, options, state = ways[-1]
    if state.dtype == "bf16" and state.masters != "split24":
        keys = [*(key for key in keys if key == INT8), SPLIT24, *(k for k in keys if k == BY_UNIT)]
        yield _joined(keys), replace(options, state=replace(state, masters="split24"))


def without_products(state: StateLayout) -> str:
    """Return what frees the room of Muon's products on a device, as a user writes it; empty without any."""
    return "optimizer.ns_on=host, or " if state.products_on_device else ""


def smaller_microbatches(options: PlanOptions, largest_kind: str | None) -> str:
    """Return what makes a microbatch take less of the device, of what can still be done, as a user writes it.

    Args:
        options: as they are.
        largest_kind: of the unit whose workspace is the most of it; None where something else is.
    """
    most = options.most_microbatches
    ideas = []
    if most is None or options.microbatches < most:
        ideas.append(f"more microbatches than {options.microbatches}")
    if largest_kind == "head" and not options.cut:
        ideas.append("a smaller train.head_chunk_tokens")
    if largest_kind == "block" and options.can_part:
        ideas.append("train.mlp_parts=4")
    if most is None or options.microbatches >= most:
        ideas.append("shorter sequences")
    return ", or ".join([", ".join(ideas[:-1]), ideas[-1]] if ideas[1:] else ideas)


def _joined(keys: list[str]) -> str:
    return " and ".join([", ".join(keys[:-1]), keys[-1]] if keys[1:] else keys)


def _smaller_state(
    options: PlanOptions,
    state: StateLayout,
    shortage: Callable[[PlanOptions], Mapping[str, int]],
    otherwise: str,
) -> str:
    """Return the settings that bring the home into host memory, perhaps with fewer tokens; or what the least lacks."""
    least, fewest = otherwise, shortage(replace(options, state=state)).get("host", 0)
    lacking_with = [(keys, other, shortage(other)) for keys, other in smaller_states(options, state)]
    # Masters that are rounded are the last resort: fewer tokens come before.
    lacking_with.sort(key=lambda each: bool(each[2]) or SPLIT24 in each[0])
    for keys, other, lacking in lacking_with:
        if not lacking:
            return f"{keys}, with which it fits"
        if otherwise == _FEWER_TOKENS:  # which do without any of them
            continue
        if not shortage(replace(other, microbatches=1, round_microbatches=None)):
            return f"{keys} with {_FEWER_TOKENS}"  # of one round, since no sums wait at home
        if lacking.get("host", 0) < fewest:
            least = f"{otherwise}; with {keys} {format_bytes(lacking.get('host', 0))} are lacking still"
    return least


def what_to_try(
    memory: Mapping[str, Mapping[str, int]],
    short_by: Mapping[str, int],
    options: PlanOptions,
    state: StateLayout,
    shortage: Callable[[PlanOptions], Mapping[str, int]],
    largest_kind: str | None,
    frozen_bytes: int = 0,
) -> str:
    """Return the message for the first tier that is short: what takes the most there, what to try first.

    Of adapters the ``frozen_bytes`` that rest as they are decide: their optimizer's state is small.
    """
    tier = next(iter(short_by))
    codecs = [name for name, share in BASE_SHARES.items() if short_by[tier] <= (1 - share) * frozen_bytes]
    num_needed = sum(memory[tier].values())
    needed = format_bytes(num_needed, up=True)
    largest = max(memory[tier], key=lambda name: memory[tier][name])
    size = format_bytes(memory[tier][largest])
    of_tokens = sum(memory[tier].get(name, 0) for name in OF_TOKENS)
    chosen = options.activations not in ("auto", "recompute")
    if options.resident and not shortage(replace(options, resident=0)):
        advice = "memory.resident=auto, which takes as many as fit"
    elif chosen and not shortage(replace(options, activations="auto")):
        advice = "memory.activations=auto, which keeps what has room"
    elif tier == "device" and largest in OF_TOKENS and short_by[tier] < of_tokens:
        advice = smaller_microbatches(options, largest_kind if largest == "workspace" else None)
    elif state.whole and largest in ("optimizer tiles", "optimizer scratch", "gradient ring"):
        advice = f"a {tier} budget of {needed}, or optimizer.name=adamw, which steps units piece by piece"
    elif tier == "host" and options.home == "host" and codecs and not options.cut:
        advice = f"lora.base_codec={codecs[0]}, which takes about {BASE_SHARES[codecs[0]]:.0%} of these bytes"
    elif tier == "host" and options.home == "host":
        room = num_needed - short_by[tier] > memory[tier].get("home", 0)
        on_disk = options.may_be_on_disk and not shortage(replace(options, home="disk", below="disk"))
        otherwise = "the home on disk" if on_disk else f"a host budget of {needed}"
        if room and not options.cut:
            fits_one = not shortage(replace(options, microbatches=1, round_microbatches=None))
            otherwise = _FEWER_TOKENS if fits_one else smaller_microbatches(options, None)
        advice = _smaller_state(options, state, shortage, otherwise)
    elif tier == "disk" and options.commits and largest == "home":
        advice = f"a disk budget of {needed}"
        if not shortage(replace(options, commits=False)):
            advice += ", or memory.commits=none, which needs about half of it and "
            advice += "goes back to the last checkpoint after a crash"
    else:
        advice = f"a {tier} budget of {needed}"
    if tier == "device":
        advice = without_products(state) + advice
    return f"the smallest plan needs {needed} on the {tier}, {size} of it for {largest}; first try {advice}"
