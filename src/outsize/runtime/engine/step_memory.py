"""Memory of a step: slots and buffers of a plan."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from outsize.optim.muon import Muon
from outsize.optim.planes import UpdateRule, WholeRule
from outsize.planner.program.stages import Extent
from outsize.planner.search.stage_memory import num_handed_over
from outsize.planner.search.step_plan import Plan
from outsize.runtime.device.device import Device
from outsize.runtime.device.device_group import Workers
from outsize.runtime.ops.optimizer_ops import StepMemory
from outsize.runtime.ops.product_ops import DeviceProducts
from outsize.storage.arena import Arena
from outsize.storage.ledger import Ledger
from outsize.storage.pool import IOPool
from outsize.storage.scratch import DiskScratch, HostScratch, Scratch


def take_step_memory(plan: Plan, host: Arena, former: Tensor | None) -> StepMemory:
    """Return what ``plan`` sets aside in host memory; ``former`` is the room of weights before they are stepped."""
    scratch_bytes = 4 * plan.state.scratch_elements(plan.model)
    scratches = host.take_all([scratch_bytes] * plan.state.num_scratches, "optimizer scratch")
    tiles = host.take_all([plan.tile_buffer_bytes] * plan.layout.num_tile_buffers, "tile buffers")
    return StepMemory(
        tile_buffers=tiles,
        tile_elements=plan.tile_elements,
        former=former,
        scratches=[scratch.view(torch.float32) for scratch in scratches],
    )


def rule_on(rule: UpdateRule | WholeRule, plan: Plan, device: Device) -> UpdateRule | WholeRule:
    """Return ``rule``, its products on the device where ``plan`` has them there, in room that is taken now."""
    room_bytes = plan.state.products_room(plan.model)
    if not room_bytes or not isinstance(rule, Muon):
        return rule
    devices = device.devices if isinstance(device, Workers) else (device,)
    return replace(rule, products=DeviceProducts(devices, room_bytes))


def open_scratch(
    plan: Plan, boundary_bytes: Sequence[int], path: Path, pool: IOPool, arena: Arena, ledger: Ledger
) -> Scratch | None:
    """Return a scratch for ``plan``, None where nothing leaves the device; the caller closes it.

    Args:
        plan: says what leaves, and whether it goes to the host or to disk.
        boundary_bytes: of the input of each unit for one microbatch.
        path: of a scratch on disk; its name is gone at once.
        pool: threads of a scratch on disk.
        arena: where its memory comes from, or its bounce buffers.
        ledger: where a file's bytes are reserved.

    Raises:
        StorageError: the file cannot be made.
        BudgetExceededError: a tier has too little left.
    """
    size = extent_bytes(plan, boundary_bytes)
    if plan.layout.stages is not None:
        return HostScratch(max(1, num_handed_over(plan.layout)), size, arena)
    if not plan.layout.offload:
        return None
    num_extents = len(plan.layout.offload) * plan.layout.round_size
    if plan.below == "disk":
        return DiskScratch(num_extents, size, path, pool, arena, ledger=ledger)
    return HostScratch(num_extents, size, arena)


def open_rooms(
    plan: Plan, path: Path, pool: IOPool, arena: Arena, ledger: Ledger
) -> dict[Extent, DiskScratch | HostScratch]:
    """Return scratches for what forwards keep and what leaves the device, by its extent; the caller closes them.

    Args:
        plan: says what leaves, and whether it goes to the host or to disk.
        path: of scratches on disk; names made from it are gone at once.
        pool: threads of scratches on disk.
        arena: where their memory comes from, or their bounce buffers.
        ledger: where a file's bytes are reserved.

    Raises:
        StorageError: a file cannot be made.
        BudgetExceededError: a tier has too little left.
    """
    rooms: dict[Extent, DiskScratch | HostScratch] = {}
    try:
        for extent, (count, size) in plan.offload_rooms.items():
            if plan.below == "disk":
                where = path.with_name(f"{path.stem}-{extent}{path.suffix}")
                rooms[extent] = DiskScratch(count, size, where, pool, arena, ledger=ledger)
            else:
                rooms[extent] = HostScratch(count, size, arena)
    except BaseException:
        for room in rooms.values():
            room.close()
        raise
    return rooms


def extent_bytes(plan: Plan, boundary_bytes: Sequence[int]) -> int:
    """Return the bytes of the largest activation that ``plan`` saves or hands over; 0 where there is none."""
    if plan.layout.stages is not None:
        return max(1, *boundary_bytes)
    return max((boundary_bytes[unit] for unit in plan.layout.offload), default=0)
