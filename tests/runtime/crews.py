"""An engine of several workers over any module: stages of any cut, devices made by hand."""

import contextlib
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from contracts.home_contract import planes_for
from outsize.model.split import split
from outsize.model.walk import Boundaries
from outsize.optim.adamw import PlaneAdamW
from outsize.planner.passes.slots import validate
from outsize.planner.program.stages import OFFLOADED, Extent, Stages
from outsize.planner.search.offload_balance import UnitRates
from outsize.planner.search.plan_stages import plan_stages
from outsize.planner.search.stage_memory import num_handed_over
from outsize.planner.search.step_plan import Budgets, Demand, Plan, PlanOptions
from outsize.planner.simulate.costs import UnitTimes
from outsize.runtime.device.device import Device, EmulatedDevice
from outsize.runtime.device.device_group import Workers
from outsize.runtime.engine.engine import Engine
from outsize.runtime.engine.op_handlers import EngineSettings
from outsize.runtime.engine.workers import Resources
from outsize.storage.home import HostHome
from outsize.storage.ledger import Arena
from outsize.storage.scratch import HostScratch
from reference import Trace
from runtime.engines import Rig, contexts

EXTENT_BYTES = 2**13
DEMAND_BYTES = 2**10
KEPT_BYTES = 2**12


def plan_crew(
    parts: Any,
    num_workers: int,
    stages: Stages | None,
    users: Sequence[int],
    microbatches: int,
    clip: bool,
    kept: Extent | None = None,
    peers: frozenset[tuple[int, int]] = frozenset(),
) -> Plan:
    count = parts.spec.num_streamed
    # What blocks of `oddities` return of products has room in this; theirs is no fused attention.
    selected = {} if kept is None else {kept: tuple(KEPT_BYTES * (unit > 0) for unit in range(count))}
    times = UnitTimes(forward_s=(1.0,) * count, backward_s=(3.0,) * count)
    plan = plan_stages(
        parts.spec,
        Demand(
            boundary_bytes=(DEMAND_BYTES,) * count,
            selected_bytes=selected,
            selected_s=dict.fromkeys(selected, (1.0,) * count),
            rest_users=frozenset(users),
        ),
        Budgets(device=2**28),
        PlanOptions(
            home="host",
            below="host",
            clip=clip,
            microbatches=microbatches,
            activations="auto" if kept is None else OFFLOADED[kept].value,
            peers=peers,
            num_workers=num_workers,
            stages=stages,
            rates=UnitRates(times=times, up_bytes_per_s=inf, down_bytes_per_s=inf),
            leaves_unasked=False,
        ),
    )
    for program in plan.programs:
        validate(program, plan.layout)
    return plan


@contextlib.contextmanager
def crew_over(
    model: nn.Module,
    num_workers: int = 2,
    *,
    stages: Stages | None = None,
    users: Sequence[int] = (),
    microbatches: int = 2,
    max_grad_norm: float = 0.0,
    freeze: tuple[str, ...] = (),
    devices: Sequence[Device] | None = None,
    settings: dict[str, Any] | None = None,
    kept: Extent | None = None,
    peers: frozenset[tuple[int, int]] = frozenset(),
    room_bytes: int | None = None,
) -> Iterator[Rig]:
    """An engine of ``num_workers`` that trains ``model`` in fp32."""
    decaying = set(Trainer.get_decay_parameter_names(None, model))
    parts = split(model, decays=decaying.__contains__, freeze=freeze)
    plan = plan_crew(parts, num_workers, stages, users, microbatches, max_grad_norm > 0, kept, peers)
    with contextlib.ExitStack() as stack:
        arena = stack.enter_context(Arena())
        home = stack.enter_context(HostHome(parts.spec, planes_for("fp32"), arena))
        named = dict(model.named_parameters())
        for unit in parts.spec.units:
            if unit.tensors:
                plane = arena.take(unit.numel * 4, "filling").view(torch.float32)
                for t in unit.tensors:
                    plane[t.offset : t.offset + t.numel] = named[t.name].detach().flatten()
                home.write(unit.index, "weights", 0, plane)
        made = devices or [EmulatedDevice(f"emulated:{i}") for i in range(num_workers)]
        workers = stack.enter_context(contextlib.closing(Workers(made)))
        extents = max(1, num_handed_over(plan.layout))
        scratch = stack.enter_context(contextlib.closing(HostScratch(extents, EXTENT_BYTES, arena)))
        rooms = {
            extent: stack.enter_context(contextlib.closing(HostScratch(count, room_bytes or size, arena)))
            for extent, (count, size) in plan.offload_rooms.items()
        }
        boundaries = stack.enter_context(Boundaries(parts.modules))
        chosen = {"draws_random": False, **(settings or {})}
        engine = Engine(
            parts,
            boundaries,
            plan,
            Resources(device=workers, home=home, host=arena, scratch=scratch, rooms=rooms),
            EngineSettings(
                optimizer=PlaneAdamW(weight_decay=0.1), max_grad_norm=max_grad_norm or float("inf"), **chosen
            ),
        )
        stack.callback(engine.close)
        yield Rig(engine, parts, home, arena)
        for each in (scratch, *rooms.values()):
            assert each.num_held == 0 or engine._executor.failed


def train_crew(
    model: nn.Module, batches: Sequence[Sequence[dict[str, Tensor]]], num_workers: int, **options: Any
) -> Trace:
    """Train on ``batches[step][microbatch]`` at a constant rate of 1e-3; each step begins before the last one ends."""
    trace = Trace()
    with crew_over(model, num_workers, microbatches=len(batches[0]), **options) as rig:
        handle = None
        for context in contexts(batches):
            handle = rig.engine.begin(context)
            rig.engine.forward_backward_done(handle)
            trace.losses.append(context.loss())
            trace.norms.append(float("nan") if context.gradient_norm is None else context.gradient_norm)
        rig.engine.finish(handle)
        trace.weights = {name: weight.clone() for name, weight in rig.weights().items()}
    return trace
