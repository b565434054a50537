"""Devices beside the CPU: which kinds there are, and the one table of what the torch of each vendor lacks.

A kind is torch's own word for a type of device: ``cuda``, ``xpu``, ``npu``. What all of them have (streams, events,
random state, memory figures) is asked of torch by the same names, through `module_of`. What they have not lies here, a
row for each vendor, and nowhere else; docs/devices.md says what was run on which. ROCm's torch answers to ``cuda``.

This module loads torch when it is asked about devices, and not when it is imported.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outsize.errors import ConfigError, ExecutionError

if TYPE_CHECKING:
    import torch


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """A row of the table; the defaults are what a vendor without the ability has.

    Attributes:
        title: what the devices are called in messages.
        refused: why no run computes there; empty where one may.
        drivers: what a user looks after where torch sees no device.
        event_options: of an event that is timed, and that a thread waits for asleep, so that it takes no core.
        backend: of `torch.distributed`, for sums between devices; empty where there is none.
        activity: of `torch.profiler`; empty where the device has no profiler.
        register: pins a range of host memory, address and bytes, or raises OSError; None where torch has no way.
        unregister: undoes it, by the address.
        reaches: whether the first device reads and writes the memory of the second.
        uuid: what the driver knows a device by, from torch's properties of the device.
        ranges: a context within which the driver's own profiler shows a name.
        pinned_bytes: what torch's own allocator of pinned memory holds.
    """

    title: str
    refused: str = ""
    drivers: str = "the driver"
    event_options: Mapping[str, Any] = field(default_factory=lambda: {"enable_timing": True})
    backend: str = ""
    activity: str = ""
    register: Callable[[int, int], None] | None = None
    unregister: Callable[[int], None] | None = None
    reaches: Callable[[int, int], bool] = lambda source, target: False
    uuid: Callable[[Any], str] = lambda properties: str(getattr(properties, "uuid", ""))
    ranges: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
    pinned_bytes: Callable[[], int] = lambda: 0


def _cuda_register(address: int, num_bytes: int) -> None:
    import torch

    code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))  # type: ignore[no-untyped-call]
    if code != 0:
        _cuda_forget_error()
        raise OSError(f"cudaHostRegister returned error {code}")


def _cuda_unregister(address: int) -> None:
    import torch

    if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:  # type: ignore[no-untyped-call]
        _cuda_forget_error()


def _cuda_forget_error() -> None:
    """Make the CUDA runtime forget the error of the last call.

    The runtime keeps it until someone asks, and the next kernel launch of PyTorch would ask and raise it in a
    place that has nothing to do with it. So launch one here and swallow what it says.
    """
    import torch

    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        return


def _cuda_reaches(source: int, target: int) -> bool:
    import torch

    return torch.cuda.can_device_access_peer(source, target)


@contextmanager
def _cuda_ranges(name: str) -> Iterator[None]:
    import torch

    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def _cuda_pinned_bytes() -> int:
    import torch

    return int(torch.cuda.host_memory_stats().get("allocated_bytes.allocated", 0))


# By kind. The first that torch sees is what ``auto`` means.
VENDORS: dict[str, Vendor] = {
    "cuda": Vendor(
        title="CUDA",
        drivers="the driver and CUDA_VISIBLE_DEVICES",
        event_options={"enable_timing": True, "blocking": True},
        backend="nccl",
        activity="CUDA",
        register=_cuda_register,
        unregister=_cuda_unregister,
        reaches=_cuda_reaches,
        uuid=lambda properties: f"GPU-{properties.uuid}",
        ranges=_cuda_ranges,
        pinned_bytes=_cuda_pinned_bytes,
    ),
    "xpu": Vendor(
        title="XPU", drivers="the driver and ONEAPI_DEVICE_SELECTOR", backend="xccl", activity="XPU"
    ),
    "npu": Vendor(
        title="NPU",
        drivers="torch_npu, the driver and ASCEND_RT_VISIBLE_DEVICES",
        event_options={"enable_timing": True, "blocking": True},
        backend="hccl",
    ),
    "mps": Vendor(
        title="MPS",
        refused="its memory is the host's, so that nothing would be streamed, and torch has no streams there; use cpu",
    ),
}


def kind_of(device: "str | torch.device") -> str:
    """Return the kind of a device, or of all that a name such as ``cuda:0,1`` stands for."""
    return device.partition(":")[0] if isinstance(device, str) else device.type


def is_accelerator(device: "str | torch.device") -> bool:
    """Return whether a device has memory and streams of its own; the CPU and emulated devices have not."""
    return kind_of(device) in VENDORS


def vendor_of(device: "str | torch.device") -> Vendor:
    """Return the row of the table for an accelerator."""
    return VENDORS[kind_of(device)]


def title_of(device: "str | torch.device") -> str:
    """Return what messages call the devices of a kind: ROCm by its own name, though torch calls it cuda."""
    import torch

    kind = kind_of(device)
    return "ROCm" if kind == "cuda" and torch.version.hip else VENDORS[kind].title


def module_of(device: "str | torch.device") -> Any:
    """Return torch's module for the devices of a kind, such as `torch.cuda`."""
    import torch

    return torch.get_device_module(kind_of(device))


def index_of(name: str) -> int:
    """Return the number of one device, as torch counts: 1 of ``cuda:1``."""
    return int(name.partition(":")[2] or 0)


def torch_name(name: str) -> str:
    """Return what torch calls the first device of ``name``; emulated ones compute on the CPU."""
    first = name.partition(",")[0]
    return first if is_accelerator(first) else "cpu"


def count_of(kind: str) -> int:
    """Return how many devices of a kind torch sees; none where torch was built without it."""
    return int(module_of(kind).device_count()) if _is_there(kind) else 0


def kind_here() -> str | None:
    """Return the kind of this machine's accelerators; None where torch sees none that a run may use."""
    return next((kind for kind, row in VENDORS.items() if not row.refused and _is_there(kind)), None)


def _is_there(kind: str) -> bool:
    try:
        return bool(module_of(kind).is_available())
    except RuntimeError:  # torch has no such module: the vendor's package is not installed
        return False


def check_here(name: str) -> None:
    """Check that torch sees every device that ``name`` stands for.

    Raises:
        ConfigError: one of them is missing.
    """
    if not is_accelerator(name):
        return
    import torch

    kind, _, indices = name.partition(":")
    count = count_of(kind)
    if max(map(int, (indices or "0").split(","))) >= count:
        built_for = torch.accelerator.current_accelerator()
        without = built_for is None or built_for.type != kind
        remedy = (
            f"install a torch built for {title_of(kind)}" if without else f"check {VENDORS[kind].drivers}"
        )
        raise ConfigError(
            f"memory.device is {name}, but torch {torch.__version__} sees {count} {title_of(kind)} devices; "
            f"use --device cpu, or {remedy}"
        )


def check_device_name(value: str) -> str:
    """Return what a user calls a device, if there can be such a device.

    Raises:
        ValueError: there cannot, or no run computes there.
    """
    import re

    kinds = "|".join(VENDORS)
    if not re.fullmatch(rf"auto|cpu|({kinds})(:\d+(,\d+)*|:all)?|emulated(:[1-9]\d*)?", value):
        raise ValueError(
            f"not a device: {value!r}; write cpu, cuda, cuda:1, cuda:0,1, cuda:all, emulated:2 or auto "
            "(xpu and npu as cuda)"
        )
    row = VENDORS.get(kind_of(value))
    if row is not None and row.refused:
        raise ValueError(f"{value} computes nothing here: {row.refused}")
    return value


def new_event(device: "str | torch.device") -> Any:
    """Return an event that is timed, and that a thread waits for asleep."""
    return module_of(device).Event(**vendor_of(device).event_options)


def uuid_of(name: str) -> str:
    """Return what the driver knows the device ``name`` by."""
    return vendor_of(name).uuid(module_of(name).get_device_properties(index_of(name)))


@contextmanager
def last_calls(device: "str | torch.device") -> Iterator[None]:
    """Context of what brings work on a device to its end.

    A device that has failed says so at every call. Where an error is on its way already, that one tells what failed,
    and what fails here is logged.

    Raises:
        ExecutionError: the device has failed, and nothing else says so.
    """
    known = sys.exception()
    try:
        yield
    except RuntimeError as error:
        if known is None:
            raise ExecutionError(f"{device} has failed: {error}") from error
        _log.warning("%s has failed: %s", device, error)


class DriverPinner:
    """Pins host memory by the driver of a kind of device, for all devices of the kind in this process.

    Args:
        device: one of them.
    """

    def __init__(self, device: "str | torch.device") -> None:
        self._row = vendor_of(device)

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin the pages of a range.

        Raises:
            OSError: the driver refuses, or torch has no way to ask it; the range is as it was.
        """
        if self._row.register is None:
            raise OSError(f"torch pins no memory that it has not allocated for {self._row.title}")
        self._row.register(address, num_bytes)

    def unpin(self, address: int) -> None:
        """Undo `pin` of the range that starts at ``address``."""
        assert self._row.unregister is not None
        self._row.unregister(address)


def pinner_of(device: "str | torch.device") -> DriverPinner | None:
    """Return what pins host memory for copies to a device; None where copies do not ask for it."""
    return DriverPinner(device) if is_accelerator(device) else None
