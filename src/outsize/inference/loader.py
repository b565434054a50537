"""Load units ahead of the forward that will call them, on a thread, in order with the caller's stream.

The story of a streamed unit:

1. The loader's thread takes the next unit of the scan and a free slot, waits until the slot's last user is done, and
   loads. After the last unit it goes on with the first one, of the next token.
2. The caller `take`s the unit when the model's code calls it, and waits where it is not there yet: a stall.
3. The caller gives it back when it has computed, and the slot is free.

Units that are kept come up in the same way, once, each into memory of its own. Where the model calls units in another
order than the scan's, or a forward ends before its last unit, the loader drops what it has and begins at the unit
asked for: order costs time, never an error.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outsize.accelerators import catch_up, is_accelerator, module_of
from outsize.inference.source import Source
from outsize.planner.search.forward_plan import Scan
from outsize.runtime.device.device import Device


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
            catch_up(device)

    def _stream(self) -> Any:
        return module_of(self._device).current_stream(self._device)


OpenRoom = Callable[[], Device]


@dataclass(slots=True, eq=False)
class _Place:
    """Memory that holds a unit.

    Attributes:
        memory: the bytes.
        room: what gives them back.
        loaded: mark of the load.
        used: mark of the last computation on it.
    """

    memory: Tensor
    room: Device
    loaded: Any = None
    used: Any = None


class Loader:
    """Holds the weights of units on a device as a `Scan` says.

    Args:
        device: what computes; its lane ``up`` is the loader's.
        caller: the thread that asks for units.
        source: where they come from.
        unit_bytes: of each unit's weights.
        open_room: opens a device of the same name, for memory that can be given back by itself.

    Attributes:
        stall_s: seconds that the caller waited in `take`.
        load_s: seconds that the loader's thread loaded.
    """

    def __init__(
        self, device: Device, caller: Caller, source: Source, unit_bytes: tuple[int, ...], open_room: OpenRoom
    ) -> None:
        self._device = device
        self._caller = caller
        self._source = source
        self._unit_bytes = unit_bytes
        self._open_room = open_room
        self._state = threading.Condition()
        self._scan: Scan | None = None
        self._slots: list[_Place] = []
        self._free: list[_Place] = []
        self._kept: dict[int, _Place] = {}
        self._there: dict[int, _Place] = {}  # loaded, by unit
        self._ahead: deque[int] = deque()  # loaded or being loaded, and not asked for yet, in order
        self._next: int | None = None
        self._epoch = 0  # what was begun in another one is not wanted any more
        self._loading: int | None = None
        self._paused = self._closing = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.stall_s = self.load_s = 0.0

    def follow(self, scan: Scan) -> None:
        """Load as ``scan`` says from now on; no unit may be taken. What both keep stays.

        Raises:
            BudgetExceededError: the tier has too little left; nothing is loaded until another scan fits.
        """
        before = self._scan
        with self._state:
            self._paused = True
            self._state.wait_for(lambda: self._loading is None)
            self._drop_ahead()
            self._scan, self._next = None, None
        for unit in [unit for unit in self._kept if unit not in scan.kept]:
            self._there.pop(unit, None)
            self._kept.pop(unit).room.close()
        if before is None or (before.num_slots, before.slot_bytes) != (scan.num_slots, scan.slot_bytes):
            self._close_slots()
            for _ in range(scan.num_slots):
                self._slots.append(self._place(scan.slot_bytes, "slots"))
            self._free = list(self._slots)
        for unit in sorted(scan.kept - self._kept.keys()):
            self._kept[unit] = self._place(self._unit_bytes[unit], "kept units")
        with self._state:
            self._scan, self._paused = scan, False
            self._next = self._wanted_from(0)
            self._state.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outsize-loader", daemon=True)
            self._thread.start()

    def take(self, unit: int) -> tuple[Tensor, ...]:
        """Return the planes of ``unit``, to compute with until it is given back.

        Raises:
            OutsizeError: the loader could not load; as it came.
        """
        started = time.perf_counter()
        with self._state:
            if not (unit in self._there and unit not in self._ahead):
                if (self._ahead[0] if self._ahead else self._next) != unit:
                    self._begin_at(unit)
                self._state.wait_for(lambda: unit in self._there or self._error is not None)
                if unit not in self._there:
                    self._raise()
                if self._ahead and self._ahead[0] == unit:  # else a kept one that came late
                    self._ahead.popleft()
            place = self._there[unit]
        self.stall_s += time.perf_counter() - started
        self._caller.wait(place.loaded)
        place.loaded = None
        return self._source.planes(unit, place.memory)

    def give_back(self, unit: int) -> None:
        """What was enqueued so far is the last that uses ``unit`` in this pass."""
        if unit in self._kept:
            return
        with self._state:
            place = self._there.pop(unit)
            place.used = self._caller.mark()
            self._free.append(place)
            self._state.notify_all()

    def close(self) -> None:
        """End the thread and give all memory back; idempotent."""
        with self._state:
            self._closing = True
            self._state.notify_all()
        # The collector may let go of a model in any thread, this one too.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._close_slots()
        for place in self._kept.values():
            place.room.close()
        self._kept.clear()
        self._there.clear()

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            entered = False
            while (work := self._begin()) is not None:
                unit, place, epoch = work
                error: BaseException | None = None
                try:
                    if not entered:
                        stack.enter_context(self._device.lane("up"))
                        entered = True
                    if place.used is not None:
                        self._device.wait("up", place.used)
                    started = time.perf_counter()
                    self._source.load(unit, place.memory)
                    self.load_s += time.perf_counter() - started
                    place.loaded, place.used = self._device.record("up"), None
                except BaseException as raised:  # for whoever asks for a unit: this thread never dies of it
                    error = raised
                self._end(unit, place, epoch, error)

    def _begin(self) -> tuple[int, _Place, int] | None:
        with self._state:
            self._state.wait_for(lambda: self._closing or self._can_load())
            if self._closing:
                return None
            unit = self._next
            assert unit is not None
            place = self._kept.get(unit) or self._free.pop(0)
            self._loading = unit
            self._ahead.append(unit)
            self._next = self._wanted_from(unit + 1)
            return unit, place, self._epoch

    def _end(self, unit: int, place: _Place, epoch: int, error: BaseException | None) -> None:
        with self._state:
            self._loading = None
            if error is not None:
                self._error = error
            if error is None and (epoch == self._epoch or unit in self._kept):
                self._there[unit] = place
            elif unit not in self._kept:
                self._free.append(place)
            self._state.notify_all()

    def _can_load(self) -> bool:
        unit = self._next
        return (
            unit is not None
            and not self._paused
            and self._error is None
            and (unit in self._kept or bool(self._free))
        )

    def _wanted_from(self, start: int) -> int | None:
        """The first unit from ``start`` on, round and round, that has to be loaded."""
        if self._scan is None:
            return None
        streamed = self._scan.streamed
        count = len(self._unit_bytes)
        for unit in (number % count for number in range(start, start + count)):
            coming = unit in self._ahead or unit in self._there or unit == self._loading
            if unit in streamed or (unit in self._kept and not coming):
                return unit
        return None

    def _begin_at(self, unit: int) -> None:
        """Forget what is ahead, and load ``unit`` next."""
        self._drop_ahead()
        if unit == self._loading and unit in self._kept:  # it is on its way to where it stays
            self._ahead.append(unit)
            self._next = self._wanted_from(unit + 1)
        else:
            self._next = unit
        self._state.notify_all()

    def _drop_ahead(self) -> None:
        self._epoch += 1
        while self._ahead:
            unit = self._ahead.popleft()
            if unit in self._there and unit not in self._kept:
                self._free.append(self._there.pop(unit))

    def _raise(self) -> None:
        if self._error is None:
            return
        error, self._error = self._error, None
        self._drop_ahead()
        try:
            raise error
        finally:
            del error  # else error and frame hold each other

    def _place(self, num_bytes: int, what: str) -> _Place:
        room = self._open_room()
        try:
            return _Place(room.allocate(num_bytes, what), room)
        except BaseException:
            room.close()
            raise

    def _close_slots(self) -> None:
        for place in self._slots:
            place.room.close()
        self._slots.clear()
        self._free.clear()
