"""What the machine has to give: which device computes, and how many bytes each tier may hold."""

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from outsize.config import MemoryConfig
from outsize.errors import ConfigError
from outsize.hardware.spec import DEVICE_SHARE, DISK_SHARE, HOST_SHARE
from outsize.planner.memory import Tier
from outsize.runtime.workers import device_names
from outsize.storage.zram import check_not_a_device

# Where the device's memory is RAM it shares it with the host tier.
CPU_DEVICE_SHARE = 0.4
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USAGE = Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device and the budgets of one run.

    Attributes:
        device: ``cpu``, ``emulated:N``, ``cuda:i`` or ``cuda:i,j``.
        home: ``host`` or ``disk``.
        below: the tier next to the device, ``host`` or ``disk``.
        device_bytes: budget of the device; of each, where there are several.
        host_bytes: budget of host memory.
        disk_bytes: budget of the disk.
    """

    device: str
    home: Tier
    below: Tier
    device_bytes: int
    host_bytes: int
    disk_bytes: int

    @property
    def num_workers(self) -> int:
        """Devices that compute."""
        return len(device_names(self.device))


def choose_device(name: str) -> str:
    """Resolve ``auto``, ``cuda``, ``cuda:all`` and ``emulated``.

    Raises:
        ConfigError: ``cuda:all`` where torch sees no device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda:all":
        count = torch.cuda.device_count()
        if not count:
            raise ConfigError(
                "memory.device is cuda:all, but torch sees no CUDA device; use --device cpu, or check the driver"
            )
        return "cuda:" + ",".join(map(str, range(count)))
    return {"cuda": "cuda:0", "emulated": "emulated:1"}.get(name, name)


def choose_dtype(name: str, device: str) -> str:
    """Resolve ``auto``: bf16 on CUDA, fp32 elsewhere."""
    return name if name != "auto" else "bf16" if device.startswith("cuda") else "fp32"


def available_ram_bytes() -> int:
    """RAM that the process may still take: what is available, within the limit of its control group."""
    available: int = psutil.virtual_memory().available
    try:
        limit, usage = _CGROUP_LIMIT.read_text().strip(), _CGROUP_USAGE.read_text().strip()
    except OSError:
        return available
    return available if limit == "max" else min(available, max(int(limit) - int(usage), 0))


def describe_machine(memory: MemoryConfig, state_bytes: int, store_dir: Path) -> Machine:
    """Return the machine of a run whose home holds ``state_bytes``.

    Args:
        memory: what the user asked for; null and ``auto`` are resolved here.
        state_bytes: weights, masters, moments and gradients at rest.
        store_dir: where the disk home would be, its directory or its file.

    Raises:
        StorageError: the home would be on disk, and ``store_dir`` is a zram device instead of a directory on one.
    """
    device = choose_device(memory.device)
    available = available_ram_bytes()
    host = memory.host_memory or int(available * HOST_SHARE)
    home: Tier = memory.home if memory.home != "auto" else "host" if state_bytes <= host else "disk"
    below: Tier = "disk" if device == "cpu" and home == "disk" else "host"
    if home == "disk":
        check_directory(store_dir)
    return Machine(
        device=device,
        home=home,
        below=below,
        device_bytes=memory.device_memory or _default_device_bytes(device, available),
        host_bytes=host,
        disk_bytes=memory.disk_memory or int(_free_disk_bytes(store_dir) * DISK_SHARE),
    )


def check_directory(store_dir: Path) -> None:
    """Check where the disk home would be, its directory or its file.

    Raises:
        StorageError: it is a zram device instead of a directory on one.
    """
    check_not_a_device(store_dir)
    check_not_a_device(store_dir.parent)


def _default_device_bytes(device: str, available: int) -> int:
    names = device_names(device)
    if device.startswith("cuda"):
        free = (torch.cuda.mem_get_info(int(name.partition(":")[2]))[0] / names.count(name) for name in names)
        return int(min(free) * DEVICE_SHARE)
    return int(available * CPU_DEVICE_SHARE / len(names))


def home_file(memory: MemoryConfig, run_dir: Path) -> Path:
    """Return the file of a disk home that commits; several runs may share ``memory.store_dir``."""
    if memory.store_dir is None:
        return run_dir / "store" / "home.bin"
    where = str(run_dir.resolve())
    return (
        Path(memory.store_dir)
        / f"{run_dir.resolve().name}-{hashlib.sha256(where.encode()).hexdigest()[:8]}.bin"
    )


def _free_disk_bytes(path: Path) -> int:
    """What is free for a home at ``path``, and what an earlier one there takes already."""
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    return shutil.disk_usage(existing).free + (path.stat().st_blocks * 512 if path.is_file() else 0)
