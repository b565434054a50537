"""Where work ends later than the handler that starts it, the timeline is told by the device's clock."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from outsize.planner.program.hazards import Hazards
from outsize.planner.program.program import lane_of, parse, parse_op
from outsize.runtime.device.device import CpuDevice
from outsize.runtime.engine.executor import Executor


class Mark:
    def __init__(self, passed_s: float):
        self.passed_s = passed_s
        self.passed = True

    def query(self) -> bool:
        return self.passed


class Streams(CpuDevice):
    """Lanes of a device that say for each mark, in order, when it passes; the host lane has none."""

    def __init__(self, **times: list[float]):
        super().__init__()
        self._times = {f"{lane}:w0": iter(passes) for lane, passes in times.items()}
        self.marks: list[Mark] = []

    def record(self, lane: str) -> Mark | None:
        if lane not in self._times:
            return None
        self.marks.append(Mark(next(self._times[lane])))
        return self.marks[-1]

    def seconds(self, mark: Mark) -> float:
        return mark.passed_s


@contextmanager
def executing(device: Streams) -> Iterator[Executor]:
    executor = Executor(device, lane_of, lambda op, context: None, Hazards(3, None))
    try:
        yield executor
    finally:
        executor.close()
        device.close()


PROGRAM = parse("LOAD 0@w0.0; LOAD 1@w0.1; F 0.0@w0; F 1.0@w0").ops


def test_ops_run_when_the_device_says_and_waited_for_what_ended_last():
    # F 0 has to wait for its weights, F 1 for nothing but F 0.
    device = Streams(up=[0.0, 2.0, 2.0, 3.0], compute=[2.0, 7.0, 7.0, 9.0])
    with executing(device) as executor:
        executor.wait(executor.submit(PROGRAM, None))
        events = {str(event.op): event for event in executor.take_events()}
        assert executor.take_events() == []
    times = {op: (event.start_s, event.end_s) for op, event in events.items()}
    assert times == {
        "LOAD 0@w0.0": (0.0, 2.0),
        "LOAD 1@w0.1": (2.0, 3.0),
        "F 0.0@w0": (2.0, 7.0),
        "F 1.0@w0": (7.0, 9.0),
    }
    assert events["F 1.0@w0"].waited_for is None
    assert [event.waited_s for event in events.values()] == pytest.approx([0.0] * 4)


def test_a_gap_before_an_op_belongs_to_what_it_waited_for():
    device = Streams(up=[0.0, 1.0, 1.0, 8.0], compute=[1.0, 3.0, 8.0, 9.0])
    with executing(device) as executor:
        for op in PROGRAM:  # one after the other, but for the device all are under way: no mark has passed
            device_marks = len(device.marks)
            executor.wait(executor.submit([op], None))
            for mark in device.marks[device_marks:]:
                mark.passed = False
        for mark in device.marks:
            mark.passed = True
        events = {str(event.op): event for event in executor.take_events()}
    assert events["F 1.0@w0"].waited_for == parse_op("LOAD 1@w0.1")
    assert events["F 1.0@w0"].waited_s == pytest.approx(5.0)


def test_what_the_device_has_not_done_comes_with_a_later_call():
    device = Streams(up=[0.0, 1.0, 1.0, 2.0], compute=[1.0, 2.0, 2.0, 3.0])
    with executing(device) as executor:
        executor.wait(executor.submit(PROGRAM, None))
        device.marks[-1].passed = False
        first = {str(event.op) for event in executor.take_events()}
        device.marks[-1].passed = True
        second = {str(event.op) for event in executor.take_events()}
    assert len(first) == 3
    assert first | second == {str(op) for op in PROGRAM}
    assert not first & second


def test_lanes_without_a_stream_keep_the_time_of_the_host():
    with executing(Streams()) as executor:
        executor.wait(executor.submit(parse("CLIP; STEP 0").ops, None))
        clip, step = sorted(executor.take_events(), key=lambda event: event.start_s)
    assert (clip.lane, str(clip.op), str(step.op)) == ("host", "CLIP", "STEP 0")
    assert clip.start_s <= clip.end_s <= step.start_s <= step.end_s
