"""What stages of several GPUs take in each tier: as a run of stages would set it aside.

Slots and accumulators twice, so that one half fills while the other is used, or once where memory is too tight for that
(`stages.HALVES`); activations of two microbatches; what forwards keep, where it leaves (`leaving`); workspace for all
units of the largest backward stage, which are recomputed before the first of them is differentiated.
"""

from dataclasses import replace

from outsize.errors import InfeasiblePlanError
from outsize.optim.shares import largest_share
from outsize.planner.memory.link_bytes import device_bytes, host_bytes
from outsize.planner.memory.memory_table import offload_rooms
from outsize.planner.predict.candidate import Table
from outsize.planner.predict.stage_task import StageTask
from outsize.planner.program.stages import HALVES, Stages, slots_for
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.smaller import smaller_microbatches
from outsize.planner.search.stage_layout import activation_bytes, staged_layout
from outsize.planner.search.stage_offload import Way, most_on_its_way
from outsize.planner.search.stage_room import HostRoom, bytes_below, in_room, rooms
from outsize.units import format_bytes

_ID_BYTES = 16


def layout_of(task: StageTask, way: Way, stages: Stages) -> StepLayout:
    """Return the step, its home and nodes apart."""
    return staged_layout(task.model, task.options, task.num_workers, way, stages)


def shared_out(task: StageTask, layout: StepLayout) -> StepLayout:
    """Return ``layout`` as that of one of the nodes that share the step: the one that steps most."""
    nodes = task.question.nodes
    return (
        layout
        if nodes == 1
        else replace(layout, num_nodes=nodes, own_elements=largest_share(task.model, nodes))
    )


def room_of(task: StageTask) -> HostRoom:
    """Return what a home on disk is given in host memory: as much as helps, which is little beside a GPU's memory."""
    return next(rooms(task.model, task.options, task.num_workers))


def table_below(task: StageTask) -> Table:
    """Return what lies below the GPUs whatever the stages."""
    model, options = task.model, task.options
    least, room = shared_out(task, layout_of(task, Way(), task.single_units(HALVES[-1]))), room_of(task)
    return bytes_below(model, in_room(model, least, options, room), options, room)


def device_memory_of(task: StageTask, way: Way, stages: Stages) -> dict[str, int]:
    """Return the bytes on each GPU by class."""
    question, work = task.question, task.work
    deepest = max(end - first for first, end in (*stages.forward, *stages.backward))
    leaving = most_on_its_way(stages, way.away, task.demand.kept_bytes) if way.away else 0
    return {
        "weight slots": sum(slots_for(stages, task.weights)),
        "gradient accumulators": sum(slots_for(stages, task.gradients, only_backward=True)),
        "activations": activation_bytes(deepest, task.work.boundary_bytes[-1]) + leaving,
        "workspace": max(sum(task.workspace(u) for u in range(*span)) for span in stages.backward),
        "shared": 2 * work.held_bytes
        + question.sequences * question.seq_len * _ID_BYTES
        + question.fixed_bytes,
        "codecs": device_bytes(task.options.transport, task.model, work.boundary_bytes),
    }


def memory_of(task: StageTask, below: Table, way: Way, stages: Stages) -> dict[str, dict[str, int]]:
    """Return bytes by tier and class; the device's are those of each GPU."""
    inputs = task.work.boundary_bytes
    waiting = offload_rooms(layout_of(task, way, stages), task.demand) if way.away else {}
    table = {
        "device": device_memory_of(task, way, stages),
        "host": {
            # Inputs, and the gradient under way.
            "saved activations": task.options.microbatches * (sum(inputs[1:]) + inputs[-1]),
            "offloaded activations": sum(count * size for count, size in waiting.values()),
            "encoded weights": host_bytes(task.options.transport, task.model),
            **below["host"],
        },
        "disk": dict(below["disk"]),
    }
    return {tier: {name: size for name, size in found.items() if size} for tier, found in table.items()}


def check(memory: Table, task: StageTask) -> None:
    """Check the least plan of ``task``, which takes ``memory``.

    Raises:
        InfeasiblePlanError: it does not fit.
    """
    budgets, kind = task.question.budgets, task.demand.largest_kind
    device, host, disk = (sum(memory[tier].values()) for tier in ("device", "host", "disk"))
    if device > budgets.device:
        largest = max(memory["device"], key=lambda name: memory["device"][name])
        advice = smaller_microbatches(task.options, kind if largest == "workspace" else None)
        if largest in ("weight slots", "gradient accumulators"):
            advice = f"GPUs with {format_bytes(device)}"
        raise InfeasiblePlanError(
            f"the smallest stages need {format_bytes(device)} on each GPU, "
            f"{format_bytes(memory['device'][largest])} of it for {largest}; first try {advice}",
            {"device": device - budgets.device},
        )
    for tier, needed, budget in (("host", host, budgets.host), ("disk", disk, budgets.disk)):
        if budget is not None and needed > budget:
            largest = max(memory[tier], key=lambda name: memory[tier][name])
            advice = f"a {tier} budget of {format_bytes(needed)}"
            if largest in ("saved activations", "offloaded activations"):
                advice = "fewer tokens per step"
            elif tier == "host" == task.question.home and largest == "home":
                advice = "the home on disk"
            raise InfeasiblePlanError(
                f"the smallest plan needs {format_bytes(needed)} on the {tier}, "
                f"{format_bytes(memory[tier][largest])} of it for {largest}; first try {advice}",
                {tier: needed - budget},
            )
