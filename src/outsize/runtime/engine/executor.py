"""Walks programs: one thread per lane, each taking its ops in program order and waiting for what they depend on.

The story of one op, in the order in which it happens:

1. `submit` (the caller's thread) asks `Hazards` which earlier ops this one must wait for, wraps it in a task whose
   gate is shut, and puts it into its lane's queue.
2. The lane's thread takes it, passes the gates of the tasks it depends on, and orders itself behind their marks
   (CUDA events; nothing on the CPU).
3. It runs the op's handler between two marks, notes the event for the timeline, and opens the gate. Where there are
   marks, the device's own clock says later when the op began and ended, and what it really waited for.

A lane is in order and every dependency is earlier in program order, so the earliest unfinished op can always run:
there is no deadlock. When a handler raises, its error is kept, every later op is skipped, and `wait` raises it.

A lane that waits for its next op holds nothing but its queue. So an executor that nobody closed goes when nobody uses
it, with all that its handlers hold, and its lanes end; and none of them keeps the interpreter from ending.

libgomp starts a team of its own for each thread that computes, and keeps it. While all teams together have more threads
than there are cores, none spins (``gomp_throttled_spin_count_var`` of its env.c): each of thousands of loops in a step
then puts threads to sleep and wakes them up, which made steps up to a tenth longer on two cores (docs/log.md).

Ending the team also makes results independent of what the process computed before: a helping thread keeps for good the
number of threads that holds at its first loop inside a loop (``lazy_init_num_threads`` of ATen/Parallel.h), and MKL
divides that thread's products by it.
"""

import contextlib
import ctypes
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple, Protocol

from outsize.errors import ExecutionError, OutsizeError
from outsize.planner.program.hazards import Hazards
from outsize.planner.program.program import Op
from outsize.planner.simulate.simulator import Event
from outsize.runtime.device.device import Device

# Of ops that nobody asks about, only the last are remembered: each holds two marks.
MOST_TIMED = 100_000


class LaneTask:
    """An op on its way: its gate is a lock that the lane's thread releases when the op is done."""

    __slots__ = ("context", "dependencies", "done", "gate", "lane", "mark", "op")

    def __init__(self, op: Op, lane: str, context: Any, dependencies: tuple["LaneTask", ...]) -> None:
        self.op, self.lane, self.context, self.dependencies = op, lane, context, dependencies
        self.mark: Any = None
        self.done = False  # as against skipped
        self.gate = threading.Lock()
        self.gate.acquire()

    def passed(self) -> bool:
        """Whether the op is done, as far as the host knows."""
        return not self.gate.locked()

    def wait(self) -> None:
        """Return when the op is done, as far as the host knows."""
        with self.gate:
            pass  # not acquire() and release(): Ctrl-C between the two would shut it for the lanes behind it


class _Timed(NamedTuple):
    """An op whose work ends later than its handler: its marks, and those of the ops that it ran behind."""

    lane: str
    op: Op
    begun: Any
    ended: Any
    behind: tuple[tuple[Op, Any], ...]


class Waiting(NamedTuple):
    """The first unfinished op of a lane.

    Attributes:
        op: its text.
        waits_for: texts of the unfinished ops that it waits for; empty where it is running.
    """

    op: str
    waits_for: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.op} waits for {', '.join(self.waits_for)}" if self.waits_for else f"{self.op} is running"
        )


class Handler(Protocol):
    """Does what an op says."""

    def __call__(self, op: Op, context: Any) -> None:
        """Run ``op`` for the step that ``context`` describes."""


class Executor:
    """Runs the ops of successive programs on lanes.

    Args:
        device: gives lanes their streams and ops their marks.
        lane_of: the lane of an op.
        handler: does what an op says.
        hazards: finds what an op must wait for, over successive programs.
        around: a context manager factory entered by each lane's thread, given the lane's name.

    Attributes:
        events: ops that have ended, where they end with their handler.
        num_ended: tells whether anything has ended since it was looked at last; long ops add to it on their way.
    """

    def __init__(
        self,
        device: Device,
        lane_of: Callable[[Op], str],
        handler: Handler,
        hazards: Hazards,
        around: Callable[[str], Any] | None = None,
    ) -> None:
        self._device = device
        self._lane_of = lane_of
        self._handler = handler
        self._hazards = hazards
        self._around = around
        self._queues: dict[str, _Queue] = {}
        self._threads: list[threading.Thread] = []
        self._recent: dict[int, LaneTask] = {}
        self._submitted = 0
        self._failure: tuple[BaseException, str] | None = None
        self._closing = False
        self.num_ended = 0
        self.events: list[Event] = []
        self._timed: deque[_Timed] = deque(maxlen=MOST_TIMED)
        self._ended_s: dict[str, float] = {}
        weakref.finalize(self, _end_lanes, self._queues).atexit = False

    def submit(self, ops: Iterable[Op], context: Any) -> list["LaneTask"]:
        """Queue the ops of one program; returns their tasks, in order."""
        tasks = []
        for op in ops:
            numbers = self._hazards.dependencies(op)
            earlier = tuple(
                task for n in numbers if (task := self._recent.get(n)) is not None and not _settled(task)
            )
            task = LaneTask(op, self._lane_of(op), context, earlier)
            self._recent[self._submitted] = task
            self._submitted += 1
            tasks.append(task)
            self._queue(task.lane).put((self, task))
        self._forget()
        return tasks

    def wait(self, tasks: Iterable["LaneTask"]) -> None:
        """Return when all ``tasks`` are done.

        Raises:
            OutsizeError: an op raised one; it is raised as it came.
            ExecutionError: an op raised anything else, which is chained.
        """
        for task in tasks:
            task.wait()
            if task.mark is not None:
                try:
                    self._device.wait("", task.mark)
                except RuntimeError as late:  # of a device that has failed since
                    self._fail(late, f"{task.op} on {task.lane}")
        if self._failure is not None:
            error, what = self._failure
            try:
                if isinstance(error, OutsizeError) or not isinstance(error, Exception):
                    raise error
                raise ExecutionError(f"{what}: {self._device.explain(error)}") from error
            finally:
                del error  # else error and frame hold each other, and the activations with them

    def fail(self, error: BaseException) -> None:
        """Skip all ops that have not begun; `wait` raises ``error`` once those that have are done."""
        self._fail(error, "")

    @property
    def failed(self) -> bool:
        """Whether an op has raised; later ops are skipped."""
        return self._failure is not None

    def close(self) -> None:
        """Let each lane finish the op it is in, skip what is queued, and end the threads; idempotent."""
        self._closing = True
        _end_lanes(self._queues)
        for thread in self._threads:
            thread.join()
        self._queues.clear()
        self._threads.clear()
        self._recent.clear()
        self._failure = None
        self._closing = False

    @property
    def num_noted(self) -> int:
        """Ops that have ended since the last `take_events`, on the device or not yet."""
        return len(self.events) + len(self._timed)

    def take_events(self) -> list[Event]:
        """Return the ops that have ended since the last call, on the device too, and forget them."""
        events, self.events = self.events, []
        for _ in range(len(self._timed)):
            timed = self._timed.popleft()
            if timed.ended.query():
                events.append(self._event_of(timed))
            else:
                self._timed.append(timed)
        return events

    def _event_of(self, timed: _Timed) -> Event:
        """What the device's clock says of an op: it could start when the last of its lane and of the others ended."""
        start, end = self._device.seconds(timed.begun), self._device.seconds(timed.ended)
        free = self._ended_s.get(timed.lane, start)
        self._ended_s[timed.lane] = end
        others = [(self._device.seconds(mark), op) for op, mark in timed.behind]
        ready, last = max(others, key=lambda other: other[0], default=(free, None))
        return Event(
            lane=timed.lane,
            op=timed.op,
            start_s=start,
            end_s=end,
            waited_s=max(min(ready, start) - free, 0.0),
            waited_for=last if ready > free else None,
        )

    def waiting(self) -> dict[str, Waiting]:
        """Return for each lane with unfinished work its first unfinished op."""
        waits: dict[str, Waiting] = {}
        for task in list(self._recent.values()):
            if task.lane not in waits and not task.passed():
                reasons = tuple(str(d.op) for d in task.dependencies if not d.passed())
                waits[task.lane] = Waiting(str(task.op), reasons)
        return waits

    def _queue(self, lane: str) -> "_Queue":
        if lane not in self._queues:
            self._queues[lane] = queue.SimpleQueue()
            thread = threading.Thread(
                target=_run_lane, args=(lane, self._queues[lane]), name=lane, daemon=True
            )
            thread.start()
            self._threads.append(thread)
        return self._queues[lane]

    def _enter(self, lane: str, stack: contextlib.ExitStack) -> None:
        """Set the calling thread up as a lane, until ``stack`` ends."""
        try:
            if self._around is not None:
                stack.enter_context(self._around(lane))
            stack.enter_context(self._device.lane(lane))
        except BaseException as error:  # its tasks are skipped, so that nobody waits for them
            self._fail(error, f"lane {lane} could not start")

    def _run(self, task: LaneTask, lane: str) -> None:
        ready = time.perf_counter()
        last: Op | None = None
        for dependency in task.dependencies:
            if not dependency.passed():
                dependency.wait()
                last = dependency.op
        if self._failure is not None or self._closing:
            task.context = None
            return
        try:
            for dependency in task.dependencies:
                if dependency.mark is not None and dependency.lane != lane:
                    if not dependency.mark.query():
                        last = dependency.op
                    self._device.wait(lane, dependency.mark)
            start, begun = time.perf_counter(), self._device.record(lane)
            self._handler(task.op, task.context)
            task.mark = self._device.record(lane)
        except BaseException as error:  # kept for the thread that waits: a lane never dies and never prints
            self._fail(error, f"{task.op} failed on lane {lane}")
        else:
            task.done = True
            self._note(task, begun, ready, start, last)
        task.context = None

    def _note(
        self, task: LaneTask, begun: Any, ready_s: float, start_s: float, waited_for: Op | None
    ) -> None:
        """Keep what the timeline will say of an op."""
        if task.mark is not None:
            others = ((d.op, d.mark) for d in task.dependencies if d.lane != task.lane)
            behind = tuple((op, mark) for op, mark in others if mark is not None)
            self._timed.append(_Timed(task.lane, task.op, begun, task.mark, behind))
            return
        self.events.append(
            Event(
                lane=task.lane,
                op=task.op,
                start_s=start_s,
                end_s=time.perf_counter(),
                waited_s=start_s - ready_s,
                waited_for=waited_for,
            )
        )

    def _fail(self, error: BaseException, what: str) -> None:
        """Keep the first error."""
        if self._failure is None:
            self._failure = (error, what)

    def _forget(self) -> None:
        """Drop tasks that are done on the host and, having no mark, on the device too."""
        done = [number for number, task in self._recent.items() if _settled(task)]
        for number in done:
            del self._recent[number]


_Queue = queue.SimpleQueue[tuple[Executor, LaneTask] | None]


def _run_lane(lane: str, tasks: _Queue) -> None:
    with contextlib.ExitStack() as stack:
        entered = False
        while (work := tasks.get()) is not None:
            executor, task = work
            if not entered:
                executor._enter(lane, stack)
                entered = True
            executor._run(task, lane)
            task.dependencies = ()
            executor.num_ended += 1  # lanes may overtake each other here; it is asked only if it has changed
            task.gate.release()
            del executor, task, work


def _end_lanes(queues: dict[str, _Queue]) -> None:
    for tasks in list(queues.values()):
        tasks.put(None)


def _settled(task: LaneTask) -> bool:
    return task.passed() and (task.mark is None or task.mark.query())


def release_team() -> None:
    """End the threads that wait for loops of the calling thread; its next loop starts others, in some 50 us."""
    library = _libgomp()
    if library is not None:
        library.omp_pause_resource_all(1)  # omp_pause_soft: settings stay


@cache
def _libgomp() -> ctypes.CDLL | None:
    """Return the OpenMP that torch is linked with where it is GNU's; that of LLVM pauses the teams of all threads."""
    try:
        library = ctypes.CDLL("libtorch_cpu.so")
    except OSError:
        return None
    is_gnu = hasattr(library, "omp_pause_resource_all") and not hasattr(library, "__kmpc_fork_call")
    return library if is_gnu else None
