"""What a run does, as decided: its plan, and how long a step of it takes, by the simulator and by clocks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from outsize.planner.predict.expectation import PlannedStep, Simulated
from outsize.planner.predict.question import MicrobatchCost, Question, exchange_of
from outsize.planner.program.stages import Choice
from outsize.planner.search.offload_balance import phases
from outsize.planner.search.partition import Pipeline
from outsize.planner.search.sizing import PlanOptions
from outsize.planner.search.stage_pipeline import clock_of
from outsize.planner.search.step_plan import Plan

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
        return self.simulate(whole=False)

    def simulate(self, *, whole: bool) -> Simulated:
        """Return the same; ``whole`` with all rounds."""
        costs = self.step.costs(self.question.machine, self.microbatch.times)
        return self.step.simulate(costs, DECIDED_STEPS, whole=whole)

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
        return self.lanes_s if stages is None else self.clock.step_s(stages)

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

    @property
    def lanes_s(self) -> float:
        """Seconds of a step of one worker whose lanes never wait for each other within a pass."""
        rates = self.options.rates
        assert rates is not None
        return phases(self.plan.layout, self.microbatch.demand, rates).step_s

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

    @property
    def recomputed(self) -> float:
        """Share of units and microbatches whose backward recomputes everything."""
        layout, count = self.plan.layout, self.microbatches
        units = range(layout.first_backward, layout.last)
        recomputed = sum(layout.choices(unit, count)[Choice.RECOMPUTE] for unit in units)
        return recomputed / (len(units) * count) if units else 0.0
