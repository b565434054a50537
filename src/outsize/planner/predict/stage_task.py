"""A step that is to be cut for several GPUs: what it computes, moves and could keep."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from outsize.model.sizes.model_spec import ModelSpec, Workload
from outsize.planner.memory.link_bytes import load_bytes
from outsize.planner.memory.memory_table import NO_CODECS, Demand, Tier
from outsize.planner.predict.one_worker import in_seconds
from outsize.planner.predict.question import Question, demand_of
from outsize.planner.program.stages import Stages
from outsize.planner.search.offload_balance import UnitRates
from outsize.planner.search.sizing import PlanOptions
from outsize.planner.search.stage_layout import single_units
from outsize.planner.search.stage_offload import Way, ways_of
from outsize.planner.simulate.costs import UnitTimes
from outsize.planner.simulate.gpu_times import unit_times


@dataclass(frozen=True, kw_only=True)
class StageTask:
    """A step that is to be cut.

    Attributes:
        question: what is asked.
        model: its units, the rest dealt out to them.
        work: what a microbatch takes.
        options: what is decided.
        times: of the units.
    """

    question: Question
    model: ModelSpec
    work: Workload
    options: PlanOptions
    times: UnitTimes

    @property
    def num_workers(self) -> int:
        """GPUs."""
        return len(self.question.machine.gpus)

    @property
    def bottom(self) -> int:
        """The lowest unit that runs backward."""
        units = self.model.units
        return next((unit.index for unit in units if unit.trainable), len(units) - 1)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """Bytes of the weights of each unit."""
        return tuple(unit.weight_bytes(self.model.dtype) for unit in self.model.units)

    @cached_property
    def sent_weights(self) -> tuple[int, ...]:
        """Bytes that those of each unit take on a link."""
        transport, dtype = self.options.transport, self.model.dtype
        return tuple(load_bytes(transport, unit, dtype) for unit in self.model.units)

    @cached_property
    def gradients(self) -> tuple[int, ...]:
        """Bytes of the gradient of each unit."""
        return tuple(unit.gradient_bytes * unit.trainable for unit in self.model.units)

    @cached_property
    def demand(self) -> Demand:
        """What a microbatch takes besides weights, and what its forwards could keep."""
        return in_seconds(demand_of(self.question, self.work, 0), self.work, self.times)

    @cached_property
    def rates(self) -> UnitRates:
        """What a GPU does while all of them do: all links at once move no more than host memory gives and takes."""
        machine = self.question.machine
        most = machine.host.bytes_per_s.value / self.num_workers
        return UnitRates(
            times=self.times,
            up_bytes_per_s=min(most, *(link.up_bytes_per_s.value for link in machine.links)),
            down_bytes_per_s=min(most, *(link.down_bytes_per_s.value for link in machine.links)),
        )

    def ways(self, fits: Callable[[Way], bool]) -> list[Way]:
        """Return what may become of what forwards keep, where ``fits`` says whether the tiers have room for it.

        Keeping at the turn takes no more than other stages take.
        """
        units = range(self.bottom, self.model.num_streamed - 1)
        found = ways_of(self.question.activations, units, self.demand, self.rates, fits)
        return found[:-1] or found

    def workspace(self, unit: int) -> int:
        """Return what the backward of ``unit`` allocates."""
        return self.work.backward_workspace_bytes.get(self.model.units[unit].kind, 0)

    def single_units(self, halves: tuple[int, int]) -> Stages:
        """Return stages of one unit each, which need the least memory."""
        round_size = self.options.microbatches if self.options.home == "disk" else 1
        return single_units(self.model.num_streamed, self.bottom, round_size, halves)


def task_of(question: Question, model: ModelSpec, microbatches: int, home: Tier) -> StageTask:
    """Return the step of ``question`` on ``model``, whose rest has been dealt out."""
    work = question.workload_of(question.sequences_per_microbatch(microbatches))
    options = PlanOptions(
        home=home,
        below="host",
        clip=question.clip,
        unit_clip=question.unit_clip,
        microbatches=microbatches,
        most_microbatches=question.sequences,
        can_part=question.in_mlp_parts is not None,
        state=question.state_layout(whole_gradients=True),
        wire=question.wire,
        transport=question.transport if home == "host" else NO_CODECS,
    )
    times = unit_times(question.machine, model.compute_dtype, work)
    return StageTask(question=question, model=model, work=work, options=options, times=times)
