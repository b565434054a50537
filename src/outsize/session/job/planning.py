"""The plan of a run: the question that its demand, machine and settings ask, and the planner's answer to it."""

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from math import inf
from typing import Protocol

from outsize.codecs.transport import EXACT, Wire
from outsize.config import MemoryConfig
from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.hardware.cards import NVME
from outsize.hardware.machine_spec import Figure, Peer
from outsize.hardware.machine_spec import Machine as Figures
from outsize.model.split import Split
from outsize.model.tiled import can_take_in_parts
from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.passes.slots import validate
from outsize.planner.predict.decision import Decision
from outsize.planner.predict.decision_search import decide, plan_within
from outsize.planner.predict.question import CodingRatesOf, MicrobatchCost, Question, in_seconds, unmeasured
from outsize.planner.program.stages import Choice, Extent
from outsize.planner.search.microbatch_search import cuts_to_try
from outsize.planner.search.offload_balance import UnitRates
from outsize.planner.search.step_plan import Budgets, Plan, PlanOptions
from outsize.planner.simulate.costs import UnitTimes
from outsize.planner.simulate.gpu_times import scaled
from outsize.runtime.trial.measured import Measured
from outsize.session.job.demand import RunDemand, counted_times, demand_of, selected_bytes
from outsize.session.job.job_options import named_transport, options_for, question_for
from outsize.session.job.machine import RunMachine, assumed_machine, check_transport, peers_of
from outsize.session.job.optimizer_layout import has_kernel

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


def decision_for(
    demand: RunDemand,
    rates: Timed | None = None,
    coding_rates: CodingRatesOf = unmeasured,
    crossings: Collection[str] | None = None,
) -> Decision:
    """Plan a run: return the decision, its plan, and the costs behind it.

    Args:
        demand: of the run.
        rates: see `question_of`.
        coding_rates: see there.
        crossings: where a codec may be chosen, of those that the run leaves open; None for all of them.

    Raises:
        ConfigError: settings that do not go with the model, the machine, or each other.
        InfeasiblePlanError: no plan fits, and by how much; says why steps were not cut, where they cannot be.
    """
    question, config = question_of(demand, rates, coding_rates), demand.config
    if crossings is not None:
        question = replace(question, auto=tuple(name for name in question.auto if name in crossings))
    try:
        return decide(question)
    except InfeasiblePlanError as error:
        is_open = config.train.microbatches is None and config.sequences_per_step > 1
        reason = "" if not is_open else why_whole(demand.split, demand.trials(1).measured)
        if not reason:
            raise
        raise InfeasiblePlanError(
            f"{error.message}; steps are not cut into microbatches: {reason}", error.short_by
        ) from None


def question_of(
    demand: RunDemand, rates: Timed | None = None, coding_rates: CodingRatesOf = unmeasured
) -> Question:
    """Return the question that a run asks the planner; of several ranks, each has a plan of its own.

    Args:
        demand: of the run.
        rates: that units and lanes reach; None where nobody has timed them, and data sheets stand for them. Then
            nothing is decided that only rates of this machine can tell: what leaves the device, and codecs that shorten
            a step.
        coding_rates: of codecs, likewise.

    Raises:
        ConfigError: settings that do not go with the model, the machine, or each other.
    """
    demand = _uncut(demand)
    parts, machine, memory = demand.split, demand.machine, demand.config.memory
    options = _options_of(demand)
    figures = _assumed(demand) if rates is None else rates.machine

    @cache
    def measured(microbatches: int) -> MicrobatchCost:
        trial = demand.trials(microbatches).measured
        _check(options.activations, trial)
        needed = demand_of(parts, machine, trial, options.activations, trial.held_bytes)
        if rates is None:
            times = counted_times(parts, trial, figures.gpus[0].flops_per_s(parts.spec.compute_dtype))
        else:
            share = -(-demand.num_sequences // microbatches) / -(-demand.num_sequences // rates.microbatches)
            times = rates.times if share == 1 else scaled(rates.times, share)
        return MicrobatchCost(demand=in_seconds(needed, times), times=times)

    return question_for(
        demand.config,
        parts.spec,
        figures,
        Budgets(device=machine.device_bytes, host=machine.host_bytes, disk=machine.disk_bytes),
        options,
        own_processor=machine.devices.own_processor,
        measured=measured,
        timed=rates is not None,
        linked=rates is not None and is_linked(memory, machine),
        shares_memory=machine.devices.is_cpu,
        net_bytes_per_s=_NETWORK,
        coding_rates=coding_rates,
    )


def _uncut(demand: RunDemand) -> RunDemand:
    """Return the run with whole steps, where microbatches would take values from one another."""
    config = demand.config
    count = min(config.sequences_per_step, config.train.microbatches or config.sequences_per_step)
    if count == 1:
        return demand
    measured = _first_trial(demand)
    if not measured.effects.crosses:
        return demand
    if config.train.microbatches is None:
        return demand.following(config.in_microbatches(1))
    raise ConfigError(
        f"train.microbatches: {why_whole(demand.split, measured)}; set train.microbatches=1, or hand such values on in "
        "local variables"
    )


def why_whole(parts: Split, measured: Measured) -> str:
    """Return why steps cannot be cut into microbatches; empty where they can."""
    crossing = measured.effects.crosses
    return crossing and (
        f"the code of {type(parts.model).__name__} sets {crossing} before layers and reads it behind, so that "
        "microbatches, which take turns at layers, would read one another's"
    )


def _first_trial(demand: RunDemand) -> Measured:
    """Return what a microbatch needs of the number of them that is tried first."""
    config = demand.config
    cuts = cuts_to_try(demand.num_sequences, config.data.seq_len, demand.machine.num_workers)
    return demand.trials(config.train.microbatches or next(cuts)).measured


def _options_of(demand: RunDemand) -> PlanOptions:
    """Return what is decided of a run before anything is searched; errors as of `question_of`."""
    config, group, machine, spec = demand.config, demand.group, demand.machine, demand.split.spec
    if group.size > 1 and machine.num_workers > 1:
        raise ConfigError(
            f"memory.device has {machine.num_workers} workers, and {group.size} ranks share each step; start as many "
            "ranks as there are devices, with one device each"
        )
    check_transport(named_transport(config.transport), machine.devices, config.memory.home)
    options = options_for(
        config,
        spec,
        num_workers=machine.num_workers,
        num_ranks=group.size,
        rank=group.rank if group.size > 1 else None,
        kernels=has_kernel(config.optimizer),
        inputs_shared=_first_trial(demand).inputs_shared,
        can_part=config.train.mlp_parts == 1 and can_take_in_parts(demand.split),
        wire=Wire(gradients=config.parallel.gradients) if group.size > 1 else EXACT,
    )
    assert options.state is not None
    _check_tiles(config.memory.tile_elements, options.state, machine)
    return options


def is_linked(memory: MemoryConfig, machine: RunMachine) -> bool:
    """Return whether a link with a rate of its own lies between host memory and the devices of a run."""
    emulated = machine.devices.emulated and memory.link_gb_per_s is not None
    return machine.devices.accelerated or emulated


def plan_wrapped(
    parts: Split, machine: RunMachine, measured: Measured, options: PlanOptions, held_bytes: int
) -> Plan:
    """Plan a step that a loop of the user's own cuts.

    Args:
        parts: the model.
        machine: device and budgets.
        measured: what a microbatch needs.
        options: what is decided already.
        held_bytes: what stays on the device for each microbatch from its first unit to its last.

    Raises:
        InfeasiblePlanError: no plan fits, and by how much.
    """
    _check(options.activations, measured)
    gpu = assumed_machine(machine.devices).gpus[0]
    times = counted_times(parts, measured, gpu.flops_per_s(parts.spec.compute_dtype))
    demand = demand_of(parts, machine, measured, options.activations, held_bytes)
    budgets = Budgets(device=machine.device_bytes, host=machine.host_bytes, disk=machine.disk_bytes)
    rates = UnitRates(times=times, up_bytes_per_s=inf, down_bytes_per_s=inf)
    options = replace(options, num_workers=machine.num_workers, rates=rates, leaves_unasked=False)
    plan = plan_within(parts.spec, in_seconds(demand, times), budgets, options)
    for program in plan.programs:
        validate(program, plan.layout)
    return plan


def _assumed(demand: RunDemand) -> Figures:
    """Return the data sheets of the devices of a run, with copies between those that can."""
    config, machine = demand.config, demand.machine
    figures, rate = assumed_machine(machine.devices), config.memory.peer_gb_per_s
    usual = (
        figures.links[0].up_bytes_per_s
        if rate is None
        else Figure(value=rate * 1e9, source="memory.peer_gb_per_s")
    )
    pairs = peers_of(config.parallel.handover, config.transport.activations, rate, machine.devices)
    peers = tuple(
        figures.peer(*pair) or Peer(source=pair[0], target=pair[1], bytes_per_s=usual, own_wire=True)
        for pair in sorted(pairs)
    )
    return replace(figures, peers=peers, disk=figures.disk or NVME)


def _check(activations: str, measured: Measured) -> None:
    """Check that the model can have what the user chose."""
    extent = None if activations == "auto" else Choice(activations).extent
    bytes_by_extent = {Extent.WHOLE: measured.saved_bytes, **selected_bytes(measured)}
    if extent is not None and not any(bytes_by_extent.get(extent, ())):
        if extent is Extent.WHOLE:
            raise ConfigError(
                f"memory.activations={activations}: units of this model leave nothing for their backward that could be "
                "kept; set it to auto"
            )
        advice = "set model.attention=sdpa, and model.compile=off"
        raise ConfigError(
            f"memory.activations={activations}: no unit of this model has {extent} in an operation of its own; {advice}"
        )


def _check_tiles(wanted: int | None, state: StateLayout, machine: RunMachine) -> None:
    """Check the elements of a tile, where the user gave them."""
    if wanted is not None and machine.home == "disk" and wanted % state.quantum:
        raise ConfigError(
            f"memory.tile_elements: {wanted} is not a multiple of {state.quantum}, which tiles of this optimizer state "
            f"are; try {-(-wanted // state.quantum) * state.quantum}"
        )
