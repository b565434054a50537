"""Ends of a run before its last step: signals that ask it to stop, and what it says where it fails.

Ctrl-C, SIGTERM, SIGHUP: while there are steps to save, the first asks the run to finish and save, the second stops.

A signal is answered at once, though a step may take minutes: its handler puts an answer into a queue, and a thread that
waits for it speaks. The handler may not speak itself, since what it interrupts may be writing to the same console.
"""

import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from outsize.checkpoint.checkpoint_state import latest, position_of
from outsize.config import MemoryConfig
from outsize.errors import OutsizeError
from outsize.model.sizes.model_spec import ModelSpec
from outsize.optim.optimizer_spec import WEIGHTS, Plane
from outsize.session.job.machine import home_file
from outsize.storage.committed import find_record


class Aftermath:
    """A context manager that tells what a run which fails has left; it tells nothing of one that did not begin.

    Args:
        memory: where its home is.
        run_dir: its directory.
        spec: its model.
        announce: told.
        planes: of a trained unit, at home.
        own: elements of each unit that this rank steps; None for all.
        whole: planes of which it holds all elements all the same.

    Attributes:
        begun: whether there have been steps.
    """

    def __init__(
        self,
        memory: MemoryConfig,
        run_dir: Path,
        spec: ModelSpec,
        announce: Callable[[str], None],
        planes: Mapping[str, Plane],
        own: Sequence[range] | None = None,
        whole: Collection[str] = (WEIGHTS,),
    ) -> None:
        self._planes = planes
        self._own, self._whole = own, whole
        self.begun = False
        self._memory = memory
        self._run_dir = run_dir
        self._spec = spec
        self._announce = announce

    def __enter__(self) -> "Aftermath":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None and self.begun:
            with contextlib.suppress(OutsizeError, OSError):  # the run ends with the error that it failed of
                self._announce(f"the run failed: {self.next_start()}")

    def next_start(self) -> str:
        """Say what `--resume auto` will do, by what lies on the disk.

        Raises:
            OutsizeError: it cannot be read.
        """
        saved = latest(self._run_dir)
        found = [(position_of(saved).step, saved.name)] if saved is not None else []
        home = home_file(self._memory, self._run_dir)
        record, _ = find_record(home, self._spec, self._planes, self._own, self._whole)
        if record is not None:
            found.append((record.state["step"], str(home)))
        if not found:
            return "nothing is saved yet, --resume auto starts with step 1 again"
        step, where = max(found)
        return f"--resume auto goes on after step {step}, from {where}"


# SIGHUP comes when a terminal closes; under nohup it is ignored, and stays so.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """While entered, a signal raises KeyboardInterrupt: whatever is under way is undone on its way out.

    Where `finish` is set, the first signal only sets `requested`. Signal handlers belong to the main thread; in any
    other this does nothing.

    Args:
        announce: called with a line for people, from a thread of this.

    Attributes:
        doing: what is being done before there are steps; whoever is interrupted meanwhile is told.
        finish: says what a run that is to end waits for; None where nobody looks at `requested`.
        requested: whether a signal has come since.
    """

    def __init__(self, announce: Callable[[str], None] = lambda _: None) -> None:
        self.doing = "it began"
        self.finish: Callable[[], str] | None = None
        self.requested = False
        self._announce = announce
        self._former: dict[int, Any] = {}
        # Its put is made for signal handlers; locks of other kinds may be held by what they interrupt.
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._speaker: threading.Thread | None = None

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._speaker = threading.Thread(target=self._speak, name="outsize-interrupt", daemon=True)
            self._speaker.start()
            heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._former = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()
        if self._speaker is not None:
            self._answers.put(None)
            self._speaker.join()
            self._speaker = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.finish is None:
            raise KeyboardInterrupt(f"interrupted while {self.doing}; no step was under way, nothing is lost")
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._answers.put("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    def _speak(self) -> None:
        while (name := self._answers.get()) is not None:
            if self.finish is not None:
                self._announce(f"{name} was heard: {self.finish()}")
