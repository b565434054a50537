"""The memory that a plan asks for besides the home, for steps of the optimizer, and what steps in it."""

from dataclasses import replace

import torch
from torch import Tensor

from outsize.optim.muon import Muon
from outsize.optim.planes import UpdateRule, WholeRule
from outsize.planner.search.step_plan import Plan
from outsize.runtime.device.device import Device
from outsize.runtime.device.device_group import Workers
from outsize.runtime.ops.optimizer_ops import StepMemory
from outsize.runtime.ops.product_ops import DeviceProducts
from outsize.storage.arena import Arena


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
