"""Ctrl-C, SIGTERM, SIGHUP: while there are steps to save, the first asks the run to finish and save, the second stops.

A signal is answered at once, though a step may take minutes: its handler puts an answer into a queue, and a thread that
waits for it speaks. The handler may not speak itself, since what it interrupts may be writing to the same console.
"""

import queue
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

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
