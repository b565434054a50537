"""The workers of an engine, and the slots, buffers and accumulators of each."""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outsize.accelerators import catch_up
from outsize.model.split import Split
from outsize.model.walk import Boundaries
from outsize.optim.muon import Muon
from outsize.optim.planes import UpdateRule, WholeRule
from outsize.planner.memory.step_bytes import largest_gradient, largest_plane
from outsize.planner.program.program import Lane
from outsize.planner.program.stages import Extent
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.stage_memory import num_handed_over
from outsize.planner.search.step_plan import Plan
from outsize.runtime.device.device import Device
from outsize.runtime.device.device_group import Workers
from outsize.runtime.forward.binding import Binder, GradientSums, ModuleReplica, Originals, replicate
from outsize.runtime.forward.outer_code import OuterForward
from outsize.runtime.ops.activation_ops import ActivationOps, Below, count_fetches
from outsize.runtime.ops.compute_ops import ComputeOps, ComputeSettings, Stage
from outsize.runtime.ops.gradient_ops import GradientOps, GradientSettings, count_times_home
from outsize.runtime.ops.link_codecs import EncodedWeights, activation_codec, gradient_carrier, take_staging
from outsize.runtime.ops.load_ops import Resting, WeightOps
from outsize.runtime.ops.optimizer_ops import DeviceProducts, StepMemory
from outsize.storage.home import Home
from outsize.storage.ledger import Arena, Ledger
from outsize.storage.prealloc import IOPool
from outsize.storage.scratch import DiskScratch, HostScratch, Scratch

if TYPE_CHECKING:
    from outsize.runtime.engine.op_handlers import EngineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a session opens for its engine, and closes after it.

    Attributes:
        device: computes; `Workers` for a plan with stages.
        home: weights and optimizer state at rest.
        host: arena of the tier below the device, for buffers between tiers.
        scratch: room for saved activations and for what is handed over; None where nothing is.
        rooms: for what forwards keep that leaves the device, by its extent.
    """

    device: Device
    home: Home
    host: Arena
    scratch: Scratch | None = None
    rooms: Mapping[Extent, Scratch] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Worker:
    """A device, the memory reserved on it, and the handlers of its ops.

    Where units draw random numbers, ``turn`` is held while a worker computes: generators are seeded and drawn from in
    one go.
    """

    slots: list[Tensor]
    accumulators: list[Tensor]
    weights: WeightOps
    gradients: GradientOps
    activations: ActivationOps
    compute: ComputeOps
    turn: AbstractContextManager[Any]


@dataclass(frozen=True, slots=True)
class Crew:
    """All workers, how to end their work when all lanes have ended, and how to give the model back between programs."""

    workers: tuple[Worker, ...]
    endings: tuple[Callable[[], None], ...]
    let_go: Callable[[], None]

    def close(self) -> None:
        """Unwind what is under way and take the parameters out of the model, all of it if some fails; idempotent."""
        with contextlib.ExitStack() as stack:
            for end in reversed(self.endings):
                stack.callback(end)


class _Memory:
    """What is set aside on one device, and the ops that need nothing else."""

    def __init__(
        self,
        split: Split,
        plan: Plan,
        device: Device,
        home: Home,
        host: Arena,
        host_buffers: list[Tensor],
        settings: "EngineSettings",
        encoded: EncodedWeights | None,
        gradient_tiles: Sequence[Tensor] = (),
    ) -> None:
        layout, spec = plan.layout, split.spec
        sizes = (*layout.slot_bytes, *plan.own_slot_bytes)
        self.slots = [device.allocate(size, "slot") for size in sizes]
        sizes = (*layout.accumulator_bytes, *plan.own_accumulator_bytes)
        self.accumulators = [device.allocate(size, "accumulator") for size in sizes]
        self.sums = GradientSums()
        staging = take_staging(plan.transport, "weights", device, largest_plane(plan.model))
        self.weights = WeightOps(
            spec,
            device,
            home,
            self.slots,
            host_buffers,
            encoded,
            staging,
            in_place=device.in_place,
            resting=Resting(layout.stays, layout.resident, layout.encoded),
        )
        self.gradients = GradientOps(
            spec,
            device,
            home,
            self.sums,
            self.accumulators,
            host_buffers,
            GradientSettings(
                parameter_order={name: i for i, (name, _) in enumerate(split.model.named_parameters())},
                max_grad_norm=settings.max_grad_norm,
                clips=layout.clip,
                unit_clips=layout.unit_clip,
                skip_nonfinite=settings.skip_nonfinite,
                times_home=count_times_home(plan.program),
                dtype="fp32" if layout.ring else plan.state.gradients,
                tile_elements=plan.tile_elements,
                resident=layout.resident,
                rests_there=layout.cut,
                # Of several nodes each keeps its own part of a sum.
                in_place=device.in_place and layout.num_nodes == 1,
            ),
            observe=settings.observe_gradient,
            carrier=gradient_carrier(plan.transport, device, host, largest_gradient(plan.model)),
            tiles=gradient_tiles,
        )


def make_crew(
    split: Split,
    boundaries: Boundaries,
    plan: Plan,
    resources: Resources,
    host_buffers: list[Tensor],
    settings: "EngineSettings",
    encoded: EncodedWeights | None,
    gradient_tiles: Sequence[Tensor],
) -> Crew:
    """Return the workers of a plan: one that runs the units of the model itself, or several, each a replica of them.

    Args:
        split: the model and its units.
        boundaries: in place in the model.
        plan: memory of each worker, and the programs.
        resources: with as many `Workers` as the plan has, if it has stages.
        host_buffers: that units pass through.
        settings: of the engine.
        encoded: the weights as they go over links; None where they go as they are.
        gradient_tiles: that gradients pass through in a ring; none of stages.

    Raises:
        ModelError: the units cannot be replicated.
    """
    layout, device = plan.layout, resources.device
    devices = device.devices if isinstance(device, Workers) else (device,)
    memories = [
        _Memory(
            split, plan, each, resources.home, resources.host, host_buffers, settings, encoded, gradient_tiles
        )
        for each in devices
    ]
    _set_ahead(plan, devices)
    if layout.stages is None:
        outer, originals, units = None, None, [ModuleReplica(split, boundaries.forwards)]
    else:
        assert isinstance(device, Workers)
        originals = Originals(split)
        outer, units = _replicas(split, boundaries, device, layout, memories, settings.num_threads)
    # One for all: the generators of CPU, Python and numpy are the process's own.
    turn = threading.Lock() if settings.draws_random and len(devices) > 1 else nullcontext()
    fetches = [] if outer is None else [count_fetches(program) for program in plan.programs]
    unit_settings, codec, below = _asked_of_units(plan, settings), activation_codec(plan.transport), Below()
    binders = [Binder(each.split, memory.sums) for each, memory in zip(units, memories, strict=True)]
    workers = []
    for index, (each, memory, part, binder) in enumerate(zip(devices, memories, units, binders, strict=True)):
        stage = None
        if outer is not None and originals is not None:
            stage = Stage(index, outer, originals, _ends(layout))
        compute = ComputeOps(part.split, part.forwards, binder, each, memory.weights, unit_settings, stage)
        activations = ActivationOps(
            each, resources.scratch, codec, resources.rooms, layout.kept, fetches, below, devices
        )
        planes = memory.slots, memory.accumulators
        workers.append(Worker(*planes, memory.weights, memory.gradients, activations, compute, turn))
    closes = [binder.close for binder in binders]
    if outer is None:
        return Crew(tuple(workers), tuple(closes), workers[0].compute.let_go)
    return Crew(tuple(workers), (outer.close, *closes), outer.let_go)


def _set_ahead(plan: Plan, devices: Sequence[Device]) -> None:
    """Have at hand on each device what the plan has for activations and workspace, and most of a margin for gaps."""
    table = plan.memory["device"]
    num_bytes = sum(table.get(name, 0) for name in ("activations", "workspace"))
    planned = sum(table.values()) - table.get("fixed", 0)
    # All of them at once, so that each block is another one, of workers on one device too.
    _ = [device.set_ahead(num_bytes, planned, Lane("compute", index)) for index, device in enumerate(devices)]


def _replicas(
    split: Split,
    boundaries: Boundaries,
    workers: Workers,
    layout: StepLayout,
    memories: Sequence[_Memory],
    num_threads: int | None,
) -> tuple[OuterForward, list[ModuleReplica]]:
    """Return what runs the model's own code for all workers, and the units of each."""

    def rest_planes(worker: int) -> tuple[Tensor, ...]:
        return memories[worker].weights.planes(layout.num_streamed, layout.resident_slot)

    with contextlib.ExitStack() as stack:
        outer = OuterForward(split, workers, rest_planes, [memory.sums for memory in memories], num_threads)
        stack.callback(outer.close)  # a model that is refused is its own again
        replicas = [replicate(split, boundaries, each.torch_device) for each in workers.devices]
        for each in workers.devices:
            catch_up(each.torch_device)  # with the buffers of both
        stack.pop_all()
    return outer, replicas


def _ends(layout: StepLayout) -> frozenset[int]:
    """Return the last units of forward stages; where another worker runs the head's backward, also before the head."""
    assert layout.stages is not None
    return frozenset(end - 1 for _, end in layout.stages.forward if end < layout.last + layout.cut)


def _asked_of_units(plan: Plan, settings: "EngineSettings") -> ComputeSettings:
    return ComputeSettings(
        programs=plan.programs,
        first_backward=plan.layout.first_backward,
        seed=settings.seed,
        chunk_tokens=settings.chunk_tokens,
        graph_in_forward=settings.graph_in_forward,
        effects=settings.effects,
        needed=settings.needed,
        num_products=settings.num_products,
    )


def take_step_memory(plan: Plan, host: Arena) -> StepMemory:
    """Return what ``plan`` sets aside in host memory for an optimizer."""
    scratch_bytes = 4 * plan.state.scratch_elements(plan.model)
    scratches = host.take_all([scratch_bytes] * plan.state.num_scratches, "optimizer scratch")
    tiles = host.take_all([plan.tile_buffer_bytes] * plan.layout.num_tile_buffers, "tile buffers")
    return StepMemory(
        tile_buffers=tiles,
        tile_elements=plan.tile_elements,
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
