import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.errors import ExecutionError, NonFiniteError
from outsize.planner.passes.step_parts import build_step
from outsize.planner.program.hazards import Hazards
from outsize.planner.program.program import Op, lane_of, parse
from outsize.planner.program.step_layout import StepLayout
from outsize.runtime.device.device import CpuDevice, Device
from outsize.runtime.engine.executor import Executor, Waiting
from patience import PATIENCE_S
from planner.layouts import layouts, make_layout


@contextmanager
def executing(
    handler: Callable[[Op, object], None], num_streamed: int = 3, rest: int | None = None, **options
) -> Iterator[Executor]:
    device = options.pop("device", None) or CpuDevice()
    executor = Executor(device, lane_of, handler, Hazards(num_streamed, rest), **options)
    try:
        yield executor
    finally:
        executor.close()
        device.close()


def ops(text: str) -> tuple[Op, ...]:
    return parse(text).ops


class Recorder:
    """Notes ops when they start and end; ops named in ``held`` wait until they are let go."""

    def __init__(self, *held: str):
        self.started: list[str] = []
        self.ended: list[str] = []
        self.began = {text: threading.Event() for text in held}
        self.go = {text: threading.Event() for text in held}

    def __call__(self, op: Op, context: object) -> None:
        text = str(op)
        self.started.append(text)
        if text in self.began:
            self.began[text].set()
            assert self.go[text].wait(PATIENCE_S)
        self.ended.append(text)


def test_an_op_waits_for_what_it_depends_on():
    recorder = Recorder("LOAD 0@w0.0")
    with executing(recorder) as executor:
        tasks = executor.submit(ops("LOAD 0@w0.0; F 0.0@w0; FREE 0@w0.0"), None)
        assert recorder.began["LOAD 0@w0.0"].wait(PATIENCE_S)
        assert recorder.started == ["LOAD 0@w0.0"]
        assert executor.waiting() == {
            "up:w0": Waiting("LOAD 0@w0.0", ()),
            "compute:w0": Waiting("F 0.0@w0", ("LOAD 0@w0.0",)),
        }
        recorder.go["LOAD 0@w0.0"].set()
        executor.wait(tasks)
        assert executor.waiting() == {}
    assert recorder.ended == ["LOAD 0@w0.0", "F 0.0@w0", "FREE 0@w0.0"]


def test_lanes_run_at_the_same_time():
    """The next unit loads while this one computes: both are under way at once."""
    recorder = Recorder("F 0.0@w0", "LOAD 1@w0.1")
    with executing(recorder) as executor:
        tasks = executor.submit(ops("LOAD 0@w0.0; LOAD 1@w0.1; F 0.0@w0; F 1.0@w0"), None)
        assert recorder.began["LOAD 1@w0.1"].wait(PATIENCE_S)
        assert recorder.began["F 0.0@w0"].wait(PATIENCE_S)
        assert "F 1.0@w0" not in recorder.started
        for event in recorder.go.values():
            event.set()
        executor.wait(tasks)


def test_the_next_program_enters_while_this_one_still_steps():
    """Across programs the same rules hold: LOAD 1 of the next step waits for STEP 1 of this one, LOAD 0 does not."""
    step, following = "GRAD 1@w0; GRAD 0@w0; STEP 0; STEP 1", "LOAD 0@w0.0; F 0.0@w0; LOAD 1@w0.1"
    recorder = Recorder("STEP 1")
    with executing(recorder) as executor:
        executor.submit(ops(step), None)
        tasks = executor.submit(ops(following), None)
        assert recorder.began["STEP 1"].wait(PATIENCE_S)
        executor.wait(tasks[:2])
        assert "LOAD 1@w0.1" not in recorder.started
        recorder.go["STEP 1"].set()
        executor.wait(tasks)


class Scrambler:
    """Lets ops end in an order that a random number generator chooses, one at a time.

    Every op announces itself and blocks; whoever drives the test picks one of those that wait. Lanes thus drift apart
    in every way that their dependencies allow.
    """

    def __init__(self):
        self.condition = threading.Condition()
        self.waiting: list[str] = []
        self.chosen: str | None = None
        self.ended: list[str] = []

    def __call__(self, op: Op, context: object) -> None:
        text = str(op)
        with self.condition:
            self.waiting.append(text)
            self.condition.notify_all()
            assert self.condition.wait_for(lambda: self.chosen == text, PATIENCE_S)
            self.waiting.remove(text)
            self.ended.append(text)
            self.chosen = None
            self.condition.notify_all()

    def drive(self, count: int, choose: Callable[[list[str]], str]) -> None:
        for _ in range(count):
            with self.condition:
                assert self.condition.wait_for(lambda: self.waiting and self.chosen is None, PATIENCE_S)
                self.chosen = choose(sorted(self.waiting))
                self.condition.notify_all()


@settings(max_examples=30)
@given(layout=layouts(), seed=st.integers(0, 1000))
def test_in_whatever_order_ops_end_no_op_starts_before_what_it_needs(layout: StepLayout, seed: int):
    """Two steps; ops are unique by position, so names carry it."""
    program = build_step(layout).ops
    scrambler = Scrambler()
    twice = [*program, *program]
    with executing(scrambler, layout.num_streamed, layout.rest) as executor:
        tasks = executor.submit(program, None) + executor.submit(program, None)
        scrambler.drive(len(twice), random.Random(seed).choice)
        executor.wait(tasks)
    hazards = Hazards(layout.num_streamed, layout.rest)
    # The n-th time that a text ended is the n-th op with this text: ops of one text share a lane, which is in order.
    position: dict[tuple[str, int], int] = {}
    for index, text in enumerate(scrambler.ended):
        position[text, sum(other == text for other in scrambler.ended[:index])] = index
    where = [position[str(op), [str(o) for o in twice[:i]].count(str(op))] for i, op in enumerate(twice)]
    for index, op in enumerate(twice):
        for earlier in hazards.dependencies(op):
            assert where[earlier] < where[index], f"{twice[earlier]} before {op}"


def failing_at(texts: dict[str, BaseException], seen: list[str]) -> Callable[[Op, object], None]:
    def handler(op: Op, context: object) -> None:
        seen.append(str(op))
        if str(op) in texts:
            raise texts[str(op)]

    return handler


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    "lane", ["up", "compute", "down", "host", "read", "write", "read:units", "write:units"]
)
def test_an_error_in_any_lane_is_raised_with_its_op_and_nothing_that_follows_runs(lane: str, staged: bool):
    layout = make_layout(
        3,
        clip=True,
        num_microbatches=2,
        offload=frozenset({1}),
        tiles=(2, 1, 1),
        num_tile_buffers=2,
        staged=staged,
        num_host_buffers=2,
    )
    program = build_step(layout).ops
    lane = f"{lane}:w0" if lane in ("up", "compute", "down") else lane
    candidates = [index for index, op in enumerate(program) if lane_of(op) == lane]
    if not candidates:
        assert not staged
        return
    where = candidates[len(candidates) // 2]
    text = str(program[where])
    seen: list[str] = []
    cause = ZeroDivisionError("planted")
    with executing(failing_at({text: cause}, seen), 3) as executor:
        first, second = executor.submit(program, None), executor.submit(program, None)
        for tasks in (first, second):
            with pytest.raises(ExecutionError, match="planted") as raised:
                executor.wait(tasks)
            assert raised.value.__cause__ is cause
            assert str(raised.value).startswith(f"{text} failed on lane {lane}")
        assert executor.failed
        followers = {str(op) for index, op in enumerate(program) if reaches(program, where, index)}
        assert not followers & set(seen[seen.index(text) + 1 :])


def reaches(program: tuple[Op, ...], source: int, target: int) -> bool:
    """Whether op ``target`` depends on op ``source``, directly or not."""
    hazards = Hazards(3, None)
    needs: list[set[int]] = []
    for op in program:
        direct = hazards.dependencies(op)
        needs.append(set(direct).union(*(needs[d] for d in direct)))
    return source in needs[target]


def test_an_error_on_purpose_is_raised_as_it_came():
    error = NonFiniteError("loss nan")
    with executing(failing_at({"F 0.0@w0": error}, [])) as executor:
        tasks = executor.submit(ops("LOAD 0@w0.0; F 0.0@w0"), None)
        with pytest.raises(NonFiniteError) as raised:
            executor.wait(tasks)
    assert raised.value is error


def test_an_interrupt_is_not_turned_into_an_error():
    with executing(failing_at({"CLIP": KeyboardInterrupt()}, [])) as executor:
        tasks = executor.submit(ops("CLIP"), None)
        with pytest.raises(KeyboardInterrupt):
            executor.wait(tasks)


def test_the_first_of_several_errors_is_the_one_that_is_told():
    both = Recorder("LOAD 0@w0.0", "STEP 1")

    def handler(op: Op, context: object) -> None:
        both(op, context)
        raise RuntimeError(str(op))

    with executing(handler) as executor:
        tasks = executor.submit(ops("LOAD 0@w0.0; STEP 1"), None)
        for event in both.began.values():
            assert event.wait(PATIENCE_S)
        both.go["STEP 1"].set()
        tasks[1].wait()
        both.go["LOAD 0@w0.0"].set()
        with pytest.raises(ExecutionError, match="STEP 1 failed on lane host"):
            executor.wait(tasks)


@pytest.mark.parametrize("where", ["around", "device"])
def test_a_lane_that_cannot_start_is_an_error_and_no_deadlock(where: str):
    @contextmanager
    def broken(lane: str) -> Iterator[None]:
        if lane.startswith("up"):
            raise OSError("no stream")
        yield

    device: Device = CpuDevice()
    options = {}
    if where == "around":
        options["around"] = broken
    else:
        device.lane = broken
    with executing(Recorder(), device=device, **options) as executor:
        tasks = executor.submit(ops("LOAD 0@w0.0; F 0.0@w0"), None)
        with pytest.raises(ExecutionError, match="lane up:w0 could not start: OSError: no stream"):
            executor.wait(tasks)


def test_after_an_error_a_new_executor_works():
    program = build_step(make_layout(3)).ops
    seen: list[str] = []
    handler = failing_at({str(program[3]): RuntimeError("planted")}, seen)
    with executing(handler) as executor, pytest.raises(ExecutionError):
        executor.wait(executor.submit(program, None))
    recorder = Recorder()
    with executing(recorder) as executor:
        executor.wait(executor.submit(program, None))
        assert not executor.failed
    assert sorted(recorder.ended) == sorted(map(str, program))


def test_closing_skips_what_is_queued_and_ends_every_thread():
    recorder = Recorder("LOAD 0@w0.0")
    with executing(recorder) as executor:
        executor.submit(ops("LOAD 0@w0.0; F 0.0@w0; LOAD 1@w0.1"), None)
        assert recorder.began["LOAD 0@w0.0"].wait(PATIENCE_S)
        closing = threading.Event()
        lane = executor._queues["up:w0"]
        executor._queues["up:w0"] = SimpleNamespace(put=lambda task: (lane.put(task), closing.set()))
        closer = threading.Thread(target=executor.close)
        closer.start()
        assert closing.wait(PATIENCE_S)
        recorder.go["LOAD 0@w0.0"].set()
        closer.join(PATIENCE_S)
        assert not closer.is_alive()
    assert recorder.ended == ["LOAD 0@w0.0"]


def test_an_executor_that_never_ran_closes_twice():
    with executing(Recorder()) as executor:
        executor.close()


def test_lanes_run_inside_their_contexts_on_threads_of_their_own():
    entered: list[tuple[str, str]] = []
    left: list[str] = []

    @contextmanager
    def around(lane: str) -> Iterator[None]:
        entered.append((lane, threading.current_thread().name))
        yield
        left.append(lane)

    threads: dict[str, str] = {}

    def handler(op: Op, context: object) -> None:
        threads[lane_of(op)] = threading.current_thread().name

    with executing(handler, around=around) as executor:
        executor.wait(executor.submit(ops("LOAD 0@w0.0; F 0.0@w0; CLIP"), None))
        assert left == []
    lanes = {"up:w0", "compute:w0", "host"}
    assert sorted(entered) == sorted((lane, lane) for lane in lanes)
    assert threads == {lane: lane for lane in lanes}
    assert set(left) == lanes


def test_every_op_leaves_an_event_that_says_what_it_waited_for():
    with executing(Recorder()) as executor:
        executor.wait(executor.submit(ops("LOAD 0@w0.0; F 0.0@w0"), None))
        events = {str(event.op): event for event in executor.events}
    assert events.keys() == {"LOAD 0@w0.0", "F 0.0@w0"}
    load, forward = events["LOAD 0@w0.0"], events["F 0.0@w0"]
    assert (load.lane, forward.lane) == ("up:w0", "compute:w0")
    assert load.start_s <= load.end_s <= forward.start_s <= forward.end_s
    assert str(forward.waited_for) in ("None", "LOAD 0@w0.0")


def test_contexts_reach_the_handler_and_are_let_go():
    class Context:
        pass

    seen = []
    with executing(lambda op, context: seen.append(context)) as executor:
        context = Context()
        tasks = executor.submit(ops("CLIP; STEP 0"), context)
        executor.wait(tasks)
        assert seen == [context, context]
        assert [task.context for task in tasks] == [None, None]
        assert [task.dependencies for task in tasks] == [(), ()]


def test_what_is_done_is_forgotten():
    """However many programs have run, only the last one's tasks are remembered."""
    program = build_step(make_layout(3)).ops
    with executing(Recorder()) as executor:
        for _ in range(20):
            executor.wait(executor.submit(program, None))
        assert len(executor._recent) <= len(program)


class Marks(CpuDevice):
    """A device whose work is done later than its ops return, like a stream."""

    def __init__(self):
        super().__init__()
        self.waits: list[tuple[str, str]] = []

    class Mark(str):
        def query(self) -> bool:
            return False

    def record(self, lane: str) -> "Marks.Mark":
        return self.Mark(lane)

    def wait(self, lane: str, mark: str) -> None:
        self.waits.append((lane, str(mark)))


def test_lanes_order_themselves_behind_the_marks_of_others():
    device = Marks()
    with executing(Recorder(), device=device) as executor:
        executor.wait(executor.submit(ops("LOAD 0@w0.0; F 0.0@w0; F 1.0@w0"), None))
    assert ("compute:w0", "up:w0") in device.waits
    assert ("compute:w0", "compute:w0") not in device.waits  # a lane is in order
    assert ("", "compute:w0") in device.waits  # whoever waits for a task waits for its mark
