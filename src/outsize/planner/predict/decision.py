"""What a run does, as decided, and how long a step of it takes: simulated beforehand, measured later.

Before a run the costs of ops come from a short calibration. After its first steps they come from its own trace,
see `measured_costs`: each op then takes as long as it took, and what is left to predict is their order and waits.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from outsize.codecs.transport import CodecRates
from outsize.errors import ProgramError
from outsize.hardware.machine_spec import Machine
from outsize.model.sizes.model_spec import ModelSpec
from outsize.planner.passes.step_parts import steps_from
from outsize.planner.predict.question import MicrobatchCost, Question, exchange_of
from outsize.planner.program.program import Kind, Lane, Program
from outsize.planner.program.stages import Choice, KeptBytes
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.offload_balance import Phases, phases
from outsize.planner.search.partition import Pipeline
from outsize.planner.search.sizing import PlanOptions
from outsize.planner.search.stage_pipeline import clock_of
from outsize.planner.search.step_plan import Plan
from outsize.planner.simulate.comparison import Steps
from outsize.planner.simulate.costs import UnitTimes, cost_model
from outsize.planner.simulate.simulator import (
    CostModel,
    OrderedSteps,
    Simulation,
    Timeline,
    in_order,
    simulate,
)

# Tiles that the largest unit is simulated in: enough that reads, steps and writes overlap as they would.
SIMULATED_TILES = 8
# Rounds of a step that are simulated: the first ones, until rounds are alike, of one worker and of stages (with 2 a
# step of four GPUs was 0.1 % off, with 4 none of ten by over 0.03 %); those that stand for others; the last two.
FIRST_ROUNDS, FIRST_STAGED, LAST_ROUNDS = 2, 4, 2
# Steps that are simulated: the first starts from rest, the later ones tell the time of a step among others.
NUM_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Simulation of consecutive steps.

    Attributes:
        programs: of the steps.
        costs: of their ops.
        num_workers: devices that compute.
        done: what was simulated.
        left_out: periods of rounds of each step that were left out, since they are like the one behind the ``first``.
        round_size: microbatches of a round.
        first: rounds until rounds are alike.
        period: rounds after which each stage is with the same worker again.
    """

    programs: tuple[Program, ...]
    costs: CostModel
    num_workers: int
    done: Simulation
    left_out: int = 0
    round_size: int = 1
    first: int = FIRST_ROUNDS
    period: int = 1

    @property
    def step_s(self) -> float:
        """Time of a step among others."""
        begun_s, ended_s = self._repeated
        return self.done.step_s + self.left_out * (ended_s - begun_s)

    @cached_property
    def steady(self) -> Timeline:
        """The events between the decisions of the last two steps: a step among others."""
        first_s, end_s = self.done.decided_s[-2], self.done.decided_s[-1]
        steady_events = [e for e in self.done.between(first_s, end_s).events if e.start_s >= first_s]
        if not self.left_out:
            return Timeline(tuple(steady_events))
        begun_s, ended_s = self._repeated
        events = [e for e in steady_events if e.start_s < ended_s]
        again = [e for e in events if e.start_s >= begun_s]
        later_s = [number * (ended_s - begun_s) for number in range(1, self.left_out + 1)]
        events += [e.later(seconds) for seconds in later_s for e in again]
        events += [e.later(later_s[-1]) for e in steady_events if e.start_s >= ended_s]
        return Timeline(tuple(events))

    @property
    def amounts(self) -> dict[str, float]:
        """What goes through each resource in a step."""
        steps, (begun_s, ended_s) = self.done.steps, self._repeated
        amounts: defaultdict[str, float] = defaultdict(float)
        for index in self._last_step:
            op = steps.ops[index]
            cost = self.costs.cost_of(op) if op is not None else None
            often = 1 + self.left_out * (begun_s <= self.done.run.start_s[index] < ended_s)
            for part in () if cost is None else cost.parts:
                for name in part.through if part.amount else ():
                    amounts[name] += often * part.amount
        return amounts

    @property
    def _last_step(self) -> range:
        return range(self.done.steps.decided[-2] + 1, self.done.steps.decided[-1])

    @cached_property
    def _repeated(self) -> tuple[float, float]:
        """When the rounds of the last step that stand for those left out begin and end."""
        if not self.left_out:
            return 0.0, 0.0
        ends: dict[int, float] = {}
        for index in self._last_step:
            op = self.done.steps.ops[index]
            if op is not None and op.kind in (Kind.BACKWARD, Kind.FORWARD_BACKWARD):
                number = (op.microbatch or 0) // self.round_size
                ends[number] = max(ends.get(number, 0.0), self.done.run.end_s[index])
        return ends[self.first - 1], ends[self.first - 1 + self.period]

    @property
    def lanes(self) -> list[str]:
        """The lanes that compute."""
        return [Lane("compute", worker) for worker in range(self.num_workers)]

    @cached_property
    def busy_s(self) -> float:
        """Seconds of such a step that devices compute, all together."""
        return sum(self.steady.busy_s(lane) for lane in self.lanes)

    @property
    def bubble(self) -> float:
        """Share of the devices' time in which they compute nothing."""
        return max(0.0, 1 - self.busy_s / (self.num_workers * self.steady.span_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A plan as the simulator takes it.

    Attributes:
        plan: of the run.
        model: that it trains.
        boundary_bytes: of the input of each streamed unit for one microbatch.
        kept_bytes: of what forwards keep, by its extent.
        net_bytes_per_s: what this node sends, and receives, where several share the step.
        codec_rates: of the codec of weights; None where there is none, or nobody has measured it.
        crossing_rates: of those of gradients and activations, likewise.
    """

    plan: Plan
    model: ModelSpec
    boundary_bytes: tuple[int, ...]
    kept_bytes: KeptBytes = field(default_factory=dict)
    net_bytes_per_s: float = 0.0
    codec_rates: CodecRates | None = None
    crossing_rates: Mapping[str, CodecRates] = field(default_factory=dict)

    def costs(self, machine: Machine, times: UnitTimes, *, coarse: bool = True) -> CostModel:
        """Return what ops take on ``machine``; ``coarse`` is of the tiles that are simulated, not of those that run."""
        layout, tile_elements = self._simulated() if coarse else (self.plan.layout, self.plan.tile_elements)
        return cost_model(
            machine,
            self.model,
            layout,
            times,
            self.boundary_bytes,
            home=self.plan.home,
            below=self.plan.below,
            tile_elements=tile_elements,
            transport=self.plan.transport,
            kept_bytes=self.kept_bytes,
            net_bytes_per_s=self.net_bytes_per_s,
            wire=self.plan.wire,
            state=self.plan.state,
            codec_rates=self.codec_rates,
            crossing_rates=self.crossing_rates,
        )

    def simulate(self, costs: CostModel, num_steps: int, *, every_round: bool = True) -> Simulated:
        """Return ``num_steps`` steps where ops take ``costs``, which are those of coarse tiles.

        Args:
            costs: of ops.
            num_steps: at least two, where not ``every_round``.
            every_round: whether rounds are simulated that are like others.
        """
        layout, _ = self._simulated()
        size, period = layout.round_size, layout.period
        first = FIRST_ROUNDS if layout.stages is None else FIRST_STAGED
        every_round = every_round or bool(self.plan.user_programs)  # whose rounds need not be alike
        left_out = 0 if every_round else max(0, (layout.num_rounds - first - LAST_ROUNDS) // period - 1)
        if left_out:
            layout = replace(layout, num_microbatches=layout.num_microbatches - left_out * period * size)
        programs, steps = (_in_order if every_round else _in_known_order)(
            layout, num_steps, self.plan.user_programs
        )
        done = simulate(programs, layout, costs, steps=steps)
        return Simulated(
            programs=programs,
            costs=costs,
            num_workers=layout.num_workers,
            done=done,
            left_out=left_out,
            round_size=size,
            first=first,
            period=period,
        )

    def step_s(self, costs: CostModel) -> float:
        """Return the time of a step among others where ops take ``costs``, which are those of coarse tiles."""
        return self.simulate(costs, NUM_STEPS, every_round=False).step_s

    def expect(self, costs: CostModel) -> Steps:
        """Return steps among others where ops take ``costs``, which are those of coarse tiles."""
        done = self.simulate(costs, NUM_STEPS).done
        began_s, *ends_s = done.steady_s
        return Steps(
            timeline=done.between(began_s, ends_s[-1]), began_s=began_s, ended_s=ends_s[-1], count=len(ends_s)
        )

    def simulate_program(self, costs: CostModel, program: str | Callable[[str], str]) -> Simulation:
        """Return steps that walk a program of one's own, or what a function makes of each that they follow by turns."""
        layout, elements = self._simulated()
        plan = replace(self.plan, layout=layout, tile_elements=elements)
        if not callable(program) and (turns := len(plan.programs)) > 1:
            raise ProgramError(f"steps follow {turns} programs by turns; give a function that changes each")
        plan = plan.walking(program if callable(program) else lambda _: program)
        programs, steps = _in_order(layout, NUM_STEPS, plan.user_programs)
        return simulate(programs, layout, costs, steps=steps)

    def _simulated(self) -> tuple[StepLayout, int]:
        if self.plan.user_programs:
            return self.plan.layout, self.plan.tile_elements
        return coarser(self.plan, max(unit.numel for unit in self.model.units))


def _in_order(
    layout: StepLayout, num_steps: int, user: tuple[Program, ...]
) -> tuple[tuple[Program, ...], OrderedSteps]:
    """Return so many steps of ``layout``, by ``user`` programs where there are any."""
    programs = tuple(itertools.islice(itertools.cycle(user) if user else steps_from(layout), num_steps))
    return programs, in_order(programs, layout)


# A search asks about the same steps at other costs. Whole ones of many rounds are not kept: they are tens of megabytes.
_in_known_order = lru_cache(maxsize=4)(_in_order)


def coarser(plan: Plan, largest: int) -> tuple[StepLayout, int]:
    """Return the layout of ``plan`` with few large tiles, and their elements.

    Optimizer tiles are a megabyte each on a disk home, tens of thousands for a large model. They cross the disk one
    after the other at the disk's rate, so a few larger ones take the same time.
    """
    elements = max(plan.tile_elements, -(-largest // SIMULATED_TILES))
    if not any(plan.layout.tiles) or elements == plan.tile_elements:
        return plan.layout, plan.tile_elements
    numels = plan.layout.own_elements or tuple(size // 4 for size in plan.layout.gradient_bytes)
    tiles = tuple(
        0 if unit in plan.layout.resident else -(-numel // elements) for unit, numel in enumerate(numels)
    )
    return replace(plan.layout, tiles=tiles), elements


# Steps that are simulated: the first starts from rest, the second tells the time. A third takes as long as the second.
DECIDED_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was decided.

    Attributes:
        question: that was asked, with the codecs that were chosen.
        plan: of the step.
        microbatch: what one of its microbatches takes.
        chosen: crossings whose codec the search has chosen, with that codec.
        former: what was decided without what the search has chosen of a setting, by its key.
    """

    question: Question
    plan: Plan
    microbatch: MicrobatchCost
    chosen: Mapping[str, str] = field(default_factory=dict)
    former: Mapping[str, "Decision"] = field(default_factory=dict)

    @property
    def microbatches(self) -> int:
        """Of a step."""
        return self.plan.layout.num_microbatches

    @property
    def options(self) -> PlanOptions:
        """What the plan was made with."""
        layout = self.plan.layout
        in_a_round = layout.round_size if layout.stages is None else None
        return self.question.options_for(self.microbatches, self.plan.home, self.microbatch.times, in_a_round)

    @property
    def step(self) -> PlannedStep:
        """The plan as the simulator takes it."""
        question, demand = self.question, self.microbatch.demand
        return PlannedStep(
            plan=self.plan,
            model=question.model,
            boundary_bytes=demand.boundary_bytes,
            kept_bytes=demand.kept_bytes,
            net_bytes_per_s=exchange_of(question)["net_bytes_per_s"],
            **question.coding_rates(self.plan.transport),
        )

    @cached_property
    def simulated(self) -> Simulated:
        """Some steps, on the machine of the question; of many rounds that are alike some."""
        return self.simulate(every_round=False)

    @property
    def is_simulated(self) -> bool:
        """Whether that is known already."""
        return "simulated" in self.__dict__

    def simulate(self, *, every_round: bool) -> Simulated:
        """Return the same; ``every_round`` with all rounds."""
        costs = self.step.costs(self.question.machine, self.microbatch.times)
        return self.step.simulate(costs, DECIDED_STEPS, every_round=every_round)

    @property
    def step_s(self) -> float:
        """Seconds of a step, as simulated."""
        return self.simulated.step_s

    @property
    def compared_s(self) -> float:
        """Seconds of a step by which ways to take it are compared; in brief what clocks of lanes or stages tell."""
        if not self.question.brief:
            return self.step_s
        stages = self.plan.layout.stages
        return self.lanes.stepped_s if stages is None else self.clock.step_s(stages)

    @cached_property
    def least_s(self) -> float:
        """Lower bound of a step's seconds: for one worker, its compute, which no other step overlaps."""
        if self.question.brief or self.question.num_workers > 1:
            return self.compared_s
        layout, times, count = self.plan.layout, self.microbatch.times, self.microbatches
        least_s = 0.0
        for unit in range(layout.first_backward, layout.last):
            for choice, often in layout.choices(unit, count).items():
                least_s += often * (times.forward(choice.forward, unit) + times.backward(choice, unit))
        return least_s + self._ends_s

    @property
    def plain_s(self) -> float:
        """Seconds that a step of one worker computes if nothing is computed again and nothing is waited for."""
        layout, times = self.plan.layout, self.microbatch.times
        units = range(layout.first_backward, layout.last)
        return self._ends_s + self.microbatches * sum(
            times.forward(Choice.KEEP.forward, unit) + times.backward(Choice.KEEP, unit) for unit in units
        )

    @property
    def _ends_s(self) -> float:
        """Seconds of the units that no choice concerns: those below the first backward, and the last one."""
        layout, times = self.plan.layout, self.microbatch.times
        return self.microbatches * (
            sum(times.forward_s[: layout.first_backward]) + times.backward_s[layout.last]
        )

    def is_less(self, share: float, other: "Decision") -> bool:
        """Return whether a step takes less than ``share`` of what one of ``other`` takes."""
        return self.compared_s < share * other.least_s or self.compared_s < share * other.compared_s

    @cached_property
    def lanes(self) -> Phases:
        """What the lanes of one worker do in a step."""
        rates = self.options.rates
        assert rates is not None
        return phases(self.plan.layout, self.microbatch.demand, rates)

    @property
    def bound_s(self) -> float:
        """Lower bound of the seconds of a step of one worker, of what it computes and of what its lanes move."""
        return max(self.least_s, self.lanes.stepped_s)

    @cached_property
    def clock(self) -> Pipeline:
        """The partitioner's, of several devices."""
        return clock_of(self.question.model, self.microbatch.demand, self.options, self.plan)

    @property
    def free_bubble(self) -> float:
        """Share of several devices' time in which they compute nothing, if copies and the optimizer took no time."""
        stages = self.plan.layout.stages
        assert stages is not None
        return self.clock.free_bubble(stages)
