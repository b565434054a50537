"""Prediction beside measurement: a step's time taken apart the same way on both sides, so that differences add up.

A step is what the GPUs compute and what they wait for, by cause (`blame`), on the mean over GPUs. What neither
accounts for, such as waiting for a batch of data, is a part of its own.

A lane may be in the middle of an op when a step is known: only what lies within the steps is counted as their time.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from outsize.planner.simulate.simulator import Timeline
from outsize.planner.simulate.stalls import waits_by_cause
from outsize.units import format_seconds

COMPUTE = "compute"
BETWEEN = "between steps"
# What is less than this share of a step is not told to people.
TOLD_SHARE = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps that follow one another, as they would run or ran.

    Attributes:
        timeline: all ops that ended within them.
        began_s: when the step before them was known, on the clock of the timeline.
        ended_s: when the last of them was known.
        count: how many they are, at least one.
    """

    timeline: Timeline
    began_s: float
    ended_s: float
    count: int

    @property
    def step_s(self) -> float:
        """Mean time of a step."""
        return (self.ended_s - self.began_s) / self.count

    @property
    def within(self) -> Timeline:
        """The timeline, less what lanes did before the first step began or behind the end of the last one."""
        first_s, end_s = self.began_s, self.ended_s
        return Timeline(
            tuple(
                replace(event, start_s=max(event.start_s, first_s), end_s=min(event.end_s, end_s))
                for event in self.timeline.events
                if event.end_s > first_s and event.start_s < end_s
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """A mean step, taken apart.

    Attributes:
        step_s: its seconds.
        count: steps that it is the mean of.
        parts: seconds of each part, on the mean over workers; they add up to the step's.
        lanes: seconds that each lane was busy.
    """

    step_s: float
    count: int
    parts: dict[str, float]
    lanes: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Seconds per step of one part, or of one lane.

    Attributes:
        name: compute, a cause of waiting, or a lane.
        predicted_s: before it ran.
        measured_s: when it ran.
    """

    name: str
    predicted_s: float
    measured_s: float

    @property
    def seconds(self) -> float:
        """By how much the measurement is longer."""
        return self.measured_s - self.predicted_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A predicted and a measured step.

    Attributes:
        predicted_s: of a step among others, before the run.
        measured_s: mean of the steps that are compared.
        num_steps: how many those were.
        parts: of a step's time; their differences add up to that of the step. Largest difference first.
        lanes: seconds that each lane was busy, by lane.
        expected_s: of a step from now on, from the trace.
    """

    predicted_s: float
    measured_s: float
    num_steps: int
    parts: tuple[Difference, ...]
    lanes: tuple[Difference, ...]
    expected_s: float

    @property
    def error(self) -> float:
        """The prediction over the measurement, less one."""
        return self.predicted_s / self.measured_s - 1

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison in what JSON knows."""
        return {
            "predicted_step_s": self.predicted_s,
            "measured_step_s": self.measured_s,
            "measured_steps": self.num_steps,
            "error": self.error,
            "expected_step_s": self.expected_s,
            "parts": [asdict(part) for part in self.parts],
            "lanes": [asdict(lane) for lane in self.lanes],
        }

    def lines(self) -> list[str]:
        """Return the comparison for people."""
        least_s = TOLD_SHARE * self.measured_s
        parts = [part for part in self.parts if abs(part.seconds) >= least_s]
        why = ", ".join(f"{part.name} {_signed(part.seconds)}" for part in parts)
        texts = [
            f"a step was predicted to take {format_seconds(self.predicted_s)} and takes "
            f"{format_seconds(self.measured_s)} ({1 / (1 + self.error) - 1:+.0%}){': ' if why else ''}{why}"
        ]
        slow = [lane for lane in self.lanes if lane.predicted_s > 0 and abs(lane.seconds) >= least_s]
        if slow:
            ratios = (f"{lane.name} {lane.measured_s / lane.predicted_s:.2f} x" for lane in slow)
            texts.append(f"lanes, measured over predicted: {', '.join(ratios)}")
        return texts


def take_apart(steps: Steps) -> StepParts:
    """Return what a step of ``steps`` is made of; a run keeps that, and not their events."""
    return StepParts(step_s=steps.step_s, count=steps.count, parts=_parts(steps), lanes=_busy(steps))


def compare(predicted: StepParts, measured: StepParts, expected_s: float) -> Comparison:
    """Compare a predicted step with a measured one."""
    parts = [_difference(name, predicted.parts, measured.parts) for name in predicted.parts | measured.parts]
    lanes = [_difference(name, predicted.lanes, measured.lanes) for name in predicted.lanes | measured.lanes]
    return Comparison(
        predicted_s=predicted.step_s,
        measured_s=measured.step_s,
        num_steps=measured.count,
        parts=tuple(sorted(parts, key=lambda part: -abs(part.seconds))),
        lanes=tuple(sorted(lanes, key=lambda lane: lane.name)),
        expected_s=expected_s,
    )


def _parts(steps: Steps) -> dict[str, float]:
    """Return the seconds per step of each part, on the mean over workers; they add up to the step's."""
    timeline = steps.within
    lanes = timeline.compute_lanes
    seconds_by_part: defaultdict[str, float] = defaultdict(float)
    for lane, waits in zip(lanes, waits_by_cause(timeline, lanes), strict=True):
        seconds_by_part[COMPUTE] += timeline.busy_s(lane) / (len(lanes) * steps.count)
        for cause, wait_s in waits.items():
            seconds_by_part[f"waiting for {cause}"] += wait_s / (len(lanes) * steps.count)
    # Nothing is left where lanes were at work or waiting throughout; rounding may make that a little less.
    seconds_by_part[BETWEEN] = max(0.0, steps.step_s - sum(seconds_by_part.values()))
    return dict(seconds_by_part)


def _busy(steps: Steps) -> dict[str, float]:
    timeline = steps.timeline
    return {lane: timeline.busy_s(lane) / steps.count for lane in timeline.lanes}


def _difference(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> Difference:
    return Difference(name=name, predicted_s=before.get(name, 0.0), measured_s=after.get(name, 0.0))


def _signed(seconds: float) -> str:
    return f"{'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))}"
