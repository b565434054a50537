"""The machine of a run: devices and budgets, copies between workers, data sheets, codecs that run there.

Between which devices of a run stages hand over by themselves, and how fast that is.

A run computes the same either way, so what a machine can do may decide.
"""

import contextlib
import hashlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from outsize.accelerators import Devices, check_here, count_of
from outsize.choices import Home
from outsize.codecs.codec_spec import CODECS
from outsize.codecs.transport import Transport
from outsize.config import MemoryConfig
from outsize.errors import ConfigError
from outsize.hardware.cards import find_card, known_card, parse_gpus
from outsize.hardware.host_memory import IN_MEMORY, HostMemory, read_disk, read_host_memory
from outsize.hardware.machine_spec import DEVICE_SHARE, DISK_SHARE, HOST_SHARE, Figure, Gpu, Machine, Peer
from outsize.planner.memory.memory_table import Tier
from outsize.runtime.device.device_group import can_copy
from outsize.session.job.job_options import AUTO
from outsize.storage.directory import check_not_a_device
from outsize.units import format_bytes

# Where the device's memory is RAM it shares it with the host tier.
CPU_DEVICE_SHARE = 0.4
# Of RAM that host and device both have as theirs: weights cross, and rest on the host beside masters and moments.
SHARED_DEVICE_SHARE = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMachine:
    """The device and the budgets of one run.

    Attributes:
        devices: that compute, one for each worker.
        home: ``host`` or ``disk``.
        below: the tier next to the device, ``host`` or ``disk``.
        device_bytes: budget of the device; of each, where there are several.
        host_bytes: budget of host memory.
        disk_bytes: budget of the disk.
        is_shared: whether the memory of the device is the host's RAM, so that both budgets are parts of it.
    """

    devices: Devices
    home: Tier
    below: Tier
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    is_shared: bool = False

    @property
    def num_workers(self) -> int:
        """Devices that compute."""
        return len(self.devices.each)


def determinism_said(deterministic: bool, devices: Devices) -> str | None:
    """Return what a user is told of algorithms that repeat their bits; None on a host, where they cost nothing."""
    if not (deterministic and devices.accelerated):
        return None
    return (
        "train.deterministic: attention's backward is slower, and operations that do not repeat their bits are errors; "
        "train.deterministic=false takes what is fastest"
    )


def available_ram_bytes() -> int:
    """Return how much RAM the process may still take: what is available, within the limits of its control groups."""
    return read_host_memory(Path("/")).free_bytes() or 0


def describe_machine(memory: MemoryConfig, devices: Devices, state_bytes: int, store_dir: Path) -> RunMachine:
    """Return the machine of a run whose home holds ``state_bytes``.

    Args:
        memory: what the user asked for; budgets that are null, and a home that is ``auto``, are resolved here.
        devices: that compute.
        state_bytes: weights, masters, moments and gradients at rest.
        store_dir: where the disk home would be, its directory or its file.

    Raises:
        ConfigError: a budget is more than the machine has.
        StorageError: the home would be on disk, and ``store_dir`` is a zram device instead of a directory on one.
    """
    ram = read_host_memory(Path("/"))
    _check_budgets(memory, devices, ram, store_dir)
    available = ram.free_bytes() or 0
    is_shared = devices.share_ram
    device_bytes, host = _budgets(memory, devices, available, is_shared)
    home: Tier = memory.home if memory.home != "auto" else "host" if state_bytes <= host else "disk"
    below: Tier = "disk" if devices.is_cpu and home == "disk" else "host"
    if home == "disk":
        check_directory(store_dir)
    return RunMachine(
        devices=devices,
        home=home,
        below=below,
        device_bytes=device_bytes,
        host_bytes=host,
        disk_bytes=memory.disk_memory or int(_free_disk_bytes(store_dir) * DISK_SHARE),
        is_shared=is_shared,
    )


def check_directory(store_dir: Path) -> None:
    """Check where the disk home would be, its directory or its file.

    Raises:
        StorageError: it is a zram device instead of a directory on one.
    """
    check_not_a_device(store_dir)
    check_not_a_device(store_dir.parent)


def say_in_memory(store_dir: Path, warn: Callable[..., object]) -> None:
    """Warn where a disk home in ``store_dir`` would lie in memory."""
    kind = read_disk(existing(store_dir), Path("/")).file_system.value
    if kind in IN_MEMORY:
        warn(
            "store_dir: %s is %s, whose files take RAM that host_memory does not count; name a directory on a disk",
            store_dir,
            kind,
        )


def _budgets(memory: MemoryConfig, devices: Devices, available: int, is_shared: bool) -> tuple[int, int]:
    """Return the bytes of the device, of each where there are several, and those of the host."""
    count = len(devices.each)
    if is_shared:  # one pool, given once: a driver that runs out of it takes the machine along
        pool = int(available * DEVICE_SHARE)
        left = pool - (memory.host_memory or int(pool * (1 - SHARED_DEVICE_SHARE)))
        each = memory.device_memory or max(0, left) // count
        return each, memory.host_memory or max(0, pool - each * count)
    host = memory.host_memory or int(available * HOST_SHARE)
    if memory.device_memory:
        return memory.device_memory, host
    check_here(devices)
    if devices.accelerated:
        return int(min(free for free, _ in devices.memory_info()) * DEVICE_SHARE), host
    return int(available * CPU_DEVICE_SHARE / count), host


def _check_budgets(memory: MemoryConfig, devices: Devices, ram: HostMemory, store_dir: Path) -> None:
    """Refuse budgets that the machine could never keep, whatever else runs on it."""
    count = len(devices.each)
    there, of_what = ram.usable_bytes(), "RAM"
    if there is not None and there == ram.cgroup_limit_bytes.number():
        of_what = f"memory, the limit of the control group {ram.cgroup_limit_bytes.source}"
    most: dict[str, tuple[int | None, str]] = {"host_memory": (there, of_what)}
    if not devices.accelerated:
        each = f"{of_what}, which {count} devices share" if count > 1 else of_what
        most["device_memory"] = (there and there // count, each)
    elif memory.device_memory and count_of(devices.kind):
        most["device_memory"] = (min(total for _, total in devices.memory_info()), f"memory on {devices}")
        if there and devices.share_ram:
            left = max(0, there - (memory.host_memory or 0))
            most["device_memory"] = (left // count, f"{of_what}, which {devices} shares with host_memory")
    disk_bytes = shutil.disk_usage(existing(store_dir)).total if memory.disk_memory else 0
    if disk_bytes and memory.home != "host":  # what is no disk at all is refused where it is written to
        most["disk_memory"] = (disk_bytes, f"disk at {existing(store_dir)}")
    for key, (least, what) in most.items():
        budget = getattr(memory, key)
        if budget and least is not None and budget > least:
            raise ConfigError(
                f"{key}: {format_bytes(budget)} are more than this machine has: {format_bytes(least)} of {what}; "
                "give less, or nothing for what is free. `outsize plan` plans for other machines"
            )


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
    return shutil.disk_usage(existing(path)).free + (path.stat().st_blocks * 512 if path.is_file() else 0)


def existing(path: Path) -> Path:
    """Return ``path``, or what of the way to it there is already."""
    return next(p for p in (path, *path.absolute().parents) if p.exists())


# Stands for devices without figures, emulated ones and GPUs that nobody has described.
USUAL = "4090"


def preset_of(name: str) -> Gpu | None:
    """Return the preset for a driver's name, e.g. ``NVIDIA H100 80GB HBM3``; None for one that nobody has described."""
    card = known_card(name)
    return None if card is None else card.gpu()


def assumed_machine(devices: Devices) -> Machine:
    """Return the preset of the devices of a run, or that of so many `USUAL` cards where they have none.

    For what must not be timed, since another start would find another number.
    """
    gpu = find_card(USUAL).gpu()
    with contextlib.suppress(AssertionError, RuntimeError):  # torch without CUDA: of a run on another machine
        gpu = next(filter(None, map(preset_of, devices.each[0].titles)), gpu)
    return parse_gpus(f"{len(devices.each)}x{gpu.name}")


Pairs = frozenset[tuple[int, int]]
# Large enough to hide what a copy costs besides its bytes; the best of so many.
_COPY_BYTES, _REPEATS = 16 * 2**20, 5


def peers_of(handover: str, activations: str, peer_gb_per_s: float | None, devices: Devices) -> Pairs:
    """Return the pairs of workers (source, target), one after the other in turn, of which one copies to the other.

    Args:
        handover: ``parallel.handover``.
        activations: codec of what is saved below a device.
        peer_gb_per_s: what emulated devices copy to each other; None where they do not.
        devices: the workers.

    Raises:
        ConfigError: ``parallel.handover`` is ``peer``, and a pair cannot, or inputs lose something on their way below.
    """
    each = devices.each
    count = len(each)
    if count == 1 or handover == "host":
        return frozenset()
    if activations not in (*CODECS["weights"], AUTO):
        if handover == "peer":
            raise ConfigError(
                f"parallel.handover=peer: a backward would find inputs that {activations} has rounded, and its forward "
                "those as they were; leave transport.activations lossless, or use parallel.handover=auto"
            )
        return frozenset()
    pairs = frozenset((worker, (worker + 1) % count) for worker in range(count))
    able = frozenset(pair for pair in pairs if _can_copy(peer_gb_per_s, each[pair[0]], each[pair[1]]))
    if handover == "peer" and able != pairs:
        source, target = min(pairs - able)
        advice = "set memory.peer_gb_per_s" if devices.emulated else "see outsize doctor"
        raise ConfigError(
            f"parallel.handover=peer: {each[source]} does not copy to {each[target]} by itself; {advice}, or use "
            "parallel.handover=auto"
        )
    return able


def measured_peers(rate: float | None, devices: Devices, pairs: Pairs) -> tuple[Peer, ...]:
    """Return what copies between ``pairs`` reach; on emulated devices what they are throttled to."""
    each, peers = devices.each, list[Peer]()
    for source, target in sorted(pairs):
        if rate is not None:
            figure = Figure(value=rate * 1e9, source="memory.peer_gb_per_s", measured=True)
        else:
            value = _bytes_per_s(each[source].torch_device, each[target].torch_device)
            figure = Figure(value=value, source="copies between the two, timed", measured=True)
        peers.append(Peer(source=source, target=target, bytes_per_s=figure, own_wire=True))
    return tuple(peers)


def _can_copy(peer_gb_per_s: float | None, source: Devices, target: Devices) -> bool:
    if source.emulated:
        return peer_gb_per_s is not None
    return can_copy(source, target)


def _bytes_per_s(source: torch.device, target: torch.device) -> float:
    sent = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=source)
    arrived = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=target)
    best_s = float("inf")
    for _ in range(_REPEATS + 1):  # the first opens the way
        torch.accelerator.synchronize(source)
        began = time.perf_counter()
        arrived.copy_(sent)
        torch.accelerator.synchronize(source)
        torch.accelerator.synchronize(target)
        best_s = min(best_s, time.perf_counter() - began)
    return _COPY_BYTES / best_s


def check_transport(transport: Transport, devices: Devices, home: Home) -> None:
    """Check that the codecs run on ``devices``, and with a home there.

    Raises:
        ConfigError: there is no such link on this machine, or the codec does not run there.
    """
    if transport == Transport():
        return
    if devices.is_cpu:
        raise ConfigError("transport: a cpu computes where the host memory is, over no link; leave it raw")
    if home == "disk" and not transport.is_raw("weights"):
        raise ConfigError(
            "transport.weights: encodings of weights are kept in host memory, and the home is on disk; leave it raw, "
            "or set memory.home=host"
        )
    if devices.accelerated:
        for crossing in ("activations", "gradients"):
            if transport.spec(crossing).lossless and not transport.is_raw(crossing):
                raise ConfigError(
                    f"transport.{crossing}: {getattr(transport, crossing)} is encoded on a CPU only; use int8 or raw"
                )
