"""The stream of the caller's thread, which computes: what it has done, what it waits for and for how long."""

from collections import deque
from typing import Any

import torch
from torch import Tensor


class Caller:
    """Orders the caller's work and that of loader and lanes; on a CPU all are done when they return."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waits: deque[tuple[Any, Any]] = deque()
        self._waited_s = 0.0

    def mark(self) -> Any:
        """Return a mark of all that the caller has enqueued; None where it is done."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, mark: Any) -> None:
        """Have what the caller enqueues from now on wait for a mark of the loader."""
        if mark is None:
            return
        before = self.mark()
        torch.cuda.current_stream(self._device).wait_event(mark)
        self._waits.append((before, self.mark()))

    def waited_s(self) -> float:
        """Seconds that the device waited for marks so far."""
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            self._waited_s += before.elapsed_time(after) / 1e3
        return self._waited_s

    def take(self, value: Any) -> None:
        """Keep the memory of a tensor that a lane has made until what the caller enqueues with it is done."""
        if isinstance(value, Tensor) and value.is_cuda:
            value.record_stream(torch.cuda.current_stream(self._device))

    def finish(self) -> None:
        """Return when all that the caller has enqueued is done."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
