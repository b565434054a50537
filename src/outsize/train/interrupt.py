"""Ctrl-C and SIGTERM: while there are steps to save, the first asks the run to finish and save, the second stops it."""

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While entered, a signal raises KeyboardInterrupt, SIGTERM too: whatever is under way is undone on its way out.

    Where `can_finish` is set, the first signal only sets `requested`. Signal handlers belong to the main thread; in
    any other this does nothing.

    Attributes:
        can_finish: whether somebody looks at `requested`.
        requested: whether a signal has come since.
    """

    def __init__(self) -> None:
        self.can_finish = False
        self.requested = False
        self._former: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self.can_finish:
            raise KeyboardInterrupt
        self.requested = True
