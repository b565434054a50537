"""Watch the steps of a run: end one that hangs, and trace some under torch.profiler.

It looks at one number: how many ops have ended, and how many pieces of a checkpoint were written. A step is stalled
when that number has not changed for a multiple of the median step, and for some minutes at least: an op that takes ten
steps' time is stuck, a slow step whose ops end one after the other is not. Before there is a measured step the multiple
is that of the predicted one.

Time is counted in ticks. A tick that took longer than it should counts as one tick, whatever the clock says: while the
process is stopped, or the machine sleeps, the run is not stalled.

What happens when it is, in this order:

1. A report is written: what each lane waits for, where the program stands, the stacks of all threads. It has
   `REPORT_S` for that; a disk that does not answer does not answer the watchdog either. One message says which lane
   hangs, in which op, and what to look at: it is announced, or else it is the error that the run ends with.
2. To abort, the executor is told the error. Ops that have not begun are skipped, so as soon as the op under way comes
   back, the run ends as after any other error: threads are joined, memory and files given back.
3. If the run has not ended after `GRACE_S`, the op does not come back. A thread in the kernel cannot be ended, and
   memory that the kernel may still write to must not be given back. There is no orderly way out: the process ends.
"""

import contextlib
import faulthandler
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from torch.profiler import ProfilerActivity, profile

from outsize import files
from outsize.accelerators import VENDORS, kind_here
from outsize.compat.torch_private import of_all_threads
from outsize.errors import StalledError
from outsize.planner.program.program import lane_named
from outsize.runtime.engine.executor import Waiting
from outsize.runtime.engine.op_handlers import OpRanges
from outsize.units import format_seconds

TICK_S = 1.0
GRACE_S = 30.0
REPORT_S = 10.0
STALLED_STATUS = 3
_REMEMBERED_STEPS = 20
# Lanes that a message names of those that wait.
_NAMED_LANES = 4
# What to look at, by the kind of lane that hangs.
_DISK = "The disk does not answer: look at the kernel log (dmesg), and at who else uses that disk"
_ADVICE: Mapping[str, str] = {
    "compute": "The model's code or a kernel does not come back: look at that lane's thread in the report, on a GPU "
    "also at nvidia-smi and dmesg",
    "up": "A copy over the link does not end: look at nvidia-smi and dmesg",
    "down": "A copy over the link does not end: look at nvidia-smi and dmesg",
    "peer": "A copy between devices does not end: look at nvidia-smi and dmesg",
    "host": "The optimizer does not come back: look whether other processes hold the cores, or the machine swaps",
    "net": "Other ranks have not come: look at their log.txt and at the reports of their own stalls",
    **dict.fromkeys(("read", "write", "commit", "store"), _DISK),
}
_NOTHING = (
    "No op is under way: look at the main thread in the report; data, a tracker or the caller's code may hang"
)


class Watched(Protocol):
    """What is asked of an engine."""

    @property
    def num_ended(self) -> int:
        """Changes when an op ends, or a piece of a checkpoint was written."""

    def waiting(self) -> Mapping[str, Waiting]:
        """Return for each lane with unfinished work its first unfinished op."""

    def position(self) -> str:
        """Where the program stands."""

    def give_up(self, error: BaseException) -> None:
        """Begin no more ops, and raise ``error`` to whoever waits."""


class Watchdog:
    """A context manager that watches from `watch` on, until it is left.

    Args:
        run_dir: where reports go.
        announce: called with lines for people, from the watchdog's thread.
        action: ``abort``, ``report`` or ``ignore``.
        factor: limit in median steps.
        floor_s: least limit, in seconds.
        predicted_step_s: stands for the median until a step was measured; None where nothing was predicted.
        links_are_disk: whether lanes ``up`` and ``down`` move bytes from and to the disk.

    Attributes:
        doing: what is watched where that is no step; empty for a step.
        saved: whether there is something to go on from after so many steps, asked without a disk.
        setting: what says ``floor_s``; empty where nobody can.
        tick_s: seconds between two looks.
        grace_s: seconds that a run has to end after it was given up.
        end_process: ends the process with a status, without leave.
    """

    def __init__(
        self,
        run_dir: Path,
        announce: Callable[[str], None],
        *,
        action: str,
        factor: float,
        floor_s: float,
        predicted_step_s: float | None = None,
        links_are_disk: bool = False,
        tick_s: float = TICK_S,
        grace_s: float = GRACE_S,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._engine: Watched | None = None
        self._num_made: Callable[[], int] = lambda: 0
        self._run_dir = run_dir
        self._announce = announce
        self._action = action
        self._factor = factor
        self._floor_s = floor_s
        self._predicted_step_s = predicted_step_s or 0.0
        self._tick_s = min(tick_s, floor_s / 4)
        self._grace_s = grace_s
        self._end_process = end_process
        self._steps_s: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._links_are_disk = links_are_disk
        self.doing = ""
        self.saved: Callable[[int], bool] = lambda _: True
        self.setting = "train.stall_floor_s="
        self._step = 0
        self._reported = -1
        self._ended = -1
        self._quiet_s = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def limit_s(self) -> float:
        """Seconds without progress after which a step is stalled."""
        return max(self._floor_s, self._factor * self.typical_step_s)

    @property
    def typical_step_s(self) -> float:
        """Seconds of the median step, or of the predicted one; 0 where neither is known."""
        return statistics.median(self._steps_s) if self._steps_s else self._predicted_step_s

    @property
    def _reason(self) -> str:
        if self.limit_s <= self._floor_s:
            return f"more than {self.setting}{self._floor_s:g}{'' if self.setting else ' s'}"
        kind = f"median of {len(self._steps_s)} steps," if self._steps_s else "predicted step,"
        return f"more than {self._factor:g} times the {kind} {format_seconds(self.typical_step_s)}"

    def watch(self, engine: Watched, step: int, num_made: Callable[[], int] = lambda: 0) -> None:
        """Watch from now on.

        Args:
            engine: what is watched.
            step: that it begins with, counted from 1.
            num_made: grows while data are made that the step may wait for.
        """
        self._engine, self._step, self._num_made = engine, step, num_made

    def step_ended(self, seconds: float) -> None:
        """Take note of how long a step took; the next one is under way."""
        self._steps_s.append(seconds)
        self._step += 1

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Call what is watched ``what`` while the body runs: it is no step."""
        self.doing = what
        try:
            yield
        finally:
            self.doing = ""

    def __enter__(self) -> "Watchdog":
        if self._action != "ignore":
            self._thread = threading.Thread(target=self._run, name="outsize-watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        # The collector may let go of a model, and of its watchdog, in any thread, this one too.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def look(self, elapsed_s: float) -> None:
        """Look once, ``elapsed_s`` after the look before; the watchdog's thread does so at every tick."""
        if self._engine is None:
            return
        ended = self._engine.num_ended + self._num_made()
        quiet = ended == self._ended
        self._quiet_s = self._quiet_s + min(elapsed_s, 2 * self._tick_s) if quiet else 0.0
        self._ended = ended
        if self._quiet_s > self.limit_s and self._reported != self._step:
            self._reported = self._step
            self._stalled(self._engine, self._quiet_s)

    def _run(self) -> None:
        now = time.monotonic()
        while not self._stop.wait(self._tick_s):
            before, now = now, time.monotonic()
            self.look(now - before)

    def _stalled(self, engine: Watched, quiet_s: float) -> None:
        waiting = engine.waiting()
        path = self._run_dir / f"stall-{self._step:08d}.txt"
        message = (
            f"{self.doing or f'step {self._step}'}: nothing has ended for {format_seconds(quiet_s)}, {self._reason}. "
            f"{self._hung(waiting)}. {path} says where every thread stands"
        )
        lanes = "\n".join(f"{lane}: {what}" for lane, what in waiting.items())
        announced = f"stalled: {message}" if self._action != "abort" else ""
        # On a thread of its own: the disk that does not answer may be the one that reports go to.
        reporter = threading.Thread(
            target=self._report,
            args=(path, [message, lanes, engine.position()], announced),
            name="outsize-report",
            daemon=True,
        )
        reporter.start()
        reporter.join(REPORT_S)
        if self._action == "abort":
            goes_on = (
                "Go on with --resume auto"
                if self.saved(self._step - 1)
                else "Nothing is saved yet, --resume auto starts with step 1 again"
            )
            error = StalledError(
                f"{message}. {goes_on}; train.stall_floor_s and train.on_stall say what a stall is"
            )
            # On a thread of its own, too: a call into a driver or a network that hangs may hang itself.
            giver = threading.Thread(
                target=engine.give_up, args=(error,), name="outsize-give-up", daemon=True
            )
            giver.start()
            giver.join(REPORT_S)
            if not self._stop.wait(self._grace_s):
                sys.stderr.write(f"outsize: StalledError: {error}\n")
                sys.stderr.flush()
                self._end_process(STALLED_STATUS)

    def _hung(self, waiting: Mapping[str, Waiting]) -> str:
        """Describe a stall: hanging lane and op, waiting lanes, and places to look at."""
        hung = {lane: what.op for lane, what in waiting.items() if not what.waits_for}
        if not hung:
            return _NOTHING
        (lane, op), *others = hung.items()
        line = f"Lane {lane} hangs in {op}"
        if others:
            line += f", and so {'does' if len(others) == 1 else 'do'} {_listed([name for name, _ in others])}"
        behind = [name for name in waiting if name not in hung]
        if behind:
            line += f"; {_listed(behind)} {'waits' if len(behind) == 1 else 'wait'} for it"
        kind = lane_named(lane).family
        return f"{line}. {_DISK if self._links_are_disk and kind in ('up', 'down') else _ADVICE[kind]}"

    def _report(self, path: Path, parts: list[str], announced: str) -> None:
        # Where nothing can be written any more, the report is what stderr shows of it.
        with contextlib.suppress(OSError):
            files.write_text(path, "\n\n".join([*parts, _stacks()]) + "\n")
        with contextlib.suppress(Exception):  # the caller's own; a thread that watches does not end of it
            if announced:
                self._announce(announced)


def _listed(lanes: Sequence[str]) -> str:
    more = len(lanes) - _NAMED_LANES
    return ", ".join(lanes[:_NAMED_LANES]) + (f" and {more} more lanes" if more > 0 else "")


def _stacks() -> str:
    """Return what every thread is doing, by its name."""
    # In memory, where the system has such files: the temporary directory may be full, or be the disk that hangs.
    in_memory = sys.platform == "linux"
    with os.fdopen(os.memfd_create("stacks"), "w+") if in_memory else tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    for thread in threading.enumerate():
        text = text.replace(f"Thread 0x{thread.ident or 0:016x}", f"Thread {thread.name}")
    return text


PROFILE = "profile.json"
# Steps of this process that are left alone: kernels and caches warm up. The first one recorded is that of
# timeline.json.
FIRST_PROFILED = 2


class StepProfiler:
    """Records some steps; a context manager.

    Args:
        run_dir: where the trace goes.
        num_steps: that are recorded; 0 records none.
        ranges: switched on meanwhile.
    """

    def __init__(self, run_dir: Path, num_steps: int, ranges: OpRanges) -> None:
        self._path = run_dir / PROFILE
        self._num_steps = num_steps
        self._ranges = ranges
        self._num_ended = 0
        self._profile: Any = None

    def step_ended(self, settle: Callable[[], None]) -> bool:
        """Begin or end a record between two steps; returns whether a trace has been written.

        Args:
            settle: returns when nothing of the step is under way any more: units may still have to be stepped when its
                loss is known, and they belong to its record.
        """
        self._num_ended += 1
        begins = self._num_steps > 0 and self._num_ended == FIRST_PROFILED
        ends = self._profile is not None and self._num_ended == FIRST_PROFILED + self._num_steps
        if begins or ends:
            settle()
        if begins:
            self._begin()
        return ends and self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def _begin(self) -> None:
        kinds = [ProfilerActivity.CPU]
        kind = kind_here()
        if kind is not None and VENDORS[kind].activity:
            kinds.append(getattr(ProfilerActivity, VENDORS[kind].activity))
        # Lanes are threads that stand already: without this only those that begin from here on would be seen.
        self._profile = profile(activities=kinds, experimental_config=of_all_threads(), acc_events=True)
        self._profile.__enter__()
        self._ranges.on = True

    def _end(self) -> bool:
        if self._profile is None:
            return False
        self._ranges.on = False
        self._profile.__exit__(None, None, None)
        self._profile.export_chrome_trace(str(self._path))
        self._profile = None
        return True
