"""The stream of the caller's thread, which computes: what it has done, what it waits for and for how long."""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from outsize.accelerators import is_accelerator, module_of


class Caller:
    """Orders the caller's work and that of loader and lanes; on a CPU all are done when they return.

    Args:
        device: where it computes.
        others: where outputs of a model may lie as well, and what the caller makes of them.
    """

    def __init__(self, device: torch.device, *others: torch.device) -> None:
        self._device = device
        self._devices = [each for each in (device, *others) if is_accelerator(each)]
        self._waits: deque[tuple[Any, Any]] = deque()
        self._waited_s = 0.0

    def mark(self) -> Any:
        """Return a mark of all that the caller has enqueued; None where it is done."""
        if self._device not in self._devices:
            return None
        event = module_of(self._device).Event(enable_timing=True)
        event.record(self._stream())
        return event

    def wait(self, mark: Any) -> None:
        """Have what the caller enqueues from now on wait for a mark of the loader."""
        if mark is None:
            return
        before = self.mark()
        self._stream().wait_event(mark)
        self._waits.append((before, self.mark()))

    def waited_s(self) -> float:
        """Seconds that the device waited for marks so far."""
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            self._waited_s += before.elapsed_time(after) / 1e3
        return self._waited_s

    def take(self, value: Any) -> None:
        """Keep the memory of a tensor that a lane has made until what the caller enqueues with it is done."""
        if isinstance(value, Tensor) and is_accelerator(value.device):
            value.record_stream(module_of(value.device).current_stream(value.device))

    def finish(self) -> None:
        """Return when all that the caller has enqueued is done."""
        for device in self._devices:
            module_of(device).current_stream(device).synchronize()

    def _stream(self) -> Any:
        return module_of(self._device).current_stream(self._device)
