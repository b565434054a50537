"""The plan of a step, of what the model was measured to need and what the machine has."""

import contextlib

from torch import nn

from outsize.codecs.wire import EXACT
from outsize.config import Config
from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.group.group import Group
from outsize.hardware.machine_spec import CUBLAS_BYTES
from outsize.model.split import Split
from outsize.model.tiled_mlp import can_take_in_parts
from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.passes.validate import validate
from outsize.planner.program.activation_policy import Choice, Extent
from outsize.planner.program.stages import Stages
from outsize.planner.search.partition import Pipeline
from outsize.planner.search.plan_stages import plan_stages
from outsize.planner.search.stage_pipeline import StageOptions, clock_of
from outsize.planner.search.step_plan import Budgets, Demand, Plan, PlanOptions, plan_step
from outsize.runtime.device.allocator import HEAP_WORKSPACES
from outsize.runtime.ops.decoding import decoding_bytes
from outsize.runtime.trial.measured import Measured
from outsize.session.job.device_peers import peers_of
from outsize.session.job.device_presets import assumed_machine
from outsize.session.job.machine import RunMachine
from outsize.session.job.optimizer_layout import clip_of, layout_for, may_skip
from outsize.session.job.relative_times import forward_times, recompute_times, selections
from outsize.session.job.run_codecs import transport_of, wire_of
from outsize.storage.pool import DEFAULT_THREADS
from outsize.storage.scratch import DEFAULT_BOUNCE_BYTES

# What a scratch on disk needs to move tensors that are not aligned: a buffer for each thread of the pool.
BOUNCE_BYTES = DEFAULT_THREADS * DEFAULT_BOUNCE_BYTES
# What kernels on a CPU take inside themselves, as a share of the tensors of a computation: up to a tenth was seen, and
# up to a third where oneDNN multiplies bf16 or fp16.
KERNEL_SHARE, HALF_KERNEL_SHARE = 0.125, 0.375


def choose_plan(
    config: Config, parts: Split, machine: RunMachine, measured: Measured, group: Group | None = None
) -> tuple[Plan, bool]:
    """Plan a step, and say whether the plan has room for a heap with holes, which saves page faults.

    Room for the heap comes before more slots or larger tiles; where even the smallest plan leaves none, it is given up.

    Raises:
        InfeasiblePlanError: no plan fits, and by how much.
    """
    options = options_of(config, parts, machine, measured, group)
    return plan_with_heap(parts, machine, measured, options, measured.held_bytes)


def options_of(
    config: Config, parts: Split, machine: RunMachine, measured: Measured, group: Group | None = None
) -> PlanOptions:
    """What ``config`` and the machine decide about the plan; of several ranks in ``group``, each makes its own.

    Raises:
        ConfigError: a codec that does not go with the machine, or several devices of one of several ranks.
    """
    memory, num_ranks = config.memory, 1 if group is None else group.size
    if num_ranks > 1 and machine.num_workers > 1:
        raise ConfigError(
            f"memory.device has {machine.num_workers} workers, and {num_ranks} ranks share each step; start as many "
            "ranks as there are devices, with one device each"
        )
    clip, state = clip_of(config, parts.spec, num_ranks), layout_for(config, parts.spec, num_ranks)
    return PlanOptions(
        home=machine.home,
        below=machine.below,
        clip=clip == "global",
        unit_clip=clip == "unit",
        may_skip=may_skip(config, parts.spec),
        state=state,
        microbatches=config.microbatches,
        most_microbatches=-(-config.sequences_per_step // num_ranks),
        can_part=config.train.mlp_parts == 1 and can_take_in_parts(parts),
        slots=memory.slots,
        prefetch=memory.prefetch,
        tile_elements=_tile_elements(memory.tile_elements, state, machine),
        offload=False if measured.inputs_shared else memory.offload,
        commits=memory.commits == "step",
        transport=transport_of(config, machine),
        activations=memory.activations,
        nodes=num_ranks,
        rank=group.rank if group is not None else None,
        wire=wire_of(config, parts.spec, machine) if num_ranks > 1 else EXACT,
        peers=peers_of(config, machine),
        handover=config.parallel.handover,
    )


def plan_with_heap(
    parts: Split, machine: RunMachine, measured: Measured, options: PlanOptions, held_bytes: int
) -> tuple[Plan, bool]:
    """Plan a step as `choose_plan` does.

    Args:
        parts: the model.
        machine: device and budgets.
        measured: what a microbatch needs.
        options: what is decided already.
        held_bytes: what stays on the device for each microbatch from its first unit to its last.

    Raises:
        InfeasiblePlanError: no plan fits, and by how much.
    """
    if machine.device != "cpu":
        return make_plan(parts, machine, measured, options, held_bytes), True
    workspace = max(*measured.forward_bytes, *measured.backward_bytes)
    share = KERNEL_SHARE if parts.spec.dtypes == {"fp32"} else HALF_KERNEL_SHARE
    with contextlib.suppress(InfeasiblePlanError):
        roomy = int(workspace * (share + HEAP_WORKSPACES))
        return make_plan(parts, machine, measured, options, held_bytes, roomy), True
    return make_plan(parts, machine, measured, options, held_bytes, int(workspace * share)), False


def make_plan(
    parts: Split,
    machine: RunMachine,
    measured: Measured,
    options: PlanOptions,
    held_bytes: int,
    unseen_bytes: int = 0,
) -> Plan:
    """Plan a step within the machine's budgets, less ``unseen_bytes`` of the device's; see `plan_with_heap`.

    Raises:
        InfeasiblePlanError: no plan fits, and by how much.
    """
    demand = _demand_of(
        parts,
        measured,
        held_bytes * options.microbatches,
        unseen_bytes + fixed_bytes(parts.model, machine, options) + decoding_bytes(parts.spec),
    )
    _check_choice(options.activations, demand)
    budgets = Budgets(device=machine.device_bytes, host=machine.host_bytes, disk=machine.disk_bytes)
    if machine.num_workers > 1:
        plan = plan_stages(parts.spec, demand, budgets, options, stage_options(parts, machine, measured))
    else:
        plan = plan_step(parts.spec, demand, budgets, options)
    for program in plan.programs:
        validate(program, plan.layout)
    return plan


def stage_clock(
    config: Config, parts: Split, machine: RunMachine, measured: Measured, plan: Plan
) -> tuple[Pipeline, Stages]:
    """Return the partitioner's clock for the stages of ``plan``, and these.

    It goes by operations that are counted and by data sheets, so that it says the same whenever it is asked.
    """
    stages = plan.layout.stages
    assert stages is not None
    assumed = assumed_machine(machine.device)
    rate = assumed.gpus[0].flops_per_s(parts.spec.compute_dtype)
    link = min(assumed.links[0].up_bytes_per_s.value, assumed.host.bytes_per_s.value / machine.num_workers)
    options = options_of(config, parts, machine, measured)
    wanted = stage_options(parts, machine, measured)
    demand = _demand_of(parts, measured, 0, 0)
    return clock_of(parts.spec, demand, options, wanted, plan.layout, rate, link), stages


def _demand_of(parts: Split, measured: Measured, shared_bytes: int, fixed_bytes: int) -> Demand:
    """Return what a microbatch needs as it was measured; times are FLOPs."""
    return Demand(
        boundary_bytes=measured.boundary_bytes,
        forward_workspace_bytes=by_kind(parts, measured.forward_bytes),
        backward_workspace_bytes=by_kind(parts, measured.backward_bytes),
        saved_bytes=measured.saved_bytes,
        recompute_s=recompute_times(parts, measured, measured.num_sequences, measured.seq_len),
        **selections(measured),
        shared_bytes=shared_bytes,
        fixed_bytes=fixed_bytes,
    )


def _check_choice(activations: str, demand: Demand) -> None:
    """Check that there is something that a user's choice could keep.

    Raises:
        ConfigError: there is not.
    """
    extent = None if activations == "auto" else Choice(activations).extent
    if extent is not None and not any(demand.kept_bytes.get(extent, ())):
        advice = "set model.attention=sdpa" if extent is Extent.ATTENTION else "set it to auto"
        raise ConfigError(
            f"memory.activations={activations}: no unit of this model has {extent} in an operation of its own; {advice}"
        )


def _tile_elements(wanted: int | None, state: StateLayout, machine: RunMachine) -> int | None:
    """Return the elements of a tile, where the user gave them.

    Raises:
        ConfigError: a tile would be no whole sectors in every plane.
    """
    if wanted is not None and machine.home == "disk" and wanted % state.quantum:
        raise ConfigError(
            f"memory.tile_elements: {wanted} is not a multiple of {state.quantum}, which tiles of this optimizer state "
            f"are; try {-(-wanted // state.quantum) * state.quantum}"
        )
    return wanted


def stage_options(parts: Split, machine: RunMachine, measured: Measured) -> StageOptions:
    """What is to be known of a model that several workers train.

    Raises:
        ConfigError: its units share activations, which one worker can do only.
    """
    if measured.inputs_shared:
        raise ConfigError(
            f"memory.device has {machine.num_workers} workers, but units of {type(parts.model).__name__} receive "
            "activations that other units receive too; use one device"
        )
    return StageOptions(
        num_workers=machine.num_workers,
        forward_s=forward_times(parts, measured.num_sequences, measured.seq_len),
        rest_users=measured.rest_users,
    )


def fixed_bytes(model: nn.Module, machine: RunMachine, options: PlanOptions) -> int:
    """What lies on the device throughout and is neither weights nor activations."""
    scratches = 1 + (options.activations != "auto" and Choice(options.activations).leaves)
    fixed = scratches * BOUNCE_BYTES if machine.below == "disk" else 0
    if machine.device.startswith("cuda"):
        fixed += CUBLAS_BYTES + sum(buffer.nbytes for buffer in model.buffers())
    return fixed


def by_kind(parts: Split, num_bytes: tuple[int, ...]) -> dict[str, int]:
    """The most of any unit of each kind."""
    most: dict[str, int] = {}
    for unit, size in zip(parts.spec.units, num_bytes, strict=False):
        most[unit.kind] = max(most.get(unit.kind, 0), size)
    return most
