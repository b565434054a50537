"""Decide what a run does: codecs, home, where Muon multiplies, microbatches, stages, activations.

`decide` is a pure function of a `Question`. ``outsize plan`` asks it with what a config tells of a model and data
sheets of a machine, ``outsize train`` with what a trial and a clock have found; the decision is the same where these
are.

Homes are tried from the fastest: host memory, host memory with weights encoded that do not train, disk. Microbatches
are searched by `microbatch_search.search_cuts`, which ends where less than a percent is left to gain. Simulating is
what takes time: a step of one device is simulated only where what it computes does not tell which of two is shorter.
Stages of several devices are searched for a second each; so smaller microbatches are looked at only where what stages
wait for each other leaves a percent to gain, and taken only where the partitioner's clock, asked for a moment, finds
one.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import inf
from typing import Any

from outsize.codecs.codec_spec import LOSSLESS3, LOSSLESS4
from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.model.sizes.model_spec import ModelSpec
from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.memory.memory_table import Demand, Tier
from outsize.planner.memory.step_bytes import packed_bytes
from outsize.planner.predict.decision import Decision
from outsize.planner.predict.question import MicrobatchCost, Question, tiers_of
from outsize.planner.search.forward_plan import why_not_resident
from outsize.planner.search.microbatch_search import (
    NEAR,
    PER_GPU,
    cuts_to_try,
    may_shorten,
    most_gained_s,
    rounds_to_try,
    search_cuts,
)
from outsize.planner.search.plan_stages import estimate_s, plan_stages, without_peers
from outsize.planner.search.sizing import PlanOptions
from outsize.planner.search.step_plan import Budgets, Plan, plan_step, shortage_of

# Of a step that a codec, or another place for Muon's products, must save: predictions of two plans of one model on one
# machine differ by less.
GAIN = 0.03
# What `Decision.former` calls where products of Muon run.
PRODUCTS_KEY = "optimizer.ns_on"
# And how many units rest on the device with their state.
RESIDENT_KEY = "memory.resident"
# Codecs that keep every bit, the faster first.
CODECS = (LOSSLESS4.name, LOSSLESS3.name)


def decide(question: Question) -> Decision:
    """Return what a run does.

    Raises:
        ConfigError: what is asked for cannot be.
        InfeasiblePlanError: nothing fits; of the plan that is short by the least.
    """
    best: Decision | None = None
    failure: InfeasiblePlanError | None = None
    try:
        best = _fastest(question)
    except InfeasiblePlanError as error:
        failure = error
    fits_raw = best is not None
    if best is not None:
        best = _with_whole_masters(_multiplying(best))
    for crossing in question.auto:
        best = _encoded(question if best is None else best.question, best, crossing)
    if best is None:
        assert failure is not None
        raise failure
    return best if fits_raw else _multiplying(best)


def worth_it(former_s: float, step_s: float) -> bool:
    """Return whether steps of ``step_s`` seconds are enough shorter than those of ``former_s`` for a change."""
    return step_s < former_s * (1 - GAIN)


def _with_whole_masters(split: Decision) -> Decision:
    """Return ``split``, or with masters in planes of their own what is enough faster, if that is open and fits.

    A step on the device joins split masters in several torch ops, which move as much memory again.
    """
    state = split.question.options.state
    is_open = split.question.masters_open and split.question.timed and split.plan.layout.resident
    if not is_open or state is None or state.masters != "split":
        return split
    question = split.question
    if not worth_it(split.compared_s, split.compared_s - split.lanes.updates_s):
        return split
    same_cut = replace(split, question=replace(question, microbatches=split.microbatches))
    best = _with_state(same_cut, replace(state, masters="separate"))
    best = _same(best, question=replace(best.question, microbatches=question.microbatches))
    return best if worth_it(split.compared_s, best.compared_s) else split


def _multiplying(on_host: Decision) -> Decision:
    """Return ``on_host``, or with products of Muon on the device what is enough faster, if that is open and fits.

    It is asked only where such products alone take less there, their way up and down included.
    """
    state = on_host.question.options.state
    if not (on_host.question.products_open and on_host.question.timed):
        return on_host
    assert state is not None
    there = replace(state, products_on_device=True)
    if _products_s(on_host, state) <= _products_s(on_host, there):
        return on_host
    best = _with_state(on_host, there)
    if not worth_it(on_host.step_s, best.step_s):
        return on_host
    return _same(best, former={**best.former, PRODUCTS_KEY: on_host})


def _with_state(decision: Decision, state: StateLayout) -> Decision:
    """Return what is decided where units lie at home as ``state`` says; ``decision`` where nothing fits so."""
    try:
        return _fastest(decision.question.deciding(state=state))
    except InfeasiblePlanError:
        return decision


def _products_s(decision: Decision, state: StateLayout) -> float:
    """Return what products of Muon take in a step, and copies for them, of units one after the other."""
    units, machine = decision.question.model.units, decision.question.machine
    flops = sum(state.step_flops_of(unit) for unit in units)
    if not state.products_on_device:
        return flops / machine.host.products.value
    size, link = sum(state.products_of(unit)[1] for unit in units), machine.links[0]
    up, down = link.up_bytes_per_s.value, link.down_bytes_per_s.value
    return flops / machine.gpus[0].products.value + size / up + size / down


def _encoded(question: Question, best: Decision | None, crossing: str) -> Decision | None:
    """Return ``best``, or with a codec at ``crossing`` what is enough faster, or fits where nothing does."""
    raw = best
    for name in CODECS:
        candidate = question.deciding(transport=replace(question.options.transport, **{crossing: name}))
        if raw is not None and (raw.plan.home == "host" or crossing != "weights"):
            # Nodes encode no more than it takes to have the home in host memory.
            if question.nodes > 1 or not question.timed:
                break
            candidate = replace(candidate, microbatches=raw.microbatches)
        elif crossing != "weights" or question.home == "disk":
            break
        elif not packed_bytes(candidate.options.transport, question.model):
            break  # nothing that does not train would rest encoded, and may fit host memory so
        try:
            decision = _fastest(candidate)
        except (InfeasiblePlanError, ConfigError):
            continue
        if best is None or worth_it(best.step_s, decision.step_s):
            # What is asked next goes on from the codec that was found, and searches microbatches anew.
            named = replace(decision.question, microbatches=question.microbatches)
            best = _same(decision, question=named, chosen={crossing: name})
            if raw is not None:
                replaced = {**raw.former, f"transport.{crossing}": raw}
                best = _same(best, chosen={**raw.chosen, crossing: name}, former=replaced)
            if not question.timed:  # the faster to write, of those that fit
                break
    return best


def _fastest(question: Question) -> Decision:
    """Return the decision whose step is the shortest that is found."""
    tiers = tiers_of(question)
    for tier in tiers[:-1]:
        try:
            return _fastest_at(question, tier)
        except InfeasiblePlanError as error:
            if "host" not in error.short_by:
                raise
    return _fastest_at(question, tiers[-1])


def _fastest_at(question: Question, home: Tier) -> Decision:
    """Return the same with the home there, and raise the same.

    Units stay on the device with their state only where a step of the best plan without such units takes no less.
    """
    best = _searched_at(question, home)
    if not best.plan.layout.resident or question.options.resident != "auto":
        return best
    streaming = _searched_at(question.deciding(resident=0), home)
    if best.compared_s < streaming.compared_s:
        return _same(best, former={**best.former, RESIDENT_KEY: streaming})
    return _same(streaming, question=question)


def _searched_at(question: Question, home: Tier) -> Decision:
    named, several = question.microbatches, question.num_workers > 1
    cuts = cuts_to_try(question.sequences, question.seq_len, question.num_workers)
    earlier: dict[bool, list[Decision]] = {True: [], False: []}  # by whether things may leave the device

    @cache
    def ways(microbatches: int, linked: bool) -> list[Decision]:
        """Return the ways to take a step; a simulated one of before in place of each that takes no less."""
        new = _ways(question if linked else replace(question, linked=False), microbatches, home)
        if several or question.brief or not question.timed:
            return new
        simulated = [way for way in earlier[linked] if way.is_simulated]
        earlier[linked].extend(new)
        return [next((other for other in simulated if _takes_no_less(way, other)), way) for way in new]

    def may_gain(best: Decision, microbatches: int) -> bool:
        if several:
            return _may_gain(best, microbatches)
        new = (way for way in ways(microbatches, True) if way.microbatches == microbatches)
        bound_s = NEAR * min((way.bound_s for way in new), default=inf)
        return bound_s < best.least_s or bound_s < best.compared_s

    def take(microbatches: int) -> Decision:
        return _handed_over(
            _offloading(_faster(*ways(microbatches, True)), lambda count: _faster(*ways(count, False)))
        )

    def is_enough(best: Decision) -> bool:
        little = 1 - 1 / NEAR
        if not several:
            return best.compared_s <= NEAR * best.plain_s
        return best.free_bubble <= little and (question.brief or best.simulated.bubble <= little)

    return search_cuts(
        cuts if named is None else (named,),
        take,
        lambda candidate, best: candidate.is_less(1 / NEAR, best),
        may_gain=may_gain,
        is_enough=is_enough if named is None else lambda _: True,
        may_fit=lambda error: "device" in error.short_by or (home == "host" and named is None),
    )


def _takes_no_less(way: Decision, other: Decision) -> bool:
    """Return whether a step of one worker takes no percent less than the ``other``, of larger microbatches.

    Lanes fill and drain for as long as a microbatch of a unit takes.
    """
    times, layout = other.microbatch.times, other.plan.layout
    longest_s = max(a + b for a, b in zip(times.forward_s[: layout.last], times.backward_s, strict=False))
    gained_s = longest_s * (1 - other.microbatches / way.microbatches)
    gained_s += most_gained_s((way.plan.layout, way.lanes), (layout, other.lanes))
    return gained_s <= (1 - 1 / NEAR) * other.step_s


def planned_at(question: Question, microbatches: int, home: Tier) -> Decision:
    """Return the decision with so many microbatches, and the home there: in rounds as large as fit, or faster ones.

    Raises:
        ConfigError: what is asked for cannot be.
        InfeasiblePlanError: nothing fits.
    """
    return _faster(*_ways(question, microbatches, home))


def _faster(largest: Decision, *faster: Decision) -> Decision:
    """Return the decision with rounds as large as fit, or the one with faster rounds where that is a percent faster."""
    return next((decision for decision in faster if decision.is_less(1 / NEAR, largest)), largest)


def _ways(question: Question, microbatches: int, home: Tier) -> list[Decision]:
    """Return the decision in rounds as large as fit, and the one in rounds of which lanes say that they are faster."""
    one = question.microbatch(microbatches)

    def planned_in(size: int) -> Decision:
        options = question.options_for(microbatches, home, one.times, size)
        plan = plan_within(question.model, one.demand, question.budgets, options)
        return Decision(question=question, plan=plan, microbatch=one)

    most, *smaller = _rounds_that_fit(question, microbatches, home, one)
    largest = best = planned_in(most)
    rates = largest.options.rates
    if not question.timed or rates is None or not smaller:
        return [largest]
    may_rest = question.options.resident == "auto" and not why_not_resident(largest.options)
    for size in rounds_to_try(largest.plan.layout, one.demand, rates, smaller, may_rest=may_rest):
        try:
            planned = planned_in(size)
        except InfeasiblePlanError:
            break
        if planned.lanes.stepped_s < best.lanes.stepped_s:
            best = planned
    return [largest] if best is largest else [largest, best]


def _rounds_that_fit(question: Question, microbatches: int, home: Tier, one: MicrobatchCost) -> list[int]:
    """Return how many of so many microbatches a round may take, the most first; where none fits, what lacks the least.

    A round of all asks for the most while a step runs and, where gradients pass through a ring, for the least at home.
    """
    sizes = list(question.round_sizes(microbatches))

    def short_by(size: int) -> int:
        options = question.options_for(microbatches, home, one.times, size)
        return sum(shortage_of(question.model, one.demand, question.budgets, options).values())

    if not sizes[1:] or not short_by(sizes[0]):
        return sizes
    fitting = sizes[bisect_left(sizes, True, lo=1, key=lambda size: not short_by(size)) :]
    return fitting or [min(sizes[-1], sizes[0], key=short_by)]


def plan_within(model: ModelSpec, demand: Demand, budgets: Budgets, options: PlanOptions) -> Plan:
    """Return the plan of a step, on one worker or several.

    What the device should have to spare comes before more slots or larger tiles; where even the smallest plan leaves
    none, it is given up.

    Raises:
        ConfigError: what is asked for cannot be.
        InfeasiblePlanError: no plan fits, and by how much.
    """
    make = plan_stages if options.num_workers > 1 else plan_step
    if demand.spare_bytes:
        roomy = replace(demand, fixed_bytes=demand.fixed_bytes + demand.spare_bytes)
        try:
            return make(model, roomy, budgets, options)
        except InfeasiblePlanError:
            return replace(make(model, demand, budgets, options), heap=False)
    return make(model, demand, budgets, options)


def _offloading(decision: Decision, staying_at: Callable[[int], Decision]) -> Decision:
    """Return ``decision``, or where things leave the device unasked what keeps them there, if that is no slower.

    Stages are compared with both where they are cut.
    """
    question, plan = decision.question, decision.plan
    is_fixed = question.options.activations != "auto" or question.num_workers > 1 or question.brief
    if is_fixed or not plan.layout.any_leaves:
        return decision
    staying = staying_at(decision.microbatches)
    if not decision.is_less(1 - GAIN, staying):
        return _same(staying, question=question)
    return _same(decision, former={**decision.former, "memory.activations": staying})


def _same(decision: Decision, **changes: Any) -> Decision:
    """Return ``decision`` with changes that its steps do not depend on, so that none is simulated again."""
    changed = replace(decision, **changes)
    vars(changed).update({name: value for name, value in vars(decision).items() if name == "simulated"})
    return changed


def _handed_over(decision: Decision) -> Decision:
    """Return ``decision``, handing over from device to device where that can be and is not slower.

    In brief wherever that can be: clocks tell no difference.
    """
    plan, question = decision.plan, decision.question
    if not plan.layout.peers or question.options.handover == "peer" or question.brief:
        return decision
    by_host = replace(
        decision, plan=without_peers(plan, question.model, decision.microbatch.demand, decision.options)
    )
    return decision if decision.step_s <= by_host.step_s else by_host


def _may_gain(best: Decision, microbatches: int) -> bool:
    """Return whether stages of several devices could take a percent less with more microbatches than ``best``."""
    question, clock, stages = best.question, best.clock, best.plan.layout.stages
    assert stages is not None
    waiting_s = best.free_bubble * clock.step_s(stages)
    # Of short rounds, as memory may want them, stages wait for each other throughout.
    short = stages.round_size < min(PER_GPU * question.num_workers, best.microbatches)
    if not short and not may_shorten(waiting_s, best.compared_s, best.microbatches, microbatches):
        return False
    try:
        gained_s = clock.step_s(stages) - clocked_s(question, microbatches, best.plan.home)
    except InfeasiblePlanError:
        return False
    return gained_s >= best.compared_s * (1 - 1 / NEAR)


def clocked_s(question: Question, microbatches: int, home: Tier) -> float:
    """Return what the partitioner makes of a step of several devices, seconds, in a fraction of the time of a decision.

    Raises:
        ConfigError: more devices than there can be stages.
        InfeasiblePlanError: nothing fits.
    """
    one = question.microbatch(microbatches)
    options = question.options_for(microbatches, home, one.times)
    return estimate_s(question.model, one.demand, question.budgets, options)
