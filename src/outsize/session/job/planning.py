"""The question that a run asks the planner: what a trial has measured of the model, and what the machine has."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import inf
from typing import NamedTuple, Protocol

from torch import nn

from outsize.codecs.transport import EXACT
from outsize.config import Config
from outsize.errors import ConfigError
from outsize.group.group import Group
from outsize.hardware.cards.presets import NVME
from outsize.hardware.machine_spec import CUBLAS_BYTES, STREAM_BYTES, Figure, Peer
from outsize.hardware.machine_spec import Machine as Figures
from outsize.model.split import Split
from outsize.model.tiled_mlp import can_take_in_parts
from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.memory.memory_table import Demand
from outsize.planner.passes.slots import validate
from outsize.planner.predict.decision_search import plan_within
from outsize.planner.predict.question import CodingRatesOf, MicrobatchCost, Question, in_seconds, unmeasured
from outsize.planner.program.activation_policy import Choice, Extent, KeptBytes
from outsize.planner.search.microbatch_search import cuts_to_try
from outsize.planner.search.offload_balance import UnitRates
from outsize.planner.search.step_plan import Budgets, Plan, PlanOptions
from outsize.planner.simulate.costs import UnitTimes
from outsize.planner.simulate.crowding import scaled
from outsize.runtime.device.allocator import HEAP_WORKSPACES
from outsize.runtime.ops.decoding import decoding_bytes
from outsize.runtime.trial.measured import Measured
from outsize.session.job.job_options import named_transport, options_for, question_for
from outsize.session.job.machine import RunMachine, assumed_machine, check_transport, peers_of, wire_of
from outsize.session.job.optimizer_layout import has_kernel
from outsize.storage.pool import DEFAULT_THREADS
from outsize.storage.scratch import DEFAULT_BOUNCE_BYTES

# What a processor multiplies and adds while it reads a byte and writes one: 10 to 20 on a core with AVX, 250 on an RTX
# 4090. It ranks what is kept of a unit; the exact number only decides between choices that are as good.
FLOPS_PER_BYTE = 20
# A backward takes about two forwards, besides what it recomputes.
GRADIENT_FORWARDS = 2.0


def forward_flops(parts: Split, measured: Measured, rows: int, length: int) -> tuple[float, ...]:
    """Return the operations of units' forwards: as a trial saw them, else two for each parameter and token."""
    known = measured.flops.forward(rows, length)
    if any(known):
        return known
    sizes = [
        0 if unit.kind == "embedding" else sum(tensor.numel for tensor in unit.all_tensors)
        for unit in parts.spec.units[: parts.spec.num_streamed]
    ]
    return tuple(2.0 * rows * length * size for size in sizes)


def recompute_flops(parts: Split, measured: Measured, rows: int, length: int) -> tuple[float, ...]:
    """Return the same of recomputes, of which some end early."""
    forward = forward_flops(parts, measured, rows, length)
    needed = measured.flops.needed(rows, length) or forward
    return tuple(needed[u] if u in measured.needed else whole for u, whole in enumerate(forward))


def recompute_shares(parts: Split, measured: Measured) -> tuple[float, ...]:
    """Return how much of each streamed unit's forward its recompute takes, 0 to 1."""
    size = measured.num_sequences, measured.seq_len
    pairs = zip(recompute_flops(parts, measured, *size), forward_flops(parts, measured, *size), strict=True)
    return tuple(recompute / forward if forward else 1.0 for recompute, forward in pairs)


def counted_times(parts: Split, measured: Measured, flops_per_s: float) -> UnitTimes:
    """Return the times of units for a microbatch as it was measured, by operations, where nobody has timed them."""
    rows, length = measured.num_sequences, measured.seq_len
    forward = forward_flops(parts, measured, rows, length)
    # The last unit runs forward before its backward, all of it.
    recompute = (*recompute_flops(parts, measured, rows, length)[:-1], forward[-1])
    backward = (again + GRADIENT_FORWARDS * once for again, once in zip(recompute, forward, strict=True))
    seconds = [tuple(flops / flops_per_s for flops in each) for each in (forward, backward, recompute)]
    spared_s = {e: tuple(flops / flops_per_s for flops in each) for e, each in spared_flops(measured).items()}
    return UnitTimes(forward_s=seconds[0], backward_s=seconds[1], recompute_s=seconds[2], spared_s=spared_s)


def kept_bytes(measured: Measured) -> KeptBytes:
    """Bytes of activations kept by a forward, by extent."""
    return {Extent.WHOLE: measured.saved_bytes, **selected_bytes(measured)}


def selected_bytes(measured: Measured) -> dict[Extent, tuple[int, ...]]:
    """What forwards keep where they keep what attention, or attention and products, returned."""
    if not measured.products:
        return {}
    return {
        Extent.ATTENTION: tuple(y.num_bytes for y in measured.attention),
        Extent.PRODUCTS: tuple(y.num_bytes for y in measured.products),
    }


def spared_flops(measured: Measured) -> dict[Extent, tuple[float, ...]]:
    """Return the operations that keeping these spares a recompute.

    Where products are kept, what lies between them is made again, each byte of it at the cost of `FLOPS_PER_BYTE`.
    """
    if not measured.products:
        return {}
    between = [
        FLOPS_PER_BYTE * max(0, whole - products.num_bytes)
        for whole, products in zip(measured.saved_bytes, measured.products, strict=True)
    ]
    spared = [max(0.0, y.flops - rest) for y, rest in zip(measured.products, between, strict=True)]
    return {
        Extent.ATTENTION: tuple(float(y.flops) for y in measured.attention),
        Extent.PRODUCTS: tuple(spared),
    }


# What a scratch on disk needs to move tensors that are not aligned: a buffer for each thread of the pool.
BOUNCE_BYTES = DEFAULT_THREADS * DEFAULT_BOUNCE_BYTES
# What kernels on a CPU take inside themselves, as a share of the tensors of a computation: up to a tenth was seen, and
# up to a third where oneDNN multiplies bf16 or fp16.
KERNEL_SHARE, HALF_KERNEL_SHARE = 0.125, 0.375
# Of ranks whose network nobody has measured yet; it decides between numbers of microbatches only.
_NETWORK = Figure(value=25e9 / 8, source="assumed: 25 Gb/s")


class Timed(Protocol):
    """What a machine was timed to reach."""

    @property
    def machine(self) -> Figures:
        """Rates of its lanes."""

    @property
    def times(self) -> UnitTimes:
        """Of the units, for a microbatch."""

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""


class DemandTrial(NamedTuple):
    """What a microbatch needs, tried on the model.

    Attributes:
        measured: bytes on the device.
        chunk_tokens: tokens per chunk of the loss; None for the model's own loss.
    """

    measured: Measured
    chunk_tokens: int | None


Tried = Callable[[int], DemandTrial]
"""What each of a number of microbatches needs."""


def question_of(
    config: Config,
    parts: Split,
    machine: RunMachine,
    tried: Tried,
    group: Group,
    rates: Timed | None = None,
    coding_rates: CodingRatesOf = unmeasured,
    *,
    replica: bool = False,
) -> Question:
    """Return the question that a run asks the planner.

    Args:
        config: of the run.
        parts: its model.
        machine: device and budgets.
        tried: what microbatches need.
        group: ranks that share the step; each makes a plan of its own.
        rates: that units and lanes reach; None where nobody has timed them, and data sheets stand for them. Then
            nothing is decided that only rates of this machine can tell: what leaves the device, and codecs that shorten
            a step.
        coding_rates: of codecs, likewise.
        replica: whether it trains as a plain replica, where each microbatch ends before the next begins.

    Raises:
        ConfigError: settings that do not go with the model, the machine, or each other.
    """
    spec, sequences = parts.spec, -(-config.sequences_per_step // group.size)
    if not replica:
        config = _uncut(config, parts, machine, tried, group)
    options = _options_of(config, parts, machine, tried, group)
    figures = _assumed(config, machine) if rates is None else rates.machine

    @cache
    def measured(microbatches: int) -> MicrobatchCost:
        found = tried(microbatches).measured
        _check(options.activations, found, parts, machine)
        demand = demand_of(parts, machine, found, options.activations, found.held_bytes)
        if rates is None:
            times = counted_times(parts, found, figures.gpus[0].flops_per_s(spec.compute_dtype))
        else:
            share = -(-sequences // microbatches) / -(-sequences // rates.microbatches)
            times = rates.times if share == 1 else scaled(rates.times, share)
        return MicrobatchCost(demand=in_seconds(demand, times), times=times)

    return question_for(
        config,
        spec,
        figures,
        Budgets(device=machine.device_bytes, host=machine.host_bytes, disk=machine.disk_bytes),
        options,
        own_processor=machine.devices.own_processor,
        measured=measured,
        timed=rates is not None,
        linked=rates is not None and is_linked(config, machine),
        shares_memory=machine.devices.is_cpu,
        net_bytes_per_s=_NETWORK,
        coding_rates=coding_rates,
    )


def _uncut(config: Config, parts: Split, machine: RunMachine, tried: Tried, group: Group) -> Config:
    """Return the run with whole steps, where microbatches would take values from one another (`SideEffects.crosses`).

    Raises:
        ConfigError: it asks for microbatches.
    """
    count = min(config.sequences_per_step, config.train.microbatches or config.sequences_per_step)
    if count == 1:
        return config
    measured = tried(_first_cut(config, machine, group)).measured
    if not measured.effects.crosses:
        return config
    if config.train.microbatches is None:
        return config.in_microbatches(1)
    raise ConfigError(
        f"train.microbatches: {why_whole(parts, measured)}; set train.microbatches=1, or hand such values on in local "
        "variables"
    )


def why_whole(parts: Split, measured: Measured) -> str:
    """Return why steps cannot be cut into microbatches; empty where they can."""
    crossing = measured.effects.crosses
    return crossing and (
        f"the code of {type(parts.model).__name__} sets {crossing} before layers and reads it behind, so that "
        "microbatches, which take turns at layers, would read one another's"
    )


def _first_cut(config: Config, machine: RunMachine, group: Group) -> int:
    """Return the number of microbatches that is tried first."""
    sequences = -(-config.sequences_per_step // group.size)
    return config.train.microbatches or next(cuts_to_try(sequences, config.data.seq_len, machine.num_workers))


def _options_of(config: Config, parts: Split, machine: RunMachine, tried: Tried, group: Group) -> PlanOptions:
    """Return what is decided of a run before anything is searched; errors as of `question_of`."""
    if group.size > 1 and machine.num_workers > 1:
        raise ConfigError(
            f"memory.device has {machine.num_workers} workers, and {group.size} ranks share each step; start as many "
            "ranks as there are devices, with one device each"
        )
    spec = parts.spec
    check_transport(named_transport(config), machine.devices, config.memory.home)
    options = options_for(
        config,
        spec,
        num_workers=machine.num_workers,
        num_ranks=group.size,
        rank=group.rank if group.size > 1 else None,
        kernels=has_kernel(config.optimizer),
        inputs_shared=tried(_first_cut(config, machine, group)).measured.inputs_shared,
        can_part=config.train.mlp_parts == 1 and can_take_in_parts(parts),
        wire=wire_of(config, spec, machine) if group.size > 1 else EXACT,
    )
    assert options.state is not None
    _check_tiles(config.memory.tile_elements, options.state, machine)
    return options


def is_linked(config: Config, machine: RunMachine) -> bool:
    """Return whether a link with a rate of its own lies between host memory and the devices of a run."""
    emulated = machine.devices.emulated and config.memory.link_gb_per_s is not None
    return machine.devices.accelerated or emulated


def plan_with_heap(
    parts: Split, machine: RunMachine, measured: Measured, options: PlanOptions, held_bytes: int
) -> tuple[Plan, bool]:
    """Plan a step that somebody else cuts, and say whether the plan has room for a heap with holes.

    Args:
        parts: the model.
        machine: device and budgets.
        measured: what a microbatch needs.
        options: what is decided already.
        held_bytes: what stays on the device for each microbatch from its first unit to its last.

    Raises:
        InfeasiblePlanError: no plan fits, and by how much.
    """
    _check(options.activations, measured, parts, machine)
    gpu = assumed_machine(machine.devices).gpus[0]
    times = counted_times(parts, measured, gpu.flops_per_s(parts.spec.compute_dtype))
    demand = demand_of(parts, machine, measured, options.activations, held_bytes)
    budgets = Budgets(device=machine.device_bytes, host=machine.host_bytes, disk=machine.disk_bytes)
    rates = UnitRates(times=times, up_bytes_per_s=inf, down_bytes_per_s=inf)
    options = replace(options, num_workers=machine.num_workers, rates=rates, leaves_unasked=False)
    plan = plan_within(parts.spec, in_seconds(demand, times), budgets, options)
    for program in plan.programs:
        validate(program, plan.layout)
    return plan, plan.heap


def demand_of(
    parts: Split, machine: RunMachine, measured: Measured, activations: str, shared_bytes: int
) -> Demand:
    """Return what a microbatch takes besides weights, as it was measured."""
    fixed, spare = fixed_bytes(parts.model, machine) + decoding_bytes(parts.spec), 0
    if machine.devices.is_cpu:
        workspace = max(*measured.forward_bytes, *measured.backward_bytes)
        fixed += int(workspace * (KERNEL_SHARE if parts.spec.dtypes == {"fp32"} else HALF_KERNEL_SHARE))
        spare = int(workspace * HEAP_WORKSPACES)
    scratches = 1 + (activations != "auto" and Choice(activations).leaves)
    return Demand(
        boundary_bytes=measured.boundary_bytes,
        forward_workspace_bytes=by_kind(parts, measured.forward_bytes),
        backward_workspace_bytes=by_kind(parts, measured.backward_bytes),
        saved_bytes=measured.saved_bytes,
        selected_bytes=selected_bytes(measured),
        num_saved=measured.num_saved if measured.products else (),
        shared_bytes=shared_bytes,
        fixed_bytes=fixed,
        stream_bytes=STREAM_BYTES * machine.devices.accelerated,
        bounce_bytes=scratches * BOUNCE_BYTES,
        spare_bytes=spare,
        rest_users=measured.rest_users,
    )


def _assumed(config: Config, machine: RunMachine) -> Figures:
    """Return the data sheets of the devices of a run, with copies between those that can."""
    figures = assumed_machine(machine.devices)
    rate = config.memory.peer_gb_per_s
    usual = (
        figures.links[0].up_bytes_per_s
        if rate is None
        else Figure(value=rate * 1e9, source="memory.peer_gb_per_s")
    )
    peers = tuple(
        figures.peer(*pair) or Peer(source=pair[0], target=pair[1], bytes_per_s=usual, own_wire=True)
        for pair in sorted(peers_of(config, machine))
    )
    return replace(figures, peers=peers, disk=figures.disk or NVME)


def _check(activations: str, measured: Measured, parts: Split, machine: RunMachine) -> None:
    """Check that the model can have what the user chose, on several workers if there are several.

    Raises:
        ConfigError: it cannot.
    """
    extent = None if activations == "auto" else Choice(activations).extent
    kept = {Extent.WHOLE: measured.saved_bytes, **selected_bytes(measured)}
    if extent is not None and not any(kept.get(extent, ())):
        if extent is Extent.WHOLE:
            raise ConfigError(
                f"memory.activations={activations}: units of this model leave nothing for their backward that could be "
                "kept; set it to auto"
            )
        advice = "set model.attention=sdpa, and model.compile=off, or it to auto"
        raise ConfigError(
            f"memory.activations={activations}: no unit of this model has {extent} in an operation of its own; {advice}"
        )
    if machine.num_workers > 1 and measured.inputs_shared:
        raise ConfigError(
            f"memory.device has {machine.num_workers} workers, but units of {type(parts.model).__name__} receive "
            "activations that other units receive too; use one device"
        )


def _check_tiles(wanted: int | None, state: StateLayout, machine: RunMachine) -> None:
    """Check the elements of a tile, where the user gave them.

    Raises:
        ConfigError: a tile would be no whole sectors in every plane.
    """
    if wanted is not None and machine.home == "disk" and wanted % state.quantum:
        raise ConfigError(
            f"memory.tile_elements: {wanted} is not a multiple of {state.quantum}, which tiles of this optimizer state "
            f"are; try {-(-wanted // state.quantum) * state.quantum}"
        )


def fixed_bytes(model: nn.Module, machine: RunMachine) -> int:
    """What lies on the device throughout and is neither weights nor activations."""
    on_gpu = CUBLAS_BYTES + sum(buffer.nbytes for buffer in model.buffers())
    return on_gpu if machine.devices.accelerated else 0


def by_kind(parts: Split, num_bytes: tuple[int, ...]) -> dict[str, int]:
    """The most of any unit of each kind."""
    most: dict[str, int] = {}
    for unit, size in zip(parts.spec.units, num_bytes, strict=False):
        most[unit.kind] = max(most.get(unit.kind, 0), size)
    return most
