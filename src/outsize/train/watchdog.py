"""A thread that notices when a step no longer gets anywhere, says where it stands, and gives it up if it may.

It looks at one number: how many ops have ended, and how many pieces of a checkpoint were written. A step is stalled
when that number has not changed for a multiple of the median step, and for some minutes at least: an op that takes ten
steps' time is stuck, a slow step whose ops end one after the other is not. Before there is a measured step the multiple
is that of the predicted one.

Time is counted in ticks. A tick that took longer than it should counts as one tick, whatever the clock says: while the
process is stopped, or the machine sleeps, the run is not stalled.

What happens when it is, in this order:

1. A report is written and announced: what each lane waits for, where the program stands, the stacks of all threads. It
   has `REPORT_S` for that; a disk that does not answer does not answer the watchdog either.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from outsize import files
from outsize.errors import StalledError
from outsize.units import format_seconds

TICK_S = 1.0
GRACE_S = 30.0
REPORT_S = 10.0
STALLED_STATUS = 3
_REMEMBERED_STEPS = 20


class Watched(Protocol):
    """What is asked of an engine."""

    @property
    def num_ended(self) -> int:
        """Changes when an op ends, or a piece of a checkpoint was written."""

    def waiting(self) -> dict[str, str]:
        """For each lane with unfinished work: its first unfinished op and what it waits for."""

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
        tick_s: float = TICK_S,
        grace_s: float = GRACE_S,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._engine: Watched | None = None
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
        self._doing = ""
        self._step = 0
        self._reported = -1
        self._ended = -1
        self._quiet_s = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def limit_s(self) -> float:
        """Seconds without progress after which a step is stalled."""
        return max(self._floor_s, self._factor * self._typical_step_s)

    @property
    def _typical_step_s(self) -> float:
        return statistics.median(self._steps_s) if self._steps_s else self._predicted_step_s

    @property
    def _reason(self) -> str:
        """What the limit is made of."""
        if self.limit_s <= self._floor_s:
            return f"more than train.stall_floor_s={self._floor_s:g}"
        kind = f"median of {len(self._steps_s)} steps," if self._steps_s else "predicted step,"
        return f"more than {self._factor:g} times the {kind} {format_seconds(self._typical_step_s)}"

    def watch(self, engine: Watched, step: int) -> None:
        """Watch from now on; ``engine`` begins with ``step``, counted from 1."""
        self._engine, self._step = engine, step

    def step_ended(self, seconds: float) -> None:
        """Take note of how long a step took; the next one is under way."""
        self._steps_s.append(seconds)
        self._step += 1

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Call what is watched ``what`` while the body runs: it is no step."""
        self._doing = what
        try:
            yield
        finally:
            self._doing = ""

    def __enter__(self) -> "Watchdog":
        if self._action != "ignore":
            self._thread = threading.Thread(target=self._run, name="outsize-watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def look(self, elapsed_s: float) -> None:
        """Look once, ``elapsed_s`` after the look before; the watchdog's thread does so at every tick."""
        if self._engine is None:
            return
        ended = self._engine.num_ended
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
        step = self._step
        waiting = engine.waiting()
        lanes = "; ".join(f"{lane}: {what}" for lane, what in waiting.items()) or "no op is under way"
        what = self._doing or f"step {step}"
        summary = f"{what}: nothing has ended for {format_seconds(quiet_s)}, {self._reason}; {lanes}"
        path = self._run_dir / f"stall-{step:08d}.txt"
        # On a thread of its own: the disk that does not answer may be the one that reports go to.
        reporter = threading.Thread(
            target=self._report, args=(path, summary, engine.position()), name="outsize-report", daemon=True
        )
        reporter.start()
        reporter.join(REPORT_S)
        if self._action == "abort":
            error = StalledError(
                f"{summary}. Look at the disk and at the kernel log (dmesg); {path} says where every thread stands. "
                "Go on with --resume auto; train.stall_floor_s and train.on_stall say when a step counts as stalled"
            )
            engine.give_up(error)
            if not self._stop.wait(self._grace_s):
                sys.stderr.write(f"outsize: StalledError: {error}\n")
                sys.stderr.flush()
                self._end_process(STALLED_STATUS)

    def _report(self, path: Path, summary: str, position: str) -> None:
        # Where nothing can be written any more, the report is what stderr shows of it.
        with contextlib.suppress(OSError):
            files.write_text(path, "\n\n".join([summary, position, _stacks()]) + "\n")
        with contextlib.suppress(Exception):  # the caller's own; a thread that watches does not end of it
            self._announce(f"stalled: {summary}; more in {path}")


def _stacks() -> str:
    """What every thread is doing."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
