"""What is asked of a prediction: a model, a machine, a step, and the memory that may be used."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypedDict

from outsize.choices import Activations, Home
from outsize.codecs.transport import Transport
from outsize.codecs.wire import EXACT, Wire
from outsize.hardware.machine_spec import Figure, Machine
from outsize.model.sizes.model_spec import ModelSpec, Workload
from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.memory.memory_table import NO_CODECS, Demand
from outsize.planner.program.stages import Stages
from outsize.planner.search.step_plan import Budgets

NODES = (
    "several nodes: each takes its share of the sequences; the gradient of a unit is reduced and scattered when it is "
    "whole, each node steps its share of the unit, and the weights are gathered; both overlap with what else goes on",
    "several nodes: what forwards keep leaves the GPUs where that shortens a step; ranks of a run do so only where "
    "`memory.activations` says so",
)
NODES_OF_SEVERAL = (
    "several nodes of several GPUs: `outsize train` gives each process one GPU, and is told of all of them as nodes",
)


class Exchange(TypedDict):
    """What `cost_model` is told of nodes."""

    net_bytes_per_s: float
    wire: Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model, a machine and a step.

    Attributes:
        model: its units.
        machine: what computes; with several GPUs their budgets are the same.
        budgets: most bytes in each tier; the device's is of each GPU.
        home: where weights and optimizer state rest; ``auto`` is the host if the plan fits there.
        sequences: of an optimizer step, on each node.
        seq_len: tokens of a sequence.
        microbatches: of a step; None lets the search choose.
        stages: how to cut for several GPUs; None lets the search choose.
        clip: whether gradients are clipped by their global norm.
        unit_clip: whether the gradient of each unit is clipped by its own norm.
        state: how a trained unit lies at home, but for its gradient; None for the plain layout of the model's dtype.
        workload_of: what a microbatch of so many sequences takes.
        fixed_bytes: what else lies on each device throughout.
        transport: codecs on the links, where the home is in host memory.
        nodes: machines like this one that share each step, data parallel.
        net_bytes_per_s: what a node sends, and receives, over the network at once; needed where there are several.
        activations: what becomes of what backwards need of their forwards, see `planner.program.activation_policy`.
        wire: codecs on the network.
        in_mlp_parts: what ``workload_of`` is where MLPs take their tokens in so many parts; None where they cannot, or
            do already.
    """

    model: ModelSpec
    machine: Machine
    budgets: Budgets
    home: Home = "auto"
    sequences: int
    seq_len: int
    microbatches: int | None = None
    stages: Stages | None = None
    clip: bool = True
    unit_clip: bool = False
    state: StateLayout | None = None
    workload_of: Callable[[int], Workload]
    fixed_bytes: int = 0
    transport: Transport = NO_CODECS
    nodes: int = 1
    net_bytes_per_s: Figure | None = None
    activations: Activations = "auto"
    wire: Wire = EXACT
    in_mlp_parts: Callable[[int], Callable[[int], Workload]] | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1 or (self.nodes > 1 and self.net_bytes_per_s is None):
            raise ValueError("there is a node, and a network between several")

    def state_layout(self, *, whole_gradients: bool) -> StateLayout:
        """Return how a trained unit lies at home; its gradient only where it is clipped globally, or must be whole."""
        state = self.state or StateLayout(dtype=self.model.dtype)
        return state if self.clip or whole_gradients else replace(state, gradients="none")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all nodes."""
        return self.nodes * self.sequences * self.seq_len

    def sequences_per_microbatch(self, microbatches: int) -> int:
        """Return the sequences of the largest microbatch."""
        return -(-self.sequences // microbatches)


def demand_of(question: Question, work: Workload, shared_bytes: int) -> Demand:
    """Return what computing takes besides weights, as `plan_step` wants it."""
    return Demand(
        boundary_bytes=work.boundary_bytes,
        forward_workspace_bytes=work.forward_workspace_bytes,
        backward_workspace_bytes=work.backward_workspace_bytes,
        saved_bytes=work.saved_bytes,
        recompute_s=work.recompute_flops,
        shared_bytes=shared_bytes,
        fixed_bytes=question.fixed_bytes,
    )


def exchange_of(question: Question) -> Exchange:
    """Return what `cost_model` is told of nodes."""
    rate = question.net_bytes_per_s
    return {"net_bytes_per_s": 0.0 if rate is None else rate.value, "wire": question.wire}


def node_assumptions(question: Question) -> tuple[str, ...]:
    """Return what is taken for granted of several nodes, for people."""
    if question.nodes == 1:
        return ()
    return NODES if len(question.machine.gpus) == 1 else (*NODES, *NODES_OF_SEVERAL)
