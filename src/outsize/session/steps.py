"""Microbatches, learning rate, loss scale and outcome of a step, and the files that its data come from."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch

from outsize.choices import Schedule
from outsize.config import Config
from outsize.data.batch import Batch
from outsize.data.reading.corpus_files import find_sources
from outsize.planner.simulate.stalls import Window
from outsize.runtime.ops.context import Microbatch, Moved

# Files beyond so many are one entry of a state, which every commit of a home writes.
MOST_LISTED = 200
_REST = "files beyond the first"
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one step came to, known before its optimizer has finished.

    Attributes:
        number: of the step, from 0.
        loss: token-weighted mean over the batch.
        gradient_norm: before clipping; NaN where no norm is taken.
        learning_rate: that it used.
        tokens: trained tokens.
        seconds: since the step before was known.
        data_s: of them, waiting for the batch.
        between_s: of them, before the batch was asked for.
        ended_s: when it was known, on the clock of the timeline.
        skipped: whether no weight changes.
        moved: asks for the bytes that the step's ops have moved so far, by what they crossed.
    """

    number: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    data_s: float
    between_s: float
    ended_s: float
    skipped: bool
    moved: Callable[[], Mapping[str, Moved]]

    @property
    def window(self) -> Window:
        """The step on the clock of its events."""
        began_s = self.ended_s - self.seconds
        asked_s = began_s + self.between_s
        return Window(began_s=began_s, asked_s=asked_s, given_s=asked_s + self.data_s, ended_s=self.ended_s)


@dataclass(frozen=True, slots=True)
class Measure:
    """A mean over tokens of several batches.

    Attributes:
        total: sum of the losses of all tokens, in nats.
        tokens: that were predicted.
    """

    total: float = 0.0
    tokens: int = 0

    def and_then(self, loss: float, tokens: int) -> "Measure":
        """Return the measure of one batch more, whose mean over ``tokens`` is ``loss``."""
        return Measure(self.total + loss * tokens, self.tokens + tokens)

    @property
    def loss(self) -> float:
        """Mean over the tokens; NaN over none."""
        return self.total / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """Of the loss; infinite where that is too large."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


def microbatches_of(batch: Batch, count: int, shifted: bool = True) -> tuple[Microbatch, ...]:
    """Cut a batch, and give each part the divisors that make their losses add up to the mean over all targets.

    A part without a single target weighs nothing. Of a rank's share the mean is that over the targets of all ranks.
    """
    parts = [(part, part.num_targets(shifted)) for part in batch.split(count)]
    total = (batch.whole or batch).num_targets(shifted)
    return tuple(
        Microbatch(
            inputs=part.inputs, divisor=total / targets if targets else float("inf"), targets=max(total, 1)
        )
        for part, targets in parts
    )


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

    kind: Schedule = "constant"
    lr: float
    num_warmup_steps: int = 0
    num_training_steps: int
    min_lr: float = 0.0
    num_decay_steps: int = 0
    num_cycles: int = 1
    _factor: Callable[[int], float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(Schedule):
            raise ValueError(f"unknown schedule {self.kind!r}; choose {', '.join(get_args(Schedule))}")
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
    factor_at: Any
    if schedule.kind == "constant":
        factor_at = optimization.get_constant_schedule_with_warmup(optimizer, warmup)
    elif schedule.kind == "linear":
        factor_at = optimization.get_linear_schedule_with_warmup(optimizer, warmup, total)
    elif schedule.kind == "cosine":
        factor_at = optimization.get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, warmup, total, min_lr_rate=share
        )
    elif schedule.kind == "cosine_restarts":
        factor_at = optimization.get_cosine_with_hard_restarts_schedule_with_warmup(
            optimizer, warmup, total, schedule.num_cycles
        )
    elif schedule.kind == "wsd":
        factor_at = optimization.get_wsd_schedule(
            optimizer, warmup, schedule.num_decay_steps, num_training_steps=total, min_lr_ratio=share
        )
    else:
        factor_at = optimization.get_inverse_sqrt_schedule(optimizer, warmup)
    factor: Callable[[int], float] = factor_at.lr_lambdas[0]
    return factor


def schedule_of(config: Config) -> LearningRateSchedule:
    """The learning-rate schedule of a run."""
    return LearningRateSchedule(
        kind=config.optimizer.schedule,
        lr=config.optimizer.lr,
        num_warmup_steps=config.warmup_steps,
        num_training_steps=config.train.steps,
        min_lr=config.optimizer.min_lr,
        num_decay_steps=round(config.optimizer.decay_ratio * config.train.steps),
        num_cycles=config.optimizer.restarts + 1,
    )


INITIAL = 2.0**16
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000


class LossScale:
    """What losses are multiplied by: doubled after `GROWTH_INTERVAL` good steps, halved after a bad one.

    The factors are powers of two, so scaling and unscaling lose no bit.

    Attributes:
        enabled: False keeps the scale at one.
        value: the current scale.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = INITIAL if enabled else 1.0
        self._good = 0

    def update(self, skipped: bool) -> None:
        """Take note of one step."""
        if not self.enabled:
            return
        self._good = 0 if skipped else self._good + 1
        if skipped:
            self.value *= BACKOFF
        elif self._good == GROWTH_INTERVAL:
            self.value *= GROWTH
            self._good = 0

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"value": self.value, "good": self._good}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint."""
        if self.enabled:
            self.value, self._good = state["value"], int(state["good"])


def list_files(sources: Iterable[tuple[str, str | None]]) -> dict[str, list[int]]:
    """Return size in bytes and time of change in nanoseconds of each file of data, by its name below its source.

    Args:
        sources: path and pattern of each source, see `find_sources`.

    Raises:
        DataError: a source is not there.
    """
    listed: dict[str, list[int]] = {}
    for number, (path, glob) in enumerate(sources):
        root = Path(path)
        for file in find_sources(root, glob).files:
            name = file.path.name if file.path == root else file.path.relative_to(root).as_posix()
            key = f"data.more[{number - 1}]: {name}" if number else name
            if len(listed) < MOST_LISTED:
                listed[key] = [file.size_bytes, file.mtime_ns]
            else:
                size, newest = listed.get(_REST, [0, 0])
                listed[_REST] = [size + file.size_bytes, max(newest, file.mtime_ns)]
    return listed


def changed_files(recorded: Any, given: Mapping[str, list[int]]) -> str:
    """Return in words which files of data have changed; empty where none has, or ``recorded`` does not say.

    Args:
        recorded: what `list_files` returned for the run before, as read from a file.
        given: what it returns now.
    """
    if not isinstance(recorded, Mapping) or dict(recorded) == dict(given):
        return ""
    changes = [
        f"{name} {change}"
        for name in dict.fromkeys([*given, *recorded])
        if (change := _change(recorded.get(name), given.get(name)))
    ]
    more = len(changes) - _MOST_NAMED
    return ", ".join([*changes[:_MOST_NAMED], *([f"{more} more"] if more > 0 else [])])


def _change(recorded: Any, given: list[int] | None) -> str:
    if recorded == given:
        return ""
    if given is None:
        return "is no longer there"
    if recorded is None:
        return "is new"
    if not isinstance(recorded, list) or len(recorded) != 2 or recorded[0] != given[0]:
        size = recorded[0] if isinstance(recorded, list) and recorded else "other"
        return f"has {given[0]} bytes, and had {size}"
    return "was written again, with as many bytes"
