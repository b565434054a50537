"""The resource behind every streamed model: budgets, the home of its state, and an engine over it.

`outsize train`, `verify` and `outsize.wrap` open the same session. They differ in how long its two halves last:

1. The ledger and the home are opened with the session, and last as long as it.
2. `open_engine` reserves what a plan asks for (buffers, scratch, rooms for what leaves the device, the device) and
   returns the engine that walks the plan. A model that is planned anew gets another engine over the same home:
   `open_engine` closes the one before.

All of it is reserved in one ledger, so the budgets are those of the whole.
"""

import contextlib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from outsize.accelerators import catch_up
from outsize.codecs.transport import Transport
from outsize.config import MemoryConfig
from outsize.errors import Closing
from outsize.model.sizes.model_spec import ModelSpec
from outsize.model.split import Split
from outsize.model.walk import Boundaries
from outsize.optim.optimizer_spec import WEIGHTS, StateLayout
from outsize.planner.search.step_plan import Plan
from outsize.runtime.device.device import Device, open_device
from outsize.runtime.device.device_group import open_workers
from outsize.runtime.device.driver import DriverPinner, pinner_of
from outsize.runtime.device.heap import ResidentLimit, resident_bytes, trim
from outsize.runtime.engine.engine import Engine
from outsize.runtime.engine.op_handlers import EngineSettings
from outsize.runtime.engine.workers import Resources, open_rooms, open_scratch
from outsize.runtime.forward.binding import buffers_on
from outsize.runtime.ops.exchange_ops import Shared
from outsize.runtime.ops.link_codecs import packed_codec
from outsize.session.job.machine import RunMachine
from outsize.storage.committed import CommittedHome
from outsize.storage.directory import needed_directory
from outsize.storage.home import DiskHome, Home, HostHome
from outsize.storage.ledger import Arena, ArenaStatistics, Ledger, tier_of
from outsize.storage.prealloc import IOPool
from outsize.storage.record import CommitRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Where and how the state of a model lies.

    Attributes:
        state: how a trained unit lies at home.
        directory: of a disk home, and of scratches on disk.
        prefix: of file names in ``directory``, for several models that share it.
        transport: codecs of the link; one of weights writes those that do not train in a host home.
        own: elements of each unit whose optimizer state this process holds; None for all.
        whole: planes of which all elements are held whatever ``own`` says.
        granule_elements: what a home that commits replaces at once; None for a home that does not commit.
        file: of a home that commits, which stays; None for one that is gone with the process.
        record: of the committed home in ``file``, to go on with it.
        resident: units of which what trains lies on the device, over a home in host memory.
        keeps_gradients: whether gradients of those rest there from pass to pass, as those of a wrapped model.
        setting: name of the setting that ``directory`` comes from, for what errors say.
    """

    state: StateLayout
    directory: Path
    prefix: str = ""
    transport: Transport = field(default_factory=Transport)
    own: Sequence[range] | None = None
    whole: Collection[str] = (WEIGHTS,)
    granule_elements: int | None = None
    file: Path | None = None
    record: CommitRecord | None = None
    resident: Collection[int] = ()
    keeps_gradients: bool = False
    setting: str = "memory.store_dir"

    def path(self, name: str) -> Path:
        """Return the path of a file of this store."""
        return self.directory / f"{self.prefix}{name}"


class Session(Closing):
    """Budgets and the home of one model, and an engine over it. A context manager; closing gives everything back.

    Args:
        split: the model; its units are replaced by boundaries while the session lasts.
        machine: device and budgets.
        memory: the rates of emulated devices.
        store: where the state lies.
        before_bytes: resident memory of the process before it did anything, above which a CPU's budget counts; None
            takes what is resident when an engine is opened.

    Attributes:
        machine: as given.
        ledger: of every budget.
        host: arena of a home in host memory.
        pool: threads of files.
        home: of the training state.
        boundaries: in place in the model.

    Raises:
        BudgetExceededError: the home does not fit its tier.
        StorageError: the disk home cannot be made.
    """

    def __init__(
        self,
        split: Split,
        machine: RunMachine,
        memory: MemoryConfig,
        store: Store,
        before_bytes: int | None = None,
    ) -> None:
        self.machine = machine
        self._memory, self._store, self._before_bytes = memory, store, before_bytes
        self._buffers: Arena | None = None
        self._engine: Engine | None = None
        self._retries_before = machine.devices.num_allocator_retries()
        self._engine_stack, self._inside = contextlib.ExitStack(), contextlib.ExitStack()
        self._split = split
        budgets = dict.fromkeys(self._device_tiers, machine.device_bytes)
        with contextlib.ExitStack() as stack:
            self.ledger = Ledger({**budgets, "host": machine.host_bytes, "disk": machine.disk_bytes})
            self.host = stack.enter_context(contextlib.closing(self._arena("host")))
            if machine.home == "disk":
                stack.enter_context(needed_directory(store.directory, store.setting))
            self.pool = stack.enter_context(IOPool())
            # What a home that commits takes for itself; on a CPU over a disk that is the device's own RAM.
            self._home_buffers = stack.enter_context(contextlib.closing(self._arena(self._tier_below)))
            self._home_device: Device | None = None
            self._at_home = contextlib.ExitStack()
            stack.callback(self._at_home.close)  # behind the home, whose planes lie there
            self.home = self._open_home(split.spec)
            stack.enter_context(self.home)
            stack.callback(self.leave)
            self.enter()
            self._stack = stack.pop_all()

    def enter(self) -> None:
        """Put the boundaries into the model, and its buffers where it computes."""
        self._inside.enter_context(buffers_on(self._split.model, self.torch_device))
        self.boundaries = self._inside.enter_context(Boundaries(self._split.modules))

    def leave(self) -> None:
        """Close the engine and take out of the model what `enter` has put there; the home stays."""
        self.close_engine()
        self._inside.close()

    @property
    def torch_device(self) -> torch.device:
        """Where the model computes; with several workers, the first of them."""
        return self.machine.devices.torch_device

    @property
    def pinner(self) -> DriverPinner | None:
        """What pins host memory; None where copies to the device do not ask for it."""
        return pinner_of(self.machine.devices)

    @property
    def engine(self) -> Engine | None:
        """The engine that is open; None where there is none."""
        return self._engine

    def open_engine(
        self,
        split: Split,
        plan: Plan,
        boundary_bytes: Sequence[int],
        settings: EngineSettings,
        shared: Shared | None = None,
    ) -> Engine:
        """Close the engine before, reserve what ``plan`` asks for, and return an engine that walks it.

        Args:
            split: the model, the same units as those of the session.
            plan: memory sizes and programs.
            boundary_bytes: of the input of each unit for one microbatch.
            settings: the rest.
            shared: the ranks that share the steps; None for a single one.

        Raises:
            BudgetExceededError: a tier has too little left.
            StorageError: a scratch on disk cannot be made.
        """
        self.close_engine()
        with contextlib.ExitStack() as stack:
            stack.callback(self._forget_engine)
            # Another session that has made it may have ended, and taken it along.
            if self.machine.home == "disk":
                stack.enter_context(needed_directory(self._store.directory, self._store.setting))
            buffers = stack.enter_context(contextlib.closing(self._arena(self._tier_below)))
            between = (self.pool, buffers, self.ledger)
            scratch = open_scratch(plan, boundary_bytes, self._store.path("activations.bin"), *between)
            if scratch is not None:
                stack.enter_context(contextlib.closing(scratch))
            rooms = open_rooms(plan, self._store.path("kept.bin"), *between)
            for room in rooms.values():
                stack.enter_context(contextlib.closing(room))
            device = stack.enter_context(contextlib.closing(self._open_devices(plan)))
            # What torch's own allocator will take: it is reserved like everything else, so the budget is the sum.
            for tier, kind in itertools.product(self._device_tiers, ("activations", "workspace", "shared")):
                stack.enter_context(self.ledger.reserve(tier, kind, plan.memory["device"].get(kind, 0)))
            resources = Resources(device=device, home=self.home, host=buffers, scratch=scratch, rooms=rooms)
            before = self.machine.devices.num_allocator_retries()
            engine = Engine(split, self.boundaries, plan, resources, settings, shared)
            stack.callback(engine.close)
            # A block to set ahead that found no room counts as one, and cost nothing.
            self._retries_before += self.machine.devices.num_allocator_retries() - before
            self.home.pin()  # behind the buffers, which are smaller and busier: a driver may pin little
            self._engine, self._buffers = engine, buffers
            self._engine_stack = stack.pop_all()
        return engine

    def close_engine(self) -> None:
        """End the lanes and give back all but the home; idempotent."""
        self._engine_stack.close()

    def open_device(self, limit: ResidentLimit | None = None) -> Device:
        """Return the device that computes, the first of several, within its budget; the caller closes it."""
        device = self.machine.devices.each[0]
        tier = tier_of(0, self.machine.num_workers)
        return open_device(device, self.ledger, _per_s(self._memory.link_gb_per_s), limit, tier=tier)

    def extend(self, spec: ModelSpec) -> None:
        """Make room for the state of units that train by now."""
        self.home.extend(spec, self._store.state.planes)

    def arenas(self) -> list[ArenaStatistics]:
        """Return what is held of host memory, and how much of that the driver has pinned."""
        arenas = (self.host, self._home_buffers, *(() if self._buffers is None else (self._buffers,)))
        return [arena.statistics() for arena in arenas]

    def fallbacks(self) -> dict[str, int]:
        """What could not be had as asked so far, and how often: pinned memory, direct I/O, room for what was kept."""
        pageable = sum(each.num_pageable_fallbacks for each in self.arenas())
        counts = {"pageable": pageable, **self.home.fallbacks()}
        if retries := self.machine.devices.num_allocator_retries() - self._retries_before:
            counts["allocator_retries"] = retries
        return counts if self._engine is None else {**counts, "recomputed": self._engine.num_let_go}

    def close(self) -> None:
        """Give everything back; idempotent."""
        self._stack.close()

    @property
    def _device_tiers(self) -> list[str]:
        count = self.machine.num_workers
        return [tier_of(worker, count) for worker in range(count)]

    @property
    def _tier_below(self) -> str:
        """Tier of the ledger that buffers are in: on a CPU over a disk they are the device's own RAM."""
        return "device" if self.machine.below == "disk" else "host"

    def _arena(self, tier: str) -> Arena:
        return Arena(ledger=self.ledger, tier=tier, pinner=self.pinner)

    def _open_devices(self, plan: Plan) -> Device:
        """Return what computes: the device, or all of several."""
        machine, memory = self.machine, self._memory
        if machine.num_workers > 1:
            rates = _per_s(memory.link_gb_per_s), _per_s(memory.peer_gb_per_s)
            return open_workers(machine.devices, self.ledger, *rates)
        if not machine.devices.is_cpu:
            return self.open_device()
        before_bytes = self._before_bytes
        if before_bytes is None:
            trim()  # what a trial and a former engine have left
            before_bytes = resident_bytes()
        return self.open_device(ResidentLimit(before_bytes, machine.device_bytes, plan.total_bytes("host")))

    def _take_on_device(self, num_bytes: int, what: str) -> torch.Tensor:
        """Return zeros in the memory of the device that last as long as the home."""
        if self._home_device is None:
            self._home_device = self._at_home.enter_context(contextlib.closing(self.open_device()))
        memory = self._home_device.allocate(num_bytes, what).zero_()
        catch_up(memory.device)
        return memory

    def _forget_engine(self) -> None:
        self._engine, self._buffers = None, None

    def _open_home(self, spec: ModelSpec) -> Home:
        store, planes = self._store, self._store.state.planes
        if self.machine.home == "host":
            codec = packed_codec(store.transport)
            take, whole_planes = self._take_on_device if store.resident else None, store.whole
            return HostHome(
                spec,
                planes,
                self.host,
                codec,
                store.own,
                whole_planes,
                resident=store.resident,
                without_gradient=() if store.keeps_gradients else store.resident,
                take_on_device=take,
            )
        temporary = store.path("temporary.bin")  # its name goes at once
        if store.granule_elements is None:
            return DiskHome(
                spec,
                planes,
                temporary,
                self.pool,
                ledger=self.ledger,
                temporary=True,
                shares=store.own,
                full_planes=store.whole,
            )
        return CommittedHome(
            spec,
            planes,
            store.file or temporary,
            self.pool,
            arena=self._home_buffers,
            granule_elements=store.granule_elements,
            record=store.record,
            temporary=store.file is None,
            shares=store.own,
            full_planes=store.whole,
        )


def _per_s(gb_per_s: float | None) -> float | None:
    return gb_per_s * 1e9 if gb_per_s else None
