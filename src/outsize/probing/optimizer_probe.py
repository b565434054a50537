"""AdamW as a run steps it: whole units at home in host memory, by STEPs that the executor runs on the optimizer's lane.

A rate of the bare kernel over one long plane is not what a run gets. There each STEP goes over five to seven planes of
one unit, is cut where weight decay begins and ends, forks and joins the threads of a lane that is not the main thread,
and finds none of its memory in a cache; the smaller the unit, the more of its time is not the kernel's. So the same
classes run the same ops here, over a model's own units where it is known, and the time of an op is what the executor
notes of it, as the heartbeat of a run has it.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from math import prod

import torch

from outsize.accelerators import CPU, Devices, synchronize
from outsize.hardware.readings import Measurement
from outsize.model.sizes.model_spec import ModelSpec, UnitSpec, pack_unit
from outsize.native.library import available
from outsize.optim.adamw import PlaneAdamW
from outsize.optim.factors import muon_matrices, newton_schulz_flops
from outsize.optim.muon import orthogonal
from outsize.optim.optimizer_spec import State, StateLayout, masters_for
from outsize.planner.program.hazards import Hazards
from outsize.planner.program.lanes import lane_of
from outsize.planner.program.ops import Kind, Op
from outsize.probing.effort import Effort, sample
from outsize.runtime.device.device import CpuDevice
from outsize.runtime.engine.executor import Executor
from outsize.runtime.ops.context import StepContext
from outsize.runtime.ops.optimizer_ops import OptimizerOps
from outsize.storage.arena import Arena
from outsize.storage.home import HostHome

# A block of a decoder of width h has some 12 h² parameters: 4 h² of attention, 8 h² of three matrices of its MLP.
_BLOCK_SQUARES = 12
_WIDTHS = (2048, 1024, 512, 256, 128, 64)
# So many blocks are no longer in a cache by the time that the first of them steps again.
_NUM_BLOCKS = 4
_FILL = 0.01


def measure_adamw(effort: Effort, state: State, units: Sequence[UnitSpec] = ()) -> Measurement:
    """Return the parameters per second of STEPs one after the other, with nothing beside them.

    Args:
        effort: how long, and the size of an fp32 plane over all units.
        state: how units lie at home; a compute dtype stands for what a run takes by default.
        units: a model's own, as many of them as the effort has room for; where most are too large, one block that is
            as large as may be; without any, several blocks.
    """
    layout = _layout(state)
    made_up = _blocks(effort, num_least=1 if units else _NUM_BLOCKS)
    spec = ModelSpec(units=_fitting(effort, units) or made_up, dtype=layout.dtype)
    ops = [Op(kind=Kind.STEP, unit=unit.index) for unit in spec.units]
    seconds: list[float] = []
    with Arena() as arena, HostHome(spec, layout.planes, arena) as home, closing(CpuDevice()) as device:
        _fill(home, spec, layout)
        optimizer = OptimizerOps(spec, home, PlaneAdamW(), state=layout)
        touched = {unit.index: frozenset(range(len(unit.tensors))) for unit in spec.units}
        context = StepContext(number=0, learning_rate=1e-5, microbatches=(), touched=touched)
        executor = Executor(device, lane_of, optimizer.step, Hazards(len(ops), None))

        def step() -> None:
            executor.wait(executor.submit(ops, context))
            seconds.append(sum(event.end_s - event.start_s for event in executor.take_events()))

        with closing(executor):
            sample(step, **effort.sampling())
    masters = f", {layout.masters} masters" if layout.dtype != "fp32" else ""
    how = f"STEPs of {len(ops)} units, {spec.num_trainable} parameters, {torch.get_num_threads()} threads"
    # The first step was the one that does not count: it is the first to touch the lane, and perhaps the memory.
    return Measurement.of(
        (spec.num_trainable / took for took in seconds[1:]), f"{how}, {layout.dtype} compute{masters}"
    )


def measure_products(
    effort: Effort, units: Sequence[UnitSpec], iterations: int, device: Devices = CPU
) -> Measurement:
    """Return FLOPs per second of so many of Muon's iterations, what goes before them included.

    They are timed on a matrix of ``units``, the largest that the effort has room for, on ``device``.
    """
    sides = sorted((tensor.shape for unit in units for tensor in muon_matrices(unit)), key=prod)
    shape = next((each for each in reversed(sides) if 4 * prod(each) <= effort.plane_bytes), sides[0])
    update, scratch = (
        torch.randn(shape).to(device.torch_device),
        torch.zeros(shape, device=device.torch_device),
    )
    work = newton_schulz_flops(pack_unit(0, "probe", "block", [("matrix", shape, True, True)]), iterations)

    def multiply() -> None:
        orthogonal(update, scratch, iterations)
        synchronize(device.torch_device)

    seconds = sample(multiply, **effort.sampling())
    where = device if device.accelerated else f"{torch.get_num_threads()} threads"
    how = f"{iterations} iterations on {shape[0]} x {shape[1]}, {where}"
    return Measurement.of((work / took for took in seconds), how)


def _layout(state: State) -> StateLayout:
    """Return how units lie; gradients that a run hands over tile by tile lie there whole."""
    if isinstance(state, StateLayout):
        return state.durable if state.gradients == "none" else state
    return StateLayout(dtype=state, masters=masters_for("auto", state, "fp32", kernels=available()))


def _fitting(effort: Effort, units: Sequence[UnitSpec]) -> tuple[UnitSpec, ...]:
    """Return trainable units, in order, as far as their fp32 planes together fit.

    Where units are left out, those that fit must fill half of the room: the final norm of a model of large blocks fits,
    and the call takes longer than its few parameters.
    """
    chosen: list[UnitSpec] = []
    room = left = effort.plane_bytes // 4
    trainable = [unit for unit in units if unit.trainable]
    for unit in trainable:
        if unit.numel <= left:
            chosen.append(replace(unit, index=len(chosen), frozen=()))
            left -= unit.numel
    return tuple(chosen) if len(chosen) == len(trainable) or left <= room // 2 else ()


def _blocks(effort: Effort, num_least: int) -> tuple[UnitSpec, ...]:
    """Return blocks of a decoder, as wide as they may be, at least so many."""
    elements = effort.plane_bytes // 4
    width = next(
        (w for w in _WIDTHS if num_least * _BLOCK_SQUARES * w * w <= elements),
        _WIDTHS[-1],
    )
    inner = 8 * width // 3
    matrices = [(name, (width, width), True, True) for name in ("q", "k", "v", "o")]
    matrices += [(name, (inner, width), True, True) for name in ("gate", "up", "down")]
    norms = [(name, (width,), True, False) for name in ("input_norm", "mlp_norm")]
    count = max(1, elements // (_BLOCK_SQUARES * width * width))
    return tuple(pack_unit(index, f"probe.{index}", "block", [*matrices, *norms]) for index in range(count))


def _fill(home: HostHome, spec: ModelSpec, layout: StateLayout) -> None:
    """Touch every page, with numbers that no step makes denormal; what holds bits and codes stays zero."""
    for unit in spec.units:
        for name in layout.planes:
            plane = home.view(unit.index, name)
            plane.fill_(_FILL if plane.is_floating_point() else 0)
