"""Learning rates over time: those of ``transformers.optimization``, whose functions are asked, each with a warm-up."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

ScheduleKind = Literal["constant", "linear", "cosine", "cosine_restarts", "wsd", "inverse_sqrt"]
# Whose rate ends at `min_lr`.
WITH_MIN_LR = ("cosine", "wsd")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSchedule:
    """Learning rate as a function of the step.

    Attributes:
        kind: what happens after the warm-up: ``constant`` stays; ``linear`` falls to 0, ``cosine`` to ``min_lr``;
            ``cosine_restarts`` falls to 0 ``num_cycles`` times; ``wsd`` stays, and falls to ``min_lr`` in the last
            ``num_decay_steps``; ``inverse_sqrt`` falls with the root of the step.
        lr: learning rate at the end of the warm-up.
        num_warmup_steps: steps over which the rate rises from 0.
        num_training_steps: step at which the rate has fallen.
        min_lr: the least rate, of ``cosine`` and ``wsd``.
        num_decay_steps: of ``wsd``.
        num_cycles: of ``cosine_restarts``.

    Raises:
        ValueError: an unknown kind, a negative or non-finite number, or a warm-up longer than the training.
    """

    kind: ScheduleKind = "constant"
    lr: float
    num_warmup_steps: int = 0
    num_training_steps: int
    min_lr: float = 0.0
    num_decay_steps: int = 0
    num_cycles: int = 1
    _factor: Callable[[int], float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScheduleKind):
            raise ValueError(f"unknown schedule {self.kind!r}; choose {', '.join(get_args(ScheduleKind))}")
        if not (math.isfinite(self.lr) and self.lr >= 0.0):
            raise ValueError(f"lr must be a finite number of at least 0, not {self.lr}")
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"min_lr must lie in 0..lr ({self.lr:g}), not {self.min_lr:g}")
        if not 0 <= self.num_warmup_steps <= self.num_training_steps:
            raise ValueError(
                f"num_warmup_steps must lie in 0..{self.num_training_steps}, not {self.num_warmup_steps}"
            )
        object.__setattr__(self, "_factor", _factor_of(self))

    def learning_rate(self, step: int) -> float:
        """Return the rate of step ``step``, counted from 0; the first step of a warm-up has rate 0."""
        return self.lr * self._factor(step)


def _factor_of(schedule: LearningRateSchedule) -> Callable[[int], float]:
    """Return what a rate is multiplied by as a function of the step: what transformers gives to torch's `LambdaLR`."""
    from transformers import optimization

    share = schedule.min_lr / schedule.lr if schedule.lr else 0.0
    warmup, total = schedule.num_warmup_steps, schedule.num_training_steps
    # A schedule wants an optimizer, of which only its first rate is read.
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=schedule.lr)
    made: Any
    if schedule.kind == "constant":
        made = optimization.get_constant_schedule_with_warmup(optimizer, warmup)
    elif schedule.kind == "linear":
        made = optimization.get_linear_schedule_with_warmup(optimizer, warmup, total)
    elif schedule.kind == "cosine":
        made = optimization.get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, warmup, total, min_lr_rate=share
        )
    elif schedule.kind == "cosine_restarts":
        made = optimization.get_cosine_with_hard_restarts_schedule_with_warmup(
            optimizer, warmup, total, schedule.num_cycles
        )
    elif schedule.kind == "wsd":
        made = optimization.get_wsd_schedule(
            optimizer, warmup, schedule.num_decay_steps, num_training_steps=total, min_lr_ratio=share
        )
    else:
        made = optimization.get_inverse_sqrt_schedule(optimizer, warmup)
    factor: Callable[[int], float] = made.lr_lambdas[0]
    return factor
