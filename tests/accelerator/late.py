"""`torch.late`: the made-up device as torch's users see one, and its row in the package's table of vendors.

`install` does it for this process; from then on ``late:0`` is a device like ``cuda:0``. What only tests ask (lateness,
faults, offences) is asked of this module, not of torch's.
"""

import sys
import threading
import traceback
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
import torch._meta_registrations

from accelerator import build
from outsize import accelerators, files

KIND = "late"
# Microseconds of copies and of kernels, and one kernel in how many. Both are needed: a missing wait of a lane that
# copies up or computes shows where copies are late, one of a lane that copies down or to a peer where kernels are.
PROFILES = {"prompt": (0, 0, 0), "late-copies": (1500, 400, 32), "late-kernels": (0, 3000, 6)}
# Pairs of devices that a test keeps apart.
_without_peers: set[tuple[int, int]] = set()


@cache
def native() -> types.ModuleType:
    """Return the extension module; built and loaded once."""
    return build.load()


def install() -> None:
    """Make ``late`` a device of torch and of the package, for the rest of this process.

    Raises:
        CannotBuildError: see `accelerator.build`.
    """
    if KIND in accelerators.VENDORS:
        return
    extension = native()
    torch.utils.rename_privateuse1_backend(KIND)
    module = _module(extension)
    torch._register_device_module(KIND, module)
    sys.modules["torch.late"] = module
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=False, for_storage=True
    )
    torch.histc = _histc(torch.histc)
    accelerators.VENDORS[KIND] = accelerators.Vendor(
        title="late",
        register=_register,
        unregister=_unregister,
        reaches=reaches,
    )


def _register(address: int, num_bytes: int) -> None:
    code = native().register(address, num_bytes)
    if code:
        raise OSError(f"cudaHostRegister returned error {code}")


def _unregister(address: int) -> None:
    native().unregister(address)


def reaches(source: int, target: int) -> bool:
    """Return whether copies between two devices need no memory of the host."""
    return (source, target) not in _without_peers


# --- what tests ask ---------------------------------------------------------------------------------------------------


def set_profile(name: str, seed: int = 1) -> None:
    """Have streams be late as `PROFILES` says, by the random numbers of ``seed``."""
    native().set_lateness(*PROFILES[name], seed)


def set_limit(device: int, num_bytes: int | None) -> None:
    """Have allocations fail beyond ``num_bytes`` in use; None is all that the device has."""
    native().set_limit(device, num_bytes or 0)


def strike(device: int, what: str, after: int) -> None:
    """Have something go wrong once ``after`` more have gone well: a ``kernel``, an ``allocation``, or a ``loss``."""
    native().strike(device, what, after)


def set_pinning(limit_bytes: int = 0, bytes_per_s: float = 0.0) -> None:
    """Have the driver pin so many bytes in all and at that rate; zeros are all that is asked for, at once."""
    native().set_pinning(limit_bytes, bytes_per_s)


def set_launch_us(microseconds: int) -> None:
    """Have each kernel and copy take so long of the thread that asks for it."""
    native().set_launch_us(microseconds)


@contextmanager
def waits_of_host() -> Iterator[list[tuple[str, str, str]]]:
    """Collect where our code waits meanwhile as CUDA does with a core kept busy: thread, for what, file and function.

    Not what a model's own code asks, nor events: `accelerators.new_event` makes those that are waited for asleep.
    """
    seen: list[tuple[str, str, str]] = []

    def note(what: str) -> None:
        code = [each for each in traceback.extract_stack()[:-1] if "/torch/" not in each.filename]
        if "/src/outsize/" in code[-1].filename:
            where = f"{code[-1].filename.rpartition('/outsize/')[2]}: {code[-1].name}"
            seen.append((threading.current_thread().name, what, where))

    native().watch(note)
    try:
        yield seen
    finally:
        native().watch(None)


@contextmanager
def held_up(stream: torch.Stream) -> Iterator[None]:
    """A stream begins nothing that is queued on it meanwhile."""
    native().hold_up(stream.device_index, stream.stream_id)
    try:
        yield
    finally:
        native().let_go()


def heal() -> bool:
    """Wait for all devices, make them whole again, and return whether one was broken."""
    was_broken = []
    set_pinning()
    set_launch_us(0)
    for index in range(native().device_count()):
        native().set_limit(index, 0)
        was_broken.append(native().heal(index))
    return any(was_broken)


@contextmanager
def no_peer_access() -> Iterator[None]:
    """No device reaches another one's memory meanwhile."""
    count = native().device_count()
    _without_peers.update((one, other) for one in range(count) for other in range(count))
    try:
        yield
    finally:
        _without_peers.clear()


class WatchedFiles(files.System):
    """Tells the device what the host reads and writes of pinned memory on the way from and to files."""

    def pread(self, descriptor: int, into: memoryview, offset: int) -> int:
        native().note_host(into, writes=True)
        return super().pread(descriptor, into, offset)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        native().note_host(data, writes=False)
        return super().pwrite(descriptor, data, offset)


def offences() -> list[str]:
    """Return what the host has done since the last call that corrupts data on a real device."""
    found: list[str] = native().take_offences()
    return found


# --- torch.late -------------------------------------------------------------------------------------------------------


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(native().current_device()) if index is None else index


class Stream(torch.Stream):
    """As `torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> "Stream":
        if "stream_id" in known:
            return super().__new__(cls, **known)
        return super().__new__(cls, torch.device(KIND, _index(device)))

    def wait_event(self, event: torch.Event) -> None:
        """As there: the event is asked, since `torch.Stream.wait_event` knows its own alone."""
        event.wait(self)


class Event(torch.Event):
    """As `torch.cuda.Event`: none of what `torch.Event` knows is recorded, and streams are those of `Stream`.

    So `torch.Stream.wait_event` waits for nothing, and says nothing. Of torch 2.10 it reads memory of other streams'
    classes that is not there; here that is an error.
    """

    def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> "Event":
        event = super().__new__(cls, torch.device(KIND, _index()))
        event._inner = torch.Event(
            torch.device(KIND, _index()), enable_timing=enable_timing, blocking=blocking
        )
        return event

    _inner: torch.Event

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._inner.device

    def record(self, stream: torch.Stream | None = None) -> None:
        self._inner.record(_stream_of(stream))

    def wait(self, stream: torch.Stream | None = None) -> None:
        self._inner.wait(_stream_of(stream))

    def query(self) -> bool:
        return self._inner.query()

    def synchronize(self) -> None:
        self._inner.synchronize()

    def elapsed_time(self, other: torch.Event) -> float:
        return self._inner.elapsed_time(other._inner if isinstance(other, Event) else other)


def _stream_of(stream: torch.Stream | None) -> Stream:
    stream = _current_stream() if stream is None else stream
    if not isinstance(stream, Stream):
        raise TypeError(
            f"torch 2.10 takes no {type(stream).__name__} of another class here, and reads beyond it"
        )
    return stream


def _current_stream(device: Any = None) -> Stream:
    """As `torch.cuda.current_stream`, whose stream is of the class of this module."""
    now = torch.accelerator.current_stream(torch.device(KIND, _index(device)))
    return Stream(stream_id=now.stream_id, device_index=now.device_index, device_type=now.device_type)


@contextmanager
def _on_device(device: Any) -> Iterator[None]:
    before = _index()
    native().set_device(_index(device))
    try:
        yield
    finally:
        native().set_device(before)


class _OnStream(AbstractContextManager[None]):
    """As `torch.cuda.stream`: entering it makes the stream's device the current one."""

    def __init__(self, stream: torch.Stream | None):
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._device = _index()
            self._before = torch.accelerator.current_stream(self._stream.device)
            torch.accelerator.set_stream(self._stream)

    def __exit__(self, *exception: object) -> None:
        if self._stream is not None:
            torch.accelerator.set_stream(self._before)
            native().set_device(self._device)


class _Properties:
    name, uuid, multi_processor_count = "Late 1", "00000000-0000-0000-0000-000000000000", 1

    def __init__(self, device: Any):
        self.total_memory = native().mem_get_info(_index(device))[1]


def _seed_all(seed: int) -> None:
    for index in range(native().device_count()):
        native().generator(index).manual_seed(int(seed))


def _module(extension: types.ModuleType) -> types.ModuleType:
    """Return what torch and the package find where `torch.cuda` stands."""

    def generator(device: Any = None) -> torch.Generator:
        found: torch.Generator = extension.generator(_index(device))
        return found

    module = types.ModuleType("torch.late")
    module.__dict__.update(
        device_count=extension.device_count,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        current_device=extension.current_device,
        set_device=lambda device: extension.set_device(_index(device)),
        synchronize=lambda device=None: extension.synchronize(_index(device)),
        Stream=Stream,
        Event=Event,
        device=_on_device,
        stream=_OnStream,
        current_stream=_current_stream,
        manual_seed=lambda seed: generator().manual_seed(int(seed)) and None,
        manual_seed_all=_seed_all,
        get_rng_state=lambda device=None: generator(device).get_state(),
        set_rng_state=lambda state, device=None: generator(device).set_state(state) and None,
        default_generators=tuple(extension.generator(index) for index in range(extension.device_count())),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        is_bf16_supported=lambda *asked: True,
        mem_get_info=lambda device=None: extension.mem_get_info(_index(device)),
        memory_allocated=lambda device=None: extension.memory(_index(device))["allocated"],
        max_memory_allocated=lambda device=None: extension.memory(_index(device))["peak"],
        memory_reserved=lambda device=None: extension.memory(_index(device))["reserved"],
        max_memory_reserved=lambda device=None: extension.memory(_index(device))["reserved"],
        reset_peak_memory_stats=lambda device=None: extension.reset_peak(_index(device)),
        empty_cache=lambda: None,
        get_device_name=lambda device=None: _Properties.name,
        get_device_properties=_Properties,
        get_device_capability=lambda device=None: (9, 0),
        random=types.SimpleNamespace(),
    )
    return module


def _histc(of_torch: Any) -> Any:
    """Return `torch.histc` for integers on the device as well: GPUs have it, the CPU's kernel has not."""

    def histc(tensor: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        if tensor.device.type == KIND and not tensor.is_floating_point():
            found: torch.Tensor = of_torch(tensor.float(), *args, **named).to(tensor.dtype)
            return found
        result: torch.Tensor = of_torch(tensor, *args, **named)
        return result

    return histc
