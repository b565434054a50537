"""Devices beside the CPU: which kinds there are, and the one table of what the torch of each vendor lacks.

A kind is torch's own word for a type of device: ``cuda``, ``xpu``, ``npu``. What all of them have (streams, events,
random state, memory figures) is asked of torch by the same names, through `module_of`. What they have not lies here, a
row for each vendor, and nowhere else; docs/devices.md says what was run on which. ROCm's torch answers to ``cuda``.
This module loads torch when it is asked about devices, and not when it is imported.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outsize.errors import ConfigError

if TYPE_CHECKING:
    import torch


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
    """Launch a kernel, which raises the error that the CUDA runtime keeps of the last call, here and not elsewhere."""
    import torch

    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        return


@contextmanager
def _cuda_ranges(name: str) -> Iterator[None]:
    import torch

    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


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
        reaches=lambda source, target: bool(module_of("cuda").can_device_access_peer(source, target)),
        uuid=lambda properties: f"GPU-{properties.uuid}",
        ranges=_cuda_ranges,
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

# Tensor cores multiply bf16 from this compute capability on; before (T4, V100, 20xx) it is emulated, and attention
# falls back to products. AMD numbers its GPUs otherwise.
BF16_CAPABILITY = (8, 0)
_HOST = Vendor(title="CPU", backend="gloo")


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices that a run computes on, one for each worker: what ``auto`` and ``cuda:all`` have become.

    Attributes:
        kind: ``cpu``, ``emulated``, or torch's word for a kind of accelerators.
        indices: the number of each device, the same one again where workers share it; none of the CPU.
    """

    kind: str = "cpu"
    indices: tuple[int, ...] = ()

    @classmethod
    def parse(cls, name: str) -> "Devices":
        """Return the devices of a name: ``cpu``, ``emulated:2``, which are two, ``cuda``, ``cuda:1``, ``cuda:0,2``.

        Raises:
            ConfigError: there are no such devices.
        """
        kind, _, named = name.partition(":")
        numbers = named.split(",") if named else ["1" if kind == "emulated" else "0"]
        if name == "cpu":
            return cls()
        if all(number.isdigit() for number in numbers):
            indices = tuple(map(int, numbers))
            if kind in VENDORS:
                return cls(kind, indices)
            if kind == "emulated" and len(indices) == 1 and indices[0]:
                return cls(kind, indices if indices == (1,) else tuple(range(indices[0])))
        raise ConfigError(f"unknown device {name!r}; use cpu, emulated:N, cuda:i or cuda:i,j")

    def __str__(self) -> str:
        if self.kind == "emulated" and len(self.indices) > 1:
            return f"{self.kind}:{len(self.indices)}"
        return f"{self.kind}:{','.join(map(str, self.indices))}" if self.indices else self.kind

    @property
    def each(self) -> "tuple[Devices, ...]":
        """The device of each worker, by itself."""
        return tuple(Devices(self.kind, (index,)) for index in self.indices) or (self,)

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each worker's device."""
        return tuple(map(str, self.each))

    @property
    def is_cpu(self) -> bool:
        """Whether host memory is their own, and no link lies between."""
        return self.kind == "cpu"

    @property
    def emulated(self) -> bool:
        """Whether they are workers on the CPU behind links of a given rate."""
        return self.kind == "emulated"

    @property
    def accelerated(self) -> bool:
        """Whether they have memory and streams of their own."""
        return self.kind in VENDORS

    own_processor = accelerated  # beside the cores of the host, and not on them

    @property
    def index(self) -> int:
        """The number of the first one, as torch counts."""
        return self.indices[0] if self.indices else 0

    @property
    def torch_device(self) -> "torch.device":
        """The first one, for torch; emulated ones compute on the CPU."""
        import torch

        return torch.device(self.kind, self.index) if self.accelerated else torch.device("cpu")

    @property
    def properties(self) -> "tuple[Any, ...]":
        """What torch says of each accelerator; nothing of other devices."""
        indices = self.indices if self.accelerated else ()
        return tuple(module_of(self.kind).get_device_properties(index) for index in indices)

    @property
    def titles(self) -> tuple[str, ...]:
        """What the driver calls each accelerator that is in this machine; nothing of other devices."""
        return tuple(module_of(self.kind).get_device_name(index) for index in self._seen)

    @property
    def multiply_bf16(self) -> bool:
        """Whether all of those that torch sees are accelerators that multiply bf16 by themselves."""
        import torch

        if self.kind != "cuda" or torch.version.hip:
            return self.accelerated
        return all(torch.cuda.get_device_capability(index) >= BF16_CAPABILITY for index in self._seen)

    @property
    def share_ram(self) -> bool:
        """Whether the memory of one is the host's RAM, as on GB10, MI300A and graphics within a CPU."""
        properties = [module_of(self.kind).get_device_properties(index) for index in self._seen]
        return any(
            getattr(each, w, False) for each in properties for w in ("is_integrated", "is_integrated_gpu")
        )

    @property
    def _seen(self) -> list[int]:
        count = count_of(self.kind) if self.accelerated else 0
        return [index for index in self.indices if index < count]

    def memory_info(self) -> list[tuple[int, int]]:
        """Return free and total bytes of each accelerator, in equal parts where workers share one; else nothing."""
        indices = self.indices if self.accelerated else ()
        infos = [(*_memory_info(self.kind, index), indices.count(index)) for index in indices]
        return [(free // sharing, total // sharing) for free, total, sharing in infos]

    def num_allocator_retries(self) -> int:
        """Return how often torch found no memory on an accelerator and gave all that was free back to the driver."""
        if not self.accelerated:
            return 0
        statistics: Any = getattr(module_of(self.kind), "memory_stats", lambda _: {})
        return sum(int(statistics(index).get("num_alloc_retries", 0)) for index in set(self.indices))


def _memory_info(kind: str, index: int) -> tuple[int, int]:
    """Return free and total bytes of an accelerator.

    Intel's drivers for desktops do not say what is free, and torch raises; then it is what this process has not taken.
    """
    import torch

    module = module_of(kind)
    try:
        free, total = module.mem_get_info(index)
    except torch.AcceleratorError:  # the device has failed
        raise
    except RuntimeError:
        total = module.get_device_properties(index).total_memory
        free = total - module.memory_reserved(index)
    return int(free), int(total)


CPU = Devices()


def choose_device(name: str) -> Devices:
    """Return the devices of ``memory.device``: ``auto`` is the first kind of accelerator here, else the CPU.

    Raises:
        ConfigError: there are no such devices, or ``all`` of a kind of which torch sees none.
    """
    if name == "auto":
        name = kind_here() or "cpu"
    kind = kind_of(name)
    if name != f"{kind}:all":
        return Devices.parse(name)
    count = count_of(kind)
    if not count:
        raise ConfigError(
            f"memory.device is {name}, but torch sees no {title_of(kind)} device; use --device cpu, or check the driver"
        )
    return Devices(kind, tuple(range(count)))


def kind_of(device: "str | torch.device") -> str:
    """Return the kind of a device, or of all that a name such as ``cuda:0,1`` stands for."""
    return device.partition(":")[0] if isinstance(device, str) else device.type


def is_accelerator(device: "str | torch.device") -> bool:
    """Return whether a device has memory and streams of its own; the CPU and emulated devices have not."""
    return kind_of(device) in VENDORS


def vendor_of(device: "str | torch.device") -> Vendor:
    """Return the row of the table for a device."""
    return VENDORS.get(kind_of(device), _HOST)


def title_of(device: "str | torch.device") -> str:
    """Return what messages call the devices of a kind: ROCm by its own name, though torch calls it cuda."""
    import torch

    kind = kind_of(device)
    return "ROCm" if kind == "cuda" and torch.version.hip else VENDORS[kind].title


def module_of(device: "str | torch.device") -> Any:
    """Return torch's module for the devices of a kind, such as `torch.cuda`."""
    import torch

    return torch.get_device_module(kind_of(device))


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


def check_here(devices: Devices) -> None:
    """Check that torch sees every one of ``devices``.

    Raises:
        ConfigError: one of them is missing.
    """
    kind, count = devices.kind, count_of(devices.kind) if devices.accelerated else 0
    if devices.accelerated and max(devices.indices) >= count:
        import torch

        built_for = torch.accelerator.current_accelerator()
        without = built_for is None or built_for.type != kind
        remedy = (
            f"install a torch built for {title_of(kind)}" if without else f"check {VENDORS[kind].drivers}"
        )
        raise ConfigError(
            f"memory.device is {devices}, but torch {torch.__version__} sees {count} {title_of(kind)} devices; "
            f"use --device cpu, or {remedy}"
        )


def check_device_name(value: str) -> str:
    """Return what a user calls a device, if there can be such a device.

    Raises:
        ValueError: there cannot, or no run computes there.
    """
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


def synchronize(device: "str | torch.device") -> None:
    """Return when all work on a device is done, as it is on a CPU at any time."""
    if is_accelerator(device):
        module_of(device).synchronize(device)


def as_current(device: "str | torch.device") -> AbstractContextManager[Any]:
    """Return a context in which a device is the thread's current one: kernels of Triton are launched on that alone."""
    return module_of(device).device(device) if kind_of(device) in VENDORS else nullcontext()


def new_event(device: "str | torch.device") -> Any:
    """Return an event that is timed, and that a thread waits for asleep; streams of `torch.accelerator` ignore it."""
    return module_of(device).Event(**vendor_of(device).event_options)


def catch_up(device: "str | torch.device") -> None:
    """Return when all is done that the thread has enqueued on a device; asleep, where a copy would keep a core busy."""
    if kind_of(device) in VENDORS:
        mark = new_event(device)
        mark.record(module_of(device).current_stream(device))
        mark.synchronize()


def uuids_of(devices: Devices) -> dict[int, str]:
    """Return by index what the driver knows accelerators by; nothing of other devices."""
    return dict(zip(devices.indices, map(vendor_of(devices.kind).uuid, devices.properties), strict=False))
