"""The workers of an engine, each with slots, accumulators and ops of its own: one, or those of a plan with stages."""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outsize.model.split import Split
from outsize.model.walk import Boundaries
from outsize.planner.program.activation_policy import Extent
from outsize.planner.search.step_plan import Plan
from outsize.runtime.device.device import Device
from outsize.runtime.device.device_group import Workers
from outsize.runtime.forward.binding import Binder, GradientSums
from outsize.runtime.forward.module_replicas import replicate
from outsize.runtime.forward.outer_forward import OuterForward
from outsize.runtime.ops.activation_ops import ActivationOps, Below, count_fetches
from outsize.runtime.ops.compute_ops import ComputeOps, ComputeSettings
from outsize.runtime.ops.gradient_ops import GradientOps, GradientSettings, count_times_home
from outsize.runtime.ops.link_codecs import EncodedWeights, activation_codec, gradient_carrier, take_staging
from outsize.runtime.ops.load_ops import WeightOps
from outsize.runtime.ops.stage_compute_ops import StagedComputeOps
from outsize.storage.arena import Arena
from outsize.storage.home import Home
from outsize.storage.scratch import HostScratch, Scratch

if TYPE_CHECKING:
    from outsize.runtime.engine.engine_settings import EngineSettings


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
    """A device, the memory reserved on it, and the handlers of its ops."""

    slots: list[Tensor]
    accumulators: list[Tensor]
    weights: WeightOps
    gradients: GradientOps
    activations: ActivationOps
    compute: ComputeOps


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
        host_buffers: list[Tensor],
        settings: "EngineSettings",
        encoded: EncodedWeights | None,
        gradient_tiles: Sequence[Tensor] = (),
    ) -> None:
        layout, spec = plan.layout, split.spec
        sizes = (*layout.slot_bytes, *plan.own_slot_bytes)
        self.slots = [device.allocate(size, "slot") for size in sizes]
        sizes = (*layout.accumulator_bytes, *plan.resident_accumulator_bytes)
        self.accumulators = [device.allocate(size, "accumulator") for size in sizes]
        self.sums = GradientSums()
        staging = take_staging(plan.transport, "weights", device)
        self.weights = WeightOps(
            spec,
            device,
            home,
            self.slots,
            host_buffers,
            encoded,
            staging,
            in_place=device.in_place,
            stays=layout.stays,
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
                # Of several nodes each keeps its own part of a sum.
                in_place=device.in_place and layout.num_nodes == 1,
            ),
            observe=settings.observe_gradient,
            carrier=gradient_carrier(plan.transport, spec, device),
            tiles=gradient_tiles,
        )


def make_single(
    split: Split,
    boundaries: Boundaries,
    plan: Plan,
    resources: Resources,
    host_buffers: list[Tensor],
    settings: "EngineSettings",
    encoded: EncodedWeights | None,
    gradient_tiles: Sequence[Tensor],
) -> Crew:
    """Return the one worker of a plan without stages; it runs the units of the model itself."""
    device = resources.device
    memory = _Memory(split, plan, device, resources.home, host_buffers, settings, encoded, gradient_tiles)
    binder = Binder(split, memory.sums)
    asked = _asked_of_units(plan, settings)
    compute = ComputeOps(split, boundaries.forwards, binder, device, memory.weights, asked)
    codec = activation_codec(plan.transport)
    activations = ActivationOps(device, resources.scratch, codec, resources.rooms, plan.layout.kept)
    worker = Worker(memory.slots, memory.accumulators, memory.weights, memory.gradients, activations, compute)
    return Crew((worker,), (binder.close,), compute.let_go)


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
    """Return the workers of a plan with stages; each runs a replica of the units.

    Args:
        split: the model and its units.
        boundaries: in place in the model.
        plan: memory of each worker, and the programs.
        resources: with as many `Workers` as the plan has.
        host_buffers: none.
        settings: of the engine.
        encoded: the weights as they go over links; None where they go as they are.
        gradient_tiles: none.

    Raises:
        ModelError: the units cannot be replicated.
    """
    layout, device, scratch = plan.layout, resources.device, resources.scratch
    assert isinstance(device, Workers)
    assert isinstance(scratch, HostScratch)
    assert layout.stages is not None
    memories = [
        _Memory(split, plan, each, resources.home, host_buffers, settings, encoded) for each in device.devices
    ]
    sums = [memory.sums for memory in memories]

    def rest_planes(worker: int) -> tuple[Tensor, ...]:
        return memories[worker].weights.planes(layout.num_streamed, layout.resident_slot)

    with contextlib.ExitStack() as stack:
        glue = OuterForward(split, device, rest_planes, sums, settings.num_threads)
        stack.callback(glue.close)  # a model that is refused is its own again
        replicas = [replicate(split, boundaries, each.torch_device) for each in device.devices]
        device.catch_up()  # with the buffers of both
        stack.pop_all()
    turns = _turns(device) if settings.draws_random else {}
    asked, codec = _asked_of_units(plan, settings), activation_codec(plan.transport)
    fetches, below = [count_fetches(program) for program in plan.programs], Below()
    workers, binders = [], []
    for index, (each, memory, replica) in enumerate(zip(device.devices, memories, replicas, strict=True)):
        binders.append(Binder(replica.split, memory.sums))
        turn = turns.get(each.torch_device)
        compute = StagedComputeOps(
            split, replica, index, glue, binders[-1], each, memory.weights, asked, layout.stages, turn
        )
        activations = ActivationOps(
            each, scratch, codec, resources.rooms, layout.kept, fetches, below, device.devices
        )
        workers.append(
            Worker(memory.slots, memory.accumulators, memory.weights, memory.gradients, activations, compute)
        )
    return Crew(tuple(workers), (glue.close, *(binder.close for binder in binders)), glue.let_go)


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


def _turns(workers: Workers) -> dict[torch.device, threading.Lock]:
    """Return a lock for each device that has a generator of random numbers."""
    return {device.torch_device: threading.Lock() for device in workers.devices}
