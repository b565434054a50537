"""The tiers of a run, opened in the order in which they build on each other: ledger, home, scratches, device."""

import contextlib
import itertools
from pathlib import Path
from typing import Self

from outsize import files
from outsize.optim.shares import home_granule
from outsize.runtime.device.allocator import ResidentLimit
from outsize.runtime.device.device import Device, open_device
from outsize.runtime.device.device_group import open_workers, tier_of
from outsize.runtime.engine.plan_scratch import open_rooms, open_scratch
from outsize.runtime.ops.link_codecs import packed_codec
from outsize.session.job.prepare import Prepared
from outsize.storage.arena import Arena, CudaPinner
from outsize.storage.committed import CommittedHome
from outsize.storage.directory import needed_directory
from outsize.storage.home import DiskHome, HostHome
from outsize.storage.ledger import Ledger
from outsize.storage.pool import IOPool
from outsize.storage.record import CommitRecord
from outsize.storage.scratch import DiskScratch

# The file of a disk home whose name goes at once.
TEMPORARY = "temporary.bin"


class Tiers:
    """What a run holds outside its engine. A context manager; everything is given back when it closes.

    Args:
        prepared: model, plan and budgets.
        store_dir: directory of the disk home and of scratches on disk.
        home_file: of a home that commits, which stays; without a name it is gone with the process.
        record: of the committed home in ``home_file``, to go on with it.

    Attributes:
        ledger: of every budget, in which all of it is reserved.
        host: arena of a home in host memory.
        buffers: arena of what lies between the device and the tier below it.
        pool: threads of files.
        home: of the training state.
        scratch: of activations that leave the device; None where none does.
        rooms: of what forwards keep and what leaves the device, by its extent.
        device: that computes.
    """

    def __init__(
        self,
        prepared: Prepared,
        store_dir: Path,
        home_file: Path | None = None,
        record: CommitRecord | None = None,
    ) -> None:
        self._prepared, self._store_dir, self._home_file = prepared, store_dir, home_file
        machine, plan = prepared.machine, prepared.plan
        names = [tier_of(worker, machine.num_workers) for worker in range(machine.num_workers)]
        with contextlib.ExitStack() as stack:
            budgets = dict.fromkeys(names, machine.device_bytes)
            self.ledger = Ledger({**budgets, "host": machine.host_bytes, "disk": machine.disk_bytes})
            self.host = stack.enter_context(contextlib.closing(self._arena("host")))
            # On a CPU over a disk buffers are the device's own RAM.
            below = "device" if machine.below == "disk" else "host"
            self.buffers = stack.enter_context(contextlib.closing(self._arena(below)))
            if machine.home == "disk":
                stack.enter_context(needed_directory(store_dir, "memory.store_dir"))
            self.pool = stack.enter_context(IOPool())
            self.home = self._open_home(record)
            stack.callback(self._close_home)
            between = (self.pool, self.buffers, self.ledger)
            boundary_bytes = prepared.measured.boundary_bytes
            self.scratch = open_scratch(plan, boundary_bytes, store_dir / "activations.bin", *between)
            if self.scratch is not None:
                stack.enter_context(contextlib.closing(self.scratch))
            self.rooms = open_rooms(plan, store_dir / "kept.bin", *between)
            for room in self.rooms.values():
                stack.enter_context(contextlib.closing(room))
            self.device = stack.enter_context(contextlib.closing(self._open_device()))
            # What torch's own allocator will take: it is reserved like everything else, so the budget is the sum.
            for name, kind in itertools.product(names, ("activations", "workspace", "shared")):
                stack.enter_context(self.ledger.reserve(name, kind, plan.memory["device"].get(kind, 0)))
            self._stack = stack.pop_all()

    def disk_bytes(self) -> tuple[int, int]:
        """Bytes read from and written to disk so far."""
        read = written = 0
        if isinstance(self.home, DiskHome):
            statistics = self.home.statistics()
            read, written = statistics.bytes_read, statistics.bytes_written
        for scratch in (self.scratch, *self.rooms.values()):
            if isinstance(scratch, DiskScratch):
                moved = scratch.statistics()
                read, written = read + moved.bytes_out, written + moved.bytes_in
        return read, written

    def fallbacks(self) -> dict[str, int]:
        """What could not be had as asked so far, and how often: pinned memory, direct I/O."""
        arenas = (self.host, self.buffers)
        found = {"pageable": sum(arena.statistics().num_pageable_fallbacks for arena in arenas)}
        if isinstance(self.home, DiskHome):
            found["buffered"] = self.home.file.statistics().num_buffered_fallbacks
        return found

    def close(self) -> None:
        """Give everything back; idempotent."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _arena(self, tier: str) -> Arena:
        pinner = CudaPinner() if self._prepared.machine.device.startswith("cuda") else None
        return Arena(ledger=self.ledger, tier=tier, pinner=pinner)

    def _open_device(self) -> Device:
        machine, memory = self._prepared.machine, self._prepared.config.memory
        bytes_per_s = memory.link_gb_per_s * 1e9 if memory.link_gb_per_s else None
        if machine.num_workers > 1:
            peer = memory.peer_gb_per_s * 1e9 if memory.peer_gb_per_s else None
            return open_workers(machine.device, self.ledger, bytes_per_s, peer)
        host_bytes = self._prepared.plan.total_bytes("host")
        limit = ResidentLimit(self._prepared.before_bytes, machine.device_bytes, host_bytes)
        return open_device(machine.device, self.ledger, bytes_per_s, limit)

    def _open_home(self, record: CommitRecord | None) -> HostHome | DiskHome:
        prepared, plan, spec = self._prepared, self._prepared.plan, self._prepared.split.spec
        planes = plan.state.planes
        if prepared.machine.home == "host":
            return HostHome(spec, planes, self.host, packed_codec(plan.transport), prepared.own)
        temporary = self._store_dir / TEMPORARY
        if not plan.layout.commits:
            return DiskHome(
                spec, planes, temporary, self.pool, ledger=self.ledger, temporary=True, own=prepared.own
            )
        return CommittedHome(
            spec,
            planes,
            self._home_file or temporary,
            self.pool,
            arena=self.buffers,
            granule_elements=home_granule(spec, plan.tile_elements, prepared.group.size),
            record=record,
            temporary=self._home_file is None,
            ledger=self.ledger,
            own=prepared.own,
        )

    def _close_home(self) -> None:
        """Close the home; one that stays but has nothing committed is of no use to anyone."""
        self.home.close()
        if isinstance(self.home, CommittedHome) and self._home_file and self.home.record is None:
            with contextlib.suppress(OSError):
                files.system().unlink(self.home.file.path)
