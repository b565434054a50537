"""Learning rates over time: constant, linear and cosine, each with a linear warm-up.

The formulas are those of ``get_constant_schedule_with_warmup``, ``get_linear_schedule_with_warmup`` and
``get_cosine_schedule_with_warmup`` (half a cycle) in ``transformers.optimization``, so runs compare step by
step.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

ScheduleKind = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSchedule:
    """Learning rate as a function of the step.

    Attributes:
        kind: what happens after the warm-up: ``constant`` stays, ``linear`` and ``cosine`` fall to 0.
        lr: learning rate at the end of the warm-up.
        num_warmup_steps: steps over which the rate rises from 0.
        num_training_steps: step at which linear and cosine reach 0.

    Raises:
        ValueError: an unknown kind, a negative or non-finite number, or a warm-up longer than the training.
    """

    kind: ScheduleKind = "constant"
    lr: float
    num_warmup_steps: int = 0
    num_training_steps: int

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScheduleKind):
            raise ValueError(f"unknown schedule {self.kind!r}; choose {', '.join(get_args(ScheduleKind))}")
        if not (math.isfinite(self.lr) and self.lr >= 0.0):
            raise ValueError(f"lr must be a finite number of at least 0, not {self.lr}")
        if not 0 <= self.num_warmup_steps <= self.num_training_steps:
            raise ValueError(
                f"num_warmup_steps must lie in 0..{self.num_training_steps}, not {self.num_warmup_steps}"
            )

    def learning_rate(self, step: int) -> float:
        """Return the rate of step ``step``, counted from 0; the first step of a warm-up has rate 0."""
        return self.lr * self._factor(step)

    def _factor(self, step: int) -> float:
        if step < self.num_warmup_steps:
            return step / max(1, self.num_warmup_steps)
        if self.kind == "constant":
            return 1.0
        num_left = max(1, self.num_training_steps - self.num_warmup_steps)
        if self.kind == "linear":
            return max(0.0, (self.num_training_steps - step) / num_left)
        progress = (step - self.num_warmup_steps) / num_left
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress)))
