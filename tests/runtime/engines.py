"""An engine over any module, without files, data or configuration: for tests of what lies below `outsize.training`."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from contracts.home_contract import planes_for
from outsize.accelerators import Devices
from outsize.codecs.transport import EXACT, Wire
from outsize.group.group import Group
from outsize.model.split import Split, split
from outsize.model.walk import Boundaries
from outsize.optim.adamw import PlaneAdamW
from outsize.optim.shares import shares
from outsize.planner.memory.step_bytes import net_staging
from outsize.planner.program.stages import Kept
from outsize.planner.search.step_plan import Budgets, Demand, Plan, PlanOptions, plan_step
from outsize.runtime.device.device import open_device
from outsize.runtime.engine.engine import Engine
from outsize.runtime.engine.op_handlers import EngineSettings
from outsize.runtime.engine.workers import Resources, open_rooms
from outsize.runtime.forward.binding import TORCH_DTYPE
from outsize.runtime.ops.context import Microbatch, StepContext
from outsize.runtime.ops.exchange_ops import Shared
from outsize.storage.committed import CommittedHome
from outsize.storage.home import DiskHome, HostHome
from outsize.storage.ledger import Arena, Ledger
from outsize.storage.prealloc import IOPool
from outsize.storage.scratch import HostScratch
from reference import Trace, num_targets

GENEROUS = Budgets(device=2**28)
SCRATCH_BYTES = 2**16


@dataclass
class Rig:
    """An engine with its home filled from a model in memory."""

    engine: Engine
    parts: Split
    home: HostHome | DiskHome
    arena: Arena

    def weights(self) -> dict[str, Tensor]:
        """All weights as they are at home."""
        found = {}
        for unit in self.parts.spec.units:
            if unit.tensors:
                dtype = TORCH_DTYPE[self.parts.spec.dtype]
                plane = self.arena.take(unit.numel * dtype.itemsize, "weights").view(dtype)
                self.home.read(unit.index, "weights", 0, plane)
                found.update(
                    {t.name: plane[t.offset : t.offset + t.numel].view(t.shape) for t in unit.tensors}
                )
        return found


def plan_for(
    parts: Split, *, device: str = "cpu", home: str = "host", clip: bool = False, **options: Any
) -> Plan:
    """A plan with room for everything."""
    boundary = (2**12,) * parts.spec.num_streamed
    below = "disk" if device == "cpu" and home == "disk" else "host"
    wanted = {"offload": False, **options}
    return plan_step(
        parts.spec,
        Demand(boundary_bytes=boundary),
        GENEROUS,
        PlanOptions(home=home, below=below, clip=clip, **wanted),
    )


@contextlib.contextmanager
def engine_over(
    model: nn.Module,
    directory: Path,
    *,
    device: str = "cpu",
    home: str = "host",
    max_grad_norm: float = 0.0,
    freeze: tuple[str, ...] = (),
    settings: dict[str, Any] | None = None,
    room_bytes: int = 2**20,
    kept: Kept = (),
    group: Group | None = None,
    wire: Wire = EXACT,
    dtype: str = "fp32",
    **options: Any,
) -> Iterator[Rig]:
    """An engine that trains ``model``; ``options`` are those of the planner.

    One rank of ``group``, where there is one.
    """
    decaying = set(Trainer.get_decay_parameter_names(None, model))
    parts = split(model, dtype, decays=decaying.__contains__, freeze=freeze)
    shared, own = None, None
    if group is not None:
        options = {**options, "nodes": group.size, "rank": group.rank, "wire": wire}
        shared = Shared(group, wire, net_staging(parts.spec, group.size, wire, home, dtype))
        own = [ranges[group.rank] for ranges in shares(parts.spec, group.size)]
    plan = plan_for(parts, device=device, home=home, clip=max_grad_norm > 0, **options)
    if kept:
        layout = replace(plan.layout, kept=kept)
        counts = Counter(choice.extent for choices in kept for choice in choices if choice.leaves)
        rooms = {extent: (count, room_bytes) for extent, count in counts.items() if extent is not None}
        plan = replace(plan, layout=layout, offload_rooms=rooms)
    with contextlib.ExitStack() as stack:
        arena = stack.enter_context(Arena())
        pool = stack.enter_context(IOPool(2))
        planes = planes_for(dtype)
        held: dict[str, Any] = {"shares": own, "full_planes": plan.layout.whole_planes}
        where: HostHome | DiskHome
        if home == "host":
            where = HostHome(parts.spec, planes, arena, **held)
        elif plan.layout.commits:
            where = CommittedHome(parts.spec, planes, directory / "home", pool, arena=arena, **held)
        else:
            where = DiskHome(parts.spec, planes, directory / "home", pool, **held)
        stack.enter_context(where)
        named = dict(model.named_parameters())
        for unit in parts.spec.units:
            if unit.tensors:
                plane = arena.take(unit.numel * 4, "filling").view(torch.float32)
                for t in unit.tensors:
                    plane[t.offset : t.offset + t.numel] = named[t.name].detach().flatten()
                where.write(unit.index, "weights", 0, plane.to(TORCH_DTYPE[dtype]))
                mine = range(unit.numel) if own is None else own[unit.index]
                if dtype != "fp32" and unit.trainable and mine:
                    where.write(unit.index, "master", mine.start, plane[mine.start : mine.stop])
        opened = stack.enter_context(contextlib.closing(open_device(Devices.parse(device))))
        scratch = None
        if plan.layout.offload:
            extents = len(plan.layout.offload) * plan.layout.num_microbatches
            scratch = stack.enter_context(contextlib.closing(HostScratch(extents, SCRATCH_BYTES, arena)))
        rooms = open_rooms(plan, directory / "kept.bin", pool, arena, Ledger({}))
        for room in rooms.values():
            stack.enter_context(contextlib.closing(room))
        boundaries = stack.enter_context(Boundaries(parts.modules))
        engine = Engine(
            parts,
            boundaries,
            plan,
            Resources(device=opened, home=where, host=arena, scratch=scratch, rooms=rooms),
            EngineSettings(
                optimizer=PlaneAdamW(weight_decay=0.1),
                max_grad_norm=max_grad_norm or float("inf"),
                **(settings or {}),
            ),
            shared,
        )
        stack.callback(engine.close)
        yield Rig(engine, parts, where, arena)


def contexts(batches: Sequence[Sequence[dict[str, Tensor]]], lr: float = 1e-3) -> Iterator[StepContext]:
    """One context per step, its microbatches weighted by their targets; labels are not shifted."""
    for number, parts in enumerate(batches):
        counts = [num_targets(part, causal=False) for part in parts]
        yield StepContext(
            number=number,
            learning_rate=lr,
            microbatches=tuple(
                Microbatch(inputs=part, divisor=sum(counts) / count, targets=sum(counts))
                for part, count in zip(parts, counts, strict=True)
            ),
        )


def train(
    model: nn.Module, batches: Sequence[Sequence[dict[str, Tensor]]], directory: Path, **options: Any
) -> Trace:
    """Train on ``batches[step][microbatch]`` at a constant rate of 1e-3; each step begins before the last one ends."""
    trace = Trace()
    with engine_over(model, directory, microbatches=len(batches[0]), **options) as rig:
        handles = []
        for context in contexts(batches):
            handles.append(rig.engine.begin(context))
            rig.engine.forward_backward_done(handles[-1])
            trace.losses.append(context.loss())
            trace.norms.append(float("nan") if context.gradient_norm is None else context.gradient_norm)
        rig.engine.finish(handles[-1])
        trace.weights = {name: weight.clone() for name, weight in rig.weights().items()}
    return trace
