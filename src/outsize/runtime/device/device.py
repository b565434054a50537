"""Devices behind one contract: where slots lie, how bytes get there, and what it means that an op is done.

* ``cpu``: the device's memory is RAM. An op is done when its function returns.
* ``emulated:N``: N workers on the CPU whose links are throttled, for tests and dry runs.
* accelerators, such as ``cuda:i``: each lane has a stream. An op is done on the host when it is enqueued and on the
  device when the event recorded after it has passed; a lane with a stream waits for the event on its stream, a host
  lane on its thread.
"""

import contextlib
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from outsize.accelerators import Devices, catch_up, check_here, module_of, new_event
from outsize.errors import ExecutionError
from outsize.hardware.machine_spec import DEVICE_SHARE
from outsize.planner.program.program import lane_named
from outsize.runtime.device.driver import Streams, last_calls
from outsize.runtime.device.heap import ResidentLimit
from outsize.storage.ledger import Arena, Ledger, Reservation
from outsize.units import format_bytes

# Of a budget's margin, for gaps between tensors; the rest is for other streams and for kernels that are loaded late.
MARGIN_AHEAD = 0.7


class Device(ABC):
    """What the executor and the ops need of a device.

    Attributes:
        name: as in the configuration.
        torch_device: where its tensors lie.
        in_place: whether host memory is its own, so that what rests there is used where it lies, and nothing copied.
        asynchronous: whether work is enqueued and done later, so that nothing reads values while it computes.
    """

    name: str
    torch_device: torch.device
    in_place: bool = False
    asynchronous: bool = False

    @abstractmethod
    def allocate(self, num_bytes: int, what: str) -> Tensor:
        """Return ``num_bytes`` of its memory as uint8, aligned to 4 KiB, held until `close`."""

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Copy between this device and the tier below, in order with the lane that calls."""
        into.copy_(source, non_blocking=True)

    def lane(self, name: str) -> AbstractContextManager[Any]:
        """Context in which the thread of lane ``name`` runs its ops."""
        return nullcontext()

    def record(self, lane: str) -> Any:
        """Return a mark of all work enqueued on ``lane``; None where work is done when it returns."""
        return None

    def wait(self, lane: str, mark: Any) -> None:  # noqa: B027 - nothing to wait for is the common case
        """Make ``lane`` wait for a mark of another lane."""

    def seconds(self, mark: Any) -> float:
        """Return when a mark passed, on the clock of `time.perf_counter`; only for marks that have."""
        raise NotImplementedError(f"{self.name} has no marks")

    def link(self, num_bytes: int) -> AbstractContextManager[None]:
        """Context of a copy of ``num_bytes`` that is not made by `copy`; takes as long as the link would."""
        return nullcontext()

    def crossing(self, num_bytes: int) -> AbstractContextManager[None]:
        """Context of a copy of ``num_bytes`` to another device; takes as long as what lies between them would."""
        return nullcontext()

    def behind(self, lane: str) -> AbstractContextManager[Any]:
        """Context in which another thread runs work in order with ``lane``."""
        return nullcontext()

    def here(self) -> Any:
        """Return a mark of all that the calling lane has enqueued; None where work is done when it returns."""
        return None

    def beside(self, mark: Any, work: Callable[[], None]) -> Any:
        """Run ``work`` behind ``mark``, but not behind what the lane enqueues later; return a mark of its end."""
        work()

    def rejoin(self, mark: Any) -> None:  # noqa: B027 - nothing to wait for is the common case
        """Have what the calling lane enqueues from now on wait for a mark of `beside`; None is none."""

    def explain(self, error: BaseException) -> str:
        """Return what an error of an op says; of one without memory, how much there was and what to set."""
        return f"{type(error).__name__}: {error}"

    def hold(self, tensor: Tensor, lane: str) -> None:  # noqa: B027 - only an asynchronous device must
        """Keep the memory of ``tensor`` from reuse until work enqueued on ``lane`` has passed."""

    def computing(self) -> AbstractContextManager[None]:
        """Return a context for one computation; where RAM is the device's memory, it keeps to the budget in it."""
        return nullcontext()

    def set_ahead(self, num_bytes: int, planned: int, lane: str) -> object:
        """Have ``num_bytes`` of all that is ``planned`` at hand for ``lane``, once what this returns is let go."""
        return None

    def look(self) -> None:  # noqa: B027 - most devices need no looking after
        """Hand free memory back where RAM is the device's memory and the process is over the budget."""

    @abstractmethod
    def close(self) -> None:
        """Finish all work and give memory back; idempotent."""


class CpuDevice(Device):
    """The machine's own cores and RAM.

    Args:
        name: as in the configuration.
        ledger: where its memory is reserved.
        limit: of the process's resident memory; None where it is nobody's promise.
        tier: of the ledger.
    """

    in_place = True

    def __init__(
        self,
        name: str = "cpu",
        ledger: Ledger | None = None,
        limit: ResidentLimit | None = None,
        *,
        tier: str = "device",
    ) -> None:
        self.name, self._limit = name, limit
        self.torch_device = torch.device("cpu")
        self._arena = Arena(ledger=ledger, tier=tier)

    def allocate(self, num_bytes: int, what: str) -> Tensor:
        """See `Device.allocate`."""
        return self._arena.take(num_bytes, what)

    def computing(self) -> AbstractContextManager[None]:
        """See `Device.computing`."""
        return nullcontext() if self._limit is None else self._limit.watched()

    def look(self) -> None:
        """See `Device.look`."""
        if self._limit is not None:
            self._limit.keep()

    def close(self) -> None:
        """See `Device.close`."""
        self._arena.close()


class EmulatedDevice(CpuDevice):
    """A worker on the CPU behind a link of a given rate, which each copy has for itself.

    Lanes make one copy per direction at a time; those of Muon's products beside them are not slowed by them.

    Args:
        name: for messages.
        ledger: where its memory is reserved.
        link_bytes_per_s: rate of the link in each direction; None for an unthrottled one.
        tier: of the ledger.
        peer_bytes_per_s: rate of copies to other devices; None for as fast as they go.
    """

    in_place = False

    def __init__(
        self,
        name: str,
        ledger: Ledger | None = None,
        link_bytes_per_s: float | None = None,
        *,
        tier: str = "device",
        peer_bytes_per_s: float | None = None,
    ) -> None:
        super().__init__(name, ledger, tier=tier)
        self._rate, self._peer_rate = link_bytes_per_s, peer_bytes_per_s

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Copy, and take as long as the emulated link would."""
        with self.link(into.nbytes):
            into.copy_(source)

    def link(self, num_bytes: int) -> AbstractContextManager[None]:
        """See `Device.link`."""
        return self._throttled(num_bytes, self._rate)

    def crossing(self, num_bytes: int) -> AbstractContextManager[None]:
        """See `Device.crossing`."""
        return self._throttled(num_bytes, self._peer_rate)

    @contextmanager
    def _throttled(self, num_bytes: int, bytes_per_s: float | None) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if bytes_per_s is not None:
            remaining = num_bytes / bytes_per_s - (time.perf_counter() - started)
            if remaining > 0:
                time.sleep(remaining)


class Accelerator(Device):
    """A device with memory and streams of its own; a stream for each lane that touches it.

    Args:
        device: one accelerator.
        ledger: where its memory is reserved.
        tier: of the ledger.
        streams: of the accelerator, where several workers are on it.

    Raises:
        ConfigError: torch sees no such device.
    """

    asynchronous = True
    _open: ClassVar[weakref.WeakSet["Accelerator"]] = weakref.WeakSet()

    def __init__(
        self,
        device: Devices,
        ledger: Ledger | None = None,
        tier: str = "device",
        streams: Streams | None = None,
    ) -> None:
        check_here(device)
        self.name = str(device)
        self._device, self.torch_device = device, device.torch_device
        self._torch = module_of(device.kind)
        self._streams = Streams(device) if streams is None else streams
        self._held: list[Tensor] = []
        self._ledger, self._tier = ledger, tier
        self._reservations: list[Reservation] = []
        # What was timed or compiled has left its memory in the pools of other streams, where no lane can use it.
        self._torch.empty_cache()
        # Of more than is free now Windows would take RAM, at the rate of the link.
        self._open.add(self)
        ((free, total),) = device.memory_info()
        self._limit_memory((free + self._torch.memory_reserved(self.torch_device)) / total)
        with self._torch.device(self.torch_device):
            self._origin = new_event(device.kind)
            self._origin.record()
            self._origin.synchronize()
        self._origin_s = time.perf_counter()

    def allocate(self, num_bytes: int, what: str) -> Tensor:
        """See `Device.allocate`; torch's allocators align to 512 bytes, which is enough for DMA.

        Lanes may use it at once: what the caller's stream, whose memory it may have been, does with it is done.
        """
        if self._ledger is not None:
            self._reservations.append(self._ledger.reserve(self._tier, what, num_bytes))
        try:
            tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            raise ExecutionError(f"{what}: {self.explain(error)}") from error
        catch_up(self.torch_device)
        self._held.append(tensor)
        return tensor

    def set_ahead(self, num_bytes: int, planned: int, lane: str) -> Tensor | None:
        """See `Device.set_ahead`; torch's allocator cuts it up: of smaller blocks none would serve what is larger."""
        margin = (1 / DEVICE_SHARE - 1) * planned
        ((free, _),) = self._device.memory_info()
        more = max(0, int(min(margin, free - num_bytes) - (1 - MARGIN_AHEAD) * margin))
        for size in (num_bytes + more, num_bytes):
            with self.behind(lane), contextlib.suppress(torch.OutOfMemoryError):
                return torch.empty(size, dtype=torch.uint8, device=self.torch_device)
        return None

    def _limit_memory(self, share: float) -> None:
        getattr(self._torch, "set_per_process_memory_fraction", lambda *_: None)(
            min(1.0, share), self.torch_device
        )

    def lane(self, name: str) -> AbstractContextManager[Any]:
        """See `Device.lane`."""
        if not lane_named(name).of_device:
            return nullcontext()
        self._torch.set_device(self.torch_device)
        return self.behind(name)

    def behind(self, lane: str) -> AbstractContextManager[Any]:
        """See `Device.behind`."""
        return self._streams.current(lane)

    def record(self, lane: str) -> torch.Event | None:
        """See `Device.record`."""
        if (stream := self._streams.get(lane)) is None:
            return None
        mark: torch.Event = new_event(self.name)
        mark.record(stream)
        return mark

    def wait(self, lane: str, mark: torch.Event) -> None:
        """See `Device.wait`."""
        if (stream := self._streams.get(lane)) is None:
            mark.synchronize()
        else:
            stream.wait_event(mark)

    def here(self) -> torch.Event:
        """See `Device.here`."""
        mark: torch.Event = new_event(self.name)
        mark.record(self._torch.current_stream(self.torch_device))
        return mark

    def beside(self, mark: torch.Event, work: Callable[[], None]) -> torch.Event:
        """See `Device.beside`; all such work of a device is in order on one stream."""
        with self.behind("decode"):
            self._torch.current_stream(self.torch_device).wait_event(mark)
            work()
            return self.here()

    def rejoin(self, mark: torch.Event | None) -> None:
        """See `Device.rejoin`."""
        if mark is not None:
            self._torch.current_stream(self.torch_device).wait_event(mark)

    def seconds(self, mark: torch.Event) -> float:
        """See `Device.seconds`; good to half a microsecond for the first seconds after the mark before."""
        # Times between events are fp32 milliseconds: go on from here, or a day later they are good to 8 ms.
        self._origin_s += self._origin.elapsed_time(mark) / 1e3
        self._origin = mark
        return self._origin_s

    def hold(self, tensor: Tensor, lane: str) -> None:
        """See `Device.hold`."""
        if (stream := self._streams.get(lane)) is not None:
            tensor.record_stream(stream)

    def close(self) -> None:
        """See `Device.close`."""
        try:
            if self._streams.clear() or self._held:
                with last_calls(self.name):
                    torch.accelerator.synchronize(self.torch_device)
        finally:
            self._held.clear()
            while self._reservations:
                self._reservations.pop().release()
            with last_calls(self.name):
                self._torch.empty_cache()
                self._open.discard(self)
                if all(
                    each.torch_device != self.torch_device for each in self._open
                ):  # nor one of another model
                    self._limit_memory(1.0)

    def explain(self, error: BaseException) -> str:
        """See `Device.explain`."""
        if not isinstance(error, torch.OutOfMemoryError):
            return super().explain(error)
        budget = None if self._ledger is None else self._ledger.statistics()[self._tier].budget_bytes
        given = "" if budget is None else f" of a budget of {format_bytes(budget)}"
        reserved = self._torch.memory_reserved(self.torch_device)
        return (
            f"{self.name} is out of memory: torch has reserved {format_bytes(reserved)}{given}; lower "
            "memory.device_memory, which leaves more beside the plan, or set "
            f"PYTORCH_ALLOC_CONF=expandable_segments:True in the environment ({error})"
        )


def open_device(
    device: Devices,
    ledger: Ledger | None = None,
    link_bytes_per_s: float | None = None,
    limit: ResidentLimit | None = None,
    *,
    tier: str = "device",
    peer_bytes_per_s: float | None = None,
    streams: Streams | None = None,
) -> Device:
    """Return what runs a program on one device.

    Args:
        device: of one worker.
        ledger: where the device's memory is reserved.
        link_bytes_per_s: rate of an emulated link in each direction; None for an unthrottled one.
        limit: where the device is the CPU, the limit of the process's resident memory.
        tier: of the ledger.
        peer_bytes_per_s: rate of copies from an emulated device to others; None for as fast as they go.
        streams: of an accelerator that several workers are on.

    Raises:
        ConfigError: no such device.
    """
    if device.accelerated:
        return Accelerator(device, ledger, tier, streams)
    if device.emulated:
        rates = {"link_bytes_per_s": link_bytes_per_s, "peer_bytes_per_s": peer_bytes_per_s}
        return EmulatedDevice(str(device), ledger, tier=tier, **rates)
    return CpuDevice(ledger=ledger, limit=limit, tier=tier)
