"""A step that could be taken: layout, costs and memory, ready for the simulator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outsize.codecs.transport import Transport
from outsize.model.sizes.model_spec import ModelSpec, Workload
from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.memory.memory_table import Tier
from outsize.planner.program.program import Program
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.simulate.simulator import CostModel

Table = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to take the step.

    Attributes:
        microbatches: of the step.
        work: what each of them takes.
        model: as it is planned.
        state: how a trained unit lies at home.
        home: where weights and optimizer state rest.
        transport: codecs on the links, as which weights that do not train rest in host memory.
        memory: bytes by tier and class; the device's are those of each GPU.
        layout: of the last of ``programs``.
        programs: steps that follow one another.
        costs: of their ops.
        assumptions: what was taken for granted to plan it, for people.
    """

    microbatches: int
    work: Workload
    model: ModelSpec
    state: StateLayout
    home: Tier
    transport: Transport
    memory: Table
    layout: StepLayout
    programs: Sequence[Program]
    costs: CostModel
    assumptions: tuple[str, ...] = ()
