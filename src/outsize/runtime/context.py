"""What the ops of one step share: its number, its microbatches, its learning rate, and what they find out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from outsize.planner.ops import Kind, Op
from outsize.planner.program import Program
from outsize.runtime.microbatch import MicrobatchRun


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One microbatch and its share of the loss.

    Attributes:
        inputs: keyword arguments of the model's forward.
        divisor: what the model's own (mean) loss of this microbatch is divided by, so that microbatches add up to the
            token-weighted mean over the batch: targets in the batch / targets in this microbatch.
        targets: targets in the whole batch, the divisor of a summed loss.
    """

    inputs: Mapping[str, Any]
    divisor: float
    targets: int


@dataclass(slots=True)
class StepContext:
    """One step of training.

    Attributes:
        number: step of the run, from 0; seeds randomness.
        learning_rate: of this step.
        tokens: trained tokens of the step.
        loss_scale: what losses are multiplied by before the backward (fp16), 1.0 otherwise.
        microbatches: in order.
        runs: passages under way, by microbatch.
        losses: loss of each microbatch, unscaled, in order of completion; they add up to the loss of the step.
        norms: gradient norms by unit, one for each tensor that received a gradient.
        touched: positions of the tensors that received a gradient, by unit.
        gradient_norm: global norm before clipping, after CLIP; None where clipping is off.
        coefficient: what gradients are multiplied by before the update; None for nothing.
        skipped: whether CLIP decided that this step changes no weight.
    """

    number: int
    learning_rate: float
    microbatches: tuple[Microbatch, ...]
    tokens: int = 0
    loss_scale: float = 1.0
    runs: dict[int, MicrobatchRun] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    norms: dict[int, Tensor] = field(default_factory=dict)
    touched: dict[int, frozenset[int]] = field(default_factory=dict)
    gradient_norm: float | None = None
    coefficient: Tensor | None = None
    skipped: bool = False

    def loss(self) -> float:
        """Loss of the step: the sum over microbatches, each already weighted by its targets."""
        return sum(self.losses[m].item() for m in range(len(self.microbatches)))


def slots_used(program: Program) -> dict[Op, dict[int, int]]:
    """For each F, FB and B of ``program``: the slot of each unit that lies in one at that point."""
    slots: dict[int, int] = {}
    found: dict[Op, dict[int, int]] = {}
    for op in program.ops:
        if op.unit is None:
            continue
        if op.kind is Kind.LOAD and op.slot is not None:
            slots[op.unit] = op.slot
        elif op.kind is Kind.FREE:
            slots.pop(op.unit, None)
        elif op.kind in (Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.BACKWARD):
            found[op] = dict(slots)
    return found
