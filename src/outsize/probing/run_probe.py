"""A probe from start to end: inventory first, then everything that can be timed, one thing at a time.

What is timed stands in one list, `_Probe.parts`, what plans need first. The time limit is shared out: each part that
plans need has the time that is left over the number of such parts left, and repeats nothing once that is up. Any other
part begins only where what is left is as much as the longest part so far took; what it would have filled says that it
was left out.
"""

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from outsize.accelerators import CPU, Devices, count_of, kind_here, uuids_of
from outsize.hardware.cgroup import Fact
from outsize.hardware.gpus import Inventory, in_order_of, take_inventory
from outsize.hardware.link_fit import AllReduceRates
from outsize.hardware.machine_file import (
    DataRates,
    DeviceRates,
    DiskRates,
    HostRates,
    MachineFile,
    ProbedCodec,
)
from outsize.hardware.topology import PeerLink, TogetherRates
from outsize.probing.compute import dtypes_of, measure_attention, measure_device_memory, measure_matmul
from outsize.probing.data_probe import measure_codecs, measure_data, measure_disk
from outsize.probing.effort import Effort, shared, within_memory
from outsize.probing.host_probe import measure_host, measure_numa
from outsize.probing.link import measure_links, measure_overlap
from outsize.probing.several_gpus import (
    measure_all_reduce,
    measure_peers,
    measure_together,
    ranks_and_backend,
    read_loaded_link,
)

Announce = Callable[[str, int, int], None]
"""Called before each part with its name, its index and the number of parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a probe is asked for beyond what every probe does.

    Attributes:
        tokenizer: a ``tokenizer.json`` to time; None for one made on the spot.
        tensors: a safetensors file that codecs are tried on; None for none.
        num_ranks: processes that sum; None for one on each GPU, or on each of up to four processors.
    """

    tokenizer: Path | None = None
    tensors: Path | None = None
    num_ranks: int | None = None


_NOTHING_MORE = Wishes()


def probe(
    effort: Effort,
    directories: Sequence[Path],
    *,
    announce: Announce = lambda name, index, total: None,
    root: Path = Path("/"),
    wishes: Wishes = _NOTHING_MORE,
) -> MachineFile:
    """Return what the machine has and does.

    Args:
        effort: how long and how large.
        directories: whose disks are timed; each is written to, and nothing stays there.
        announce: told what begins.
        root: where ``proc`` and ``sys`` are.
        wishes: what else to time.
    """
    started = time.perf_counter()
    created_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    inventory = take_inventory(directories, root=root)
    if inventory.gpus:  # NVML counts all that there are, torch those that it sees
        uuids = [uuid for device in _devices() for uuid in uuids_of(device).values()]
        inventory = inventory.model_copy(update={"gpus": in_order_of(inventory.gpus, uuids)})
    effort = within_memory(effort, inventory.memory.free_bytes())
    run = _Probe(effort, inventory, list(directories), wishes, _devices())
    parts, longest_s = run.parts(), 0.0
    num_needed = sum(needed for _, needed, _ in parts)
    for index, (name, needed, measure) in enumerate(parts):
        began = time.perf_counter()
        left_s = started + effort.limit_s - began
        if not needed and left_s <= longest_s:
            run.left_out.append(name)
            continue
        announce(name, index, len(parts))
        run.give(max(0.0, left_s) / (num_needed if needed else 1))
        measure()
        num_needed -= needed
        longest_s = max(longest_s, time.perf_counter() - began)
    return run.result(created_at, time.perf_counter() - started)


@dataclass
class _Probe:
    """Measurements of a probe, filled in as they are made."""

    effort: Effort
    inventory: Inventory
    directories: list[Path]
    wishes: Wishes
    names: list[Devices]
    host: HostRates | None = None
    disks: list[DiskRates] = field(default_factory=list)
    devices: dict[str, DeviceRates] = field(default_factory=dict)
    together: tuple[TogetherRates, ...] = ()
    peers: tuple[PeerLink, ...] = ()
    all_reduce: AllReduceRates | None = None
    data: DataRates | None = None
    codecs: tuple[ProbedCodec, ...] = ()
    left_out: list[str] = field(default_factory=list)

    def parts(self) -> list[tuple[str, bool, Callable[[], None]]]:
        """Return name, whether no plan does without it, and what measures it, in order."""
        steps: list[tuple[str, bool, Callable[[], None]]] = [("host memory and optimizer", True, self._host)]
        steps += [(f"disk of {at}", True, partial(self._disk, at)) for at in self.directories]
        for name in self.names:
            steps += [
                (f"compute of {name}", True, partial(self._compute, name)),
                (f"link of {name}", True, partial(self._link, name)),
            ]
        for name in self.names:
            steps.append((f"overlap of {name}", False, partial(self._overlap, name)))
        steps += [("memory of other nodes", False, self._numa), ("tokenizer and loader", False, self._data)]
        if self.wishes.tensors is not None:
            # Asked for by name, so it is done however late it is.
            steps.append((f"codecs on {self.wishes.tensors}", True, self._codecs))
        if len(self.names) > 1:
            steps += [
                ("all GPUs at once", False, self._together),
                ("copies between GPUs", False, self._peers),
            ]
        steps.append(("sums over processes", False, self._all_reduce))
        return steps

    def give(self, seconds: float) -> None:
        """Set when the time of the part that begins now is up."""
        self.effort = replace(self.effort, until_s=time.perf_counter() + seconds)

    def result(self, created_at: str, duration_s: float) -> MachineFile:
        """Return all that was measured."""
        assert self.host is not None
        return MachineFile(
            created_at=created_at,
            mode=self.effort.mode,
            duration_s=duration_s,
            inventory=self.inventory,
            host=self.host,
            disks=tuple(self.disks),
            devices=tuple(self.devices.values()),
            together=self.together,
            peers=self.peers,
            all_reduce=self.all_reduce,
            data=self.data,
            codecs=self.codecs,
            left_out=Fact.read(", ".join(self.left_out), f"no time was left of {self.effort.limit_s:g} s"),
        )

    def _for_each(self) -> Effort:
        """Return the effort for one device where all are timed."""
        return shared(self.effort, len(self.names))

    def _change(self, device: Devices, **fields: object) -> None:
        self.devices[str(device)] = self.devices[str(device)].model_copy(update=fields)

    def _host(self) -> None:
        self.host = measure_host(self.effort)

    def _disk(self, directory: Path) -> None:
        self.disks.append(measure_disk(directory, self.effort))

    def _compute(self, device: Devices) -> None:
        assert self.host is not None
        effort = self._for_each()
        name, num_sms, memory_bytes = _describe(device, self.inventory)
        on_cpu = device.is_cpu
        self.devices[str(device)] = DeviceRates(
            device=str(device),
            name=name,
            num_sms=num_sms,
            memory_bytes=memory_bytes,
            memory_triad_bytes_per_s=self.host.dram_triad_bytes_per_s
            if on_cpu
            else measure_device_memory(device, effort),
            matmul_flops_per_s={dtype: measure_matmul(device, dtype, effort) for dtype in dtypes_of(device)},
            attention_flops_per_s={
                dtype: measure_attention(device, dtype, effort) for dtype in dtypes_of(device)
            },
            links=(),
        )

    def _link(self, device: Devices) -> None:
        effort = self._for_each()
        links = tuple(measure_links(device, effort))
        generation, lanes = read_loaded_link(device, effort)
        self._change(device, links=links, pcie_generation_loaded=generation, pcie_lanes_loaded=lanes)

    def _overlap(self, device: Devices) -> None:
        effort = self._for_each()
        overlap = measure_overlap(device, effort)
        if overlap.is_noisy():  # its times cannot all be true
            overlap = measure_overlap(device, effort)
        self._change(device, overlap=overlap)

    def _numa(self) -> None:
        assert self.host is not None
        nodes = self.inventory.cpu.numa_nodes
        self.host = self.host.model_copy(update={"numa": measure_numa(nodes, self.effort)})
        for index, name in enumerate(name for name in self.names if name.accelerated):
            rates = (
                self.inventory.gpus[index].numa_node.number() if index < len(self.inventory.gpus) else None
            )
            node = None if rates is None else int(rates)
            self._change(name, numa=measure_numa(nodes, self.effort, device=name, device_node=node))

    def _data(self) -> None:
        usable = self.inventory.cpu.num_usable_cpus.number()
        self.data = measure_data(self.effort, self.wishes.tokenizer, num_cpus=int(usable or 1))

    def _codecs(self) -> None:
        self.codecs = measure_codecs(self.wishes.tensors)

    def _together(self) -> None:
        self.together = measure_together(self.names, self.effort)

    def _peers(self) -> None:
        self.peers = measure_peers(list(self.devices.values()), self.inventory.gpus, self.effort)

    def _all_reduce(self) -> None:
        num_devices = sum(name.accelerated for name in self.names)
        num_cpus = int(self.inventory.cpu.num_usable_cpus.number() or 1)
        ranks, backend = ranks_and_backend(self.wishes.num_ranks, num_devices, num_cpus)
        self.all_reduce = measure_all_reduce(
            ranks,
            self.effort.all_reduce_bytes_max,
            backend=backend,
            free_bytes=self.inventory.memory.free_bytes(),
        )


def _devices() -> list[Devices]:
    """Return the GPUs; the CPU is a device of its own where there is none."""
    kind = kind_here()
    return [CPU] if kind is None else [Devices(kind, (index,)) for index in range(count_of(kind))]


def _describe(device: Devices, inventory: Inventory) -> tuple[str, Fact, Fact]:
    if device.accelerated:
        (properties,) = device.properties
        how = f"torch.{device.kind}.get_device_properties"
        return (
            properties.name,
            Fact.read(getattr(properties, "multi_processor_count", None), how),
            Fact.read(properties.total_memory, how),
        )
    usable = inventory.memory.usable_bytes()
    memory = Fact.absent("neither RAM nor a limit is known")
    if usable is not None:
        memory = Fact.read(usable, "the least of RAM and the limit of the control group")
    return str(inventory.cpu.model.value or "CPU"), Fact.read(None, "a CPU has none"), memory
