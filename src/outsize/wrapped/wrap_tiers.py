"""The memory behind a wrapped model: budgets, the home, and the engine over it, which may be made anew."""

import contextlib
from pathlib import Path

import torch
from torch import nn

from outsize.config import MemoryConfig
from outsize.errors import ConfigError
from outsize.model.sizes.model_spec import ModelSpec
from outsize.model.split import Split
from outsize.model.walk import Boundaries
from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.memory.memory_table import home_bytes
from outsize.planner.search.step_plan import Plan
from outsize.runtime.device.allocator import ResidentLimit, resident_bytes, trim
from outsize.runtime.device.device import open_device
from outsize.runtime.engine.engine import Engine
from outsize.runtime.engine.engine_settings import EngineSettings
from outsize.runtime.engine.plan_scratch import open_scratch
from outsize.runtime.forward.binding import buffers_on
from outsize.runtime.trial.measured import Measured
from outsize.session.job.machine import describe_machine
from outsize.storage.arena import Arena, CudaPinner
from outsize.storage.directory import needed_directory
from outsize.storage.home import DiskHome, HostHome
from outsize.storage.ledger import Ledger
from outsize.storage.pool import IOPool


class WrapTiers:
    """Budgets and a home for one model.

    Args:
        spec: its units.
        memory: device, budgets and home, as asked for.
        store_dir: directory of a disk home and of activations on disk.
        state: how a trained unit lies at home.
    """

    def __init__(self, spec: ModelSpec, memory: MemoryConfig, store_dir: Path, state: StateLayout) -> None:
        self._memory = memory
        self._store_dir = store_dir
        self._planes = state.planes
        state_bytes = sum(home_bytes(unit, state) for unit in spec.units)
        self.machine = describe_machine(memory, state_bytes, store_dir)
        if self.machine.num_workers > 1:
            raise ConfigError(f"device={memory.device!r}: outsize.wrap streams to one device; name one")
        self.on_cuda = self.machine.device.startswith("cuda")
        with contextlib.ExitStack() as stack:
            self.ledger = Ledger(
                {
                    "device": self.machine.device_bytes,
                    "host": self.machine.host_bytes,
                    "disk": self.machine.disk_bytes,
                }
            )
            self._host = stack.enter_context(contextlib.closing(self._arena("host")))
            if self.machine.home == "disk":
                stack.enter_context(needed_directory(store_dir, "store_dir"))
            self._pool = stack.enter_context(IOPool())
            self.home = stack.enter_context(contextlib.closing(self._open_home(spec)))
            self._stack = stack.pop_all()

    def extend(self, spec: ModelSpec) -> None:
        """Make room for the optimizer state of units that train by now; only over a host home."""
        if isinstance(self.home, HostHome):
            self.home.extend(spec, self._planes, self._host)

    def open_engine(
        self,
        stack: contextlib.ExitStack,
        split: Split,
        boundaries: Boundaries,
        plan: Plan,
        measured: Measured,
        settings: EngineSettings,
    ) -> Engine:
        """Reserve what ``plan`` asks for and return an engine; ``stack`` gives everything back.

        Raises:
            BudgetExceededError: a tier has too little left.
        """
        tier = "device" if self.machine.below == "disk" else "host"
        buffers = stack.enter_context(contextlib.closing(self._arena(tier)))
        path = self._store_dir / f"activations-{id(self):x}.bin"
        scratch = open_scratch(plan, measured.boundary_bytes, path, self._pool, buffers, self.ledger)
        if scratch is not None:
            stack.enter_context(contextlib.closing(scratch))
        rate = self._memory.link_gb_per_s
        limit = self._limit(plan)
        device = open_device(self.machine.device, self.ledger, rate * 1e9 if rate else None, limit)
        stack.enter_context(contextlib.closing(device))
        for name in ("activations", "workspace", "shared"):
            stack.enter_context(self.ledger.reserve("device", name, plan.memory["device"].get(name, 0)))
        engine = Engine(split, boundaries, plan, device, self.home, buffers, scratch, settings)
        stack.callback(engine.close)
        return engine

    def buffers_of(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Have the buffers of ``model`` where it computes."""
        return buffers_on(model, torch.device(self.machine.device if self.on_cuda else "cpu"))

    def close(self) -> None:
        """Give everything back; idempotent."""
        self._stack.close()

    def _limit(self, plan: Plan) -> ResidentLimit | None:
        """Where the device is the CPU, the limit of resident memory: what is there, and what the plan adds to it."""
        if self.machine.device != "cpu":
            return None
        trim()  # what a trial and a former engine have left
        return ResidentLimit(resident_bytes(), self.machine.device_bytes, plan.total_bytes("host"))

    def _arena(self, tier: str) -> Arena:
        return Arena(ledger=self.ledger, tier=tier, pinner=CudaPinner() if self.on_cuda else None)

    def _open_home(self, spec: ModelSpec) -> HostHome | DiskHome:
        if self.machine.home == "host":
            return HostHome(spec, self._planes, self._host)
        path = self._store_dir / f"home-{id(self):x}.bin"  # nameless as soon as it is open
        return DiskHome(spec, self._planes, path, self._pool, ledger=self.ledger, temporary=True)
