"""Calls of a device's driver: streams, pinned host memory, and what ends work on a device that may have failed."""

import logging
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from outsize.accelerators import Devices, module_of, vendor_of
from outsize.errors import ExecutionError

_log = logging.getLogger(__name__)


# Streams that nobody uses, by device and name: libraries keep tens of MiB for each stream that has ever multiplied.
_UNUSED: defaultdict[tuple[torch.device, str], list[torch.Stream]] = defaultdict(list)


class Streams:
    """The streams of one accelerator, of all workers on it: one for each lane, and one for all lanes that compute.

    What one worker makes and another uses is copied between devices, which orders their streams; within one it is not.
    """

    def __init__(self, device: Devices) -> None:
        self._device = device.torch_device
        self._torch = module_of(device.kind)
        self._by_lane: dict[str, torch.Stream] = {}

    def of(self, lane: str) -> torch.Stream:
        """Return the stream of a lane; made when it is first asked for, or one that another run has given back."""
        name = _shared(lane)
        stream = self._by_lane.get(name)
        if stream is None:
            # A worker's thread and another's, which touches the same device, may both come first.
            try:
                candidate = _UNUSED[self._device, name].pop()
            except IndexError:
                candidate = self._torch.Stream(self._device)
            stream = self._by_lane.setdefault(name, candidate)
            if stream is not candidate:
                _UNUSED[self._device, name].append(candidate)
        return stream

    def current(self, lane: str) -> AbstractContextManager[Any]:
        """Return a context in which the calling thread works on the stream of a lane."""
        context: AbstractContextManager[Any] = self._torch.stream(self.of(lane))
        return context

    def get(self, lane: str) -> torch.Stream | None:
        """Return the stream of a lane; None where it has none."""
        return self._by_lane.get(_shared(lane))

    def clear(self) -> bool:
        """Give all streams back; return whether there was one."""
        had_any = bool(self._by_lane)
        while self._by_lane:
            name, stream = self._by_lane.popitem()
            _UNUSED[self._device, name].append(stream)
        return had_any


def _shared(lane: str) -> str:
    return "compute" if lane.startswith("compute:") else lane


@contextmanager
def last_calls(device: str | torch.device) -> Iterator[None]:
    """Context of what brings work on a device to its end.

    A device that has failed says so at every call. Where an error is on its way already, that one tells what failed,
    and what fails here is logged.

    Raises:
        ExecutionError: the device has failed, and nothing else says so.
    """
    cause = sys.exception()
    try:
        yield
    except RuntimeError as error:
        if cause is None:
            raise ExecutionError(f"{device} has failed: {error}") from error
        _log.warning("%s has failed: %s", device, error)


class DriverPinner:
    """Pins host memory by the driver of a kind of device, for all devices of the kind in this process.

    Args:
        device: one of them, which computes: the driver is asked in its context, as another's takes memory there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._row = device, vendor_of(device)

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin the pages of a range.

        Raises:
            OSError: the driver refuses, or torch has no way to ask it; the range is as it was.
        """
        if self._row.register is None:
            raise OSError(f"torch pins no memory that it has not allocated for {self._row.title}")
        with module_of(self._device).device(self._device):
            self._row.register(address, num_bytes)

    def unpin(self, address: int) -> None:
        """Undo `pin` of the range that starts at ``address``."""
        assert self._row.unregister is not None
        with module_of(self._device).device(self._device):
            self._row.unregister(address)


def pinner_of(device: Devices) -> DriverPinner | None:
    """Return what pins host memory for copies to a device; None where copies do not ask for it."""
    return DriverPinner(device.torch_device) if device.accelerated else None
