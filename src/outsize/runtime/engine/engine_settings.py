"""What an engine is told that follows neither from the model nor from the plan or the machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from outsize.optim.planes import UpdateRule, WholeRule
from outsize.runtime.forward.unit_facts import Needed, SideEffects
from outsize.runtime.ops.commit_ops import Describe
from outsize.runtime.ops.gradient_ops import GradientObserver


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of `runtime.engine.engine.Engine`.

    Attributes:
        optimizer: how a parameter steps.
        max_grad_norm: global norm to clip to; infinity only takes the norm.
        skip_nonfinite: skip steps that are not finite instead of raising.
        chunk_tokens: tokens per chunk of the loss; None for the model's own loss.
        seed: of dropout and other randomness.
        graph_in_forward: whether a forward makes a graph, see `Measured.graph_matters`.
        effects: what units do besides returning tensors, see `Measured.effects`.
        needed: how far recomputes have to go, see `Measured.needed`.
        num_products: how many products backwards need, see `Measured.num_products`.
        num_threads: compute threads of each lane that computes.
        draws_random: whether units draw random numbers; workers that share a generator then compute one at a time.
        observe_gradient: sees each gradient before it leaves the device.
        describe: what a home that commits is told of each step.
    """

    optimizer: UpdateRule | WholeRule
    max_grad_norm: float
    skip_nonfinite: bool = False
    chunk_tokens: int | None = None
    seed: int = 0
    graph_in_forward: bool = False
    effects: SideEffects = field(default_factory=SideEffects)
    needed: Mapping[int, Needed] = field(default_factory=dict)
    num_products: Mapping[int, int] = field(default_factory=dict)
    num_threads: int | None = None
    draws_random: bool = True
    observe_gradient: GradientObserver | None = None
    describe: Describe = lambda _: {}
