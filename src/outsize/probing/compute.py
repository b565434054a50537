"""Measure what a device computes: matrix products and attention, and optimizer steps."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from math import prod

import torch
import torch.nn.functional as F

from outsize.accelerators import CPU, Devices, synchronize
from outsize.hardware.cgroup import Measurement, explain
from outsize.model.sizes.model_spec import ModelSpec, UnitSpec, pack_unit
from outsize.native.library import available
from outsize.optim.adamw import PlaneAdamW
from outsize.optim.muon import orthogonal
from outsize.optim.optimizer_names import muon_matrices, newton_schulz_flops
from outsize.optim.optimizer_spec import State, StateLayout, masters_for
from outsize.planner.program.hazards import Hazards
from outsize.planner.program.program import Kind, Op, lane_of
from outsize.probing.effort import Effort, sample
from outsize.runtime.device.device import CpuDevice
from outsize.runtime.engine.executor import Executor
from outsize.runtime.ops.context import StepContext
from outsize.runtime.ops.optimizer_ops import OptimizerOps
from outsize.storage.home import HostHome
from outsize.storage.ledger import Arena

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SIDES: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
_HEADS, _HEAD_DIM = 8, 128
_WIDTH = _HEADS * _HEAD_DIM
_SEQ_LENS: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)


def dtypes_of(device: Devices) -> tuple[str, ...]:
    """Return the compute dtypes that are timed; nobody trains in fp16 on a CPU, which does it one by one."""
    return tuple(DTYPES) if device.accelerated else ("fp32", "bf16")


def finisher(device: Devices) -> Callable[[], None]:
    """Return what waits for all work queued on ``device``."""
    return partial(synchronize, device.torch_device)


def measure_device_memory(device: Devices, effort: Effort) -> Measurement:
    """Return what ``a = b + s * c`` moves in the memory of a GPU, bytes per second, reads and writes together."""
    try:
        a, b, c = (torch.ones(effort.array_bytes // 4, device=device.torch_device) for _ in "abc")
        samples = sample(
            lambda: torch.add(b, c, alpha=3.0, out=a), **effort.sampling(), finish=finisher(device)
        )
    except RuntimeError as error:
        return Measurement.absent(f"triad on {device}: {explain(error)}")
    return Measurement.of((3 * a.nbytes / seconds for seconds in samples), "torch.add with alpha, fp32")


def measure_matmul(device: Devices, dtype: str, effort: Effort) -> Measurement:
    """Return the operations per second of ``n x n`` products, 2 n³ each, at the largest n that is quick enough.

    fp32 runs with the process's own settings, so without TF32 unless it was allowed.
    """

    def prepare(n: int) -> Callable[[], object]:
        a, b = (torch.randn(n, n, device=device.torch_device).to(DTYPES[dtype]) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    sides = _SIDES
    if device.is_cpu:  # three matrices beside everything else: each no larger than a DRAM array
        sides = tuple(n for n in _SIDES if n == _SIDES[0] or 4 * n * n <= effort.array_bytes)
    return measure_growing(
        device, effort, sides, prepare, lambda n: 2.0 * n**3, f"{dtype} n x n product, n ="
    )


def measure_attention(device: Devices, dtype: str, effort: Effort) -> Measurement:
    """Return the operations per second of causal attention forward, 8 heads of 128.

    ``2 s² h d`` operations: the two products take ``4 s² h d``, and the mask leaves half of it.
    """

    def prepare(s: int) -> Callable[[], object]:
        q, k, v = (
            torch.randn(1, _HEADS, s, _HEAD_DIM, device=device.torch_device).to(DTYPES[dtype])
            for _ in range(3)
        )
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def flops(s: int) -> float:
        return 2.0 * s * s * _WIDTH

    lengths = _SEQ_LENS
    if device.is_cpu:  # as of products: no tensor larger than a DRAM array
        lengths = tuple(s for s in _SEQ_LENS if s == _SEQ_LENS[0] or 4 * s * _WIDTH <= effort.array_bytes)
    return measure_growing(device, effort, lengths, prepare, flops, f"{dtype} causal attention, tokens =")


@torch.no_grad()
def measure_growing(
    device: Devices,
    effort: Effort,
    sizes: tuple[int, ...],
    prepare: Callable[[int], Callable[[], object]],
    flops: Callable[[int], float],
    what: str,
) -> Measurement:
    """Return what ``prepare(size)()`` does per second, at the first of ``sizes`` that takes ``effort.matmul_s``.

    Args:
        device: that is waited for.
        effort: how long.
        sizes: to try, from the smallest.
        prepare: makes the work of a size.
        flops: operations of a size.
        what: it is, for the source; the size is added.
    """
    finish = finisher(device)
    try:
        for size in sizes:
            work = prepare(size)
            work()
            finish()
            started = time.perf_counter()
            work()
            finish()
            if time.perf_counter() - started >= effort.matmul_s:
                break
        samples = sample(work, **effort.sampling(), finish=finish)
    except RuntimeError as error:  # a dtype that the device lacks, or no memory left
        return Measurement.absent(f"{what}: {explain(error)}")
    return Measurement.of((flops(size) / seconds for seconds in samples), f"{what} {size}")


# A block of a decoder of width h has some 12 h² parameters: 4 h² of attention, 8 h² of three matrices of its MLP.
_BLOCK_SQUARES = 12
_WIDTHS = (2048, 1024, 512, 256, 128, 64)
# So many blocks are no longer in a cache by the time that the first of them steps again.
_NUM_BLOCKS = 4
_FILL = 0.01


def measure_adamw(effort: Effort, state: State, units: Sequence[UnitSpec] = ()) -> Measurement:
    """Return the parameters per second of STEPs one after the other, with nothing beside them.

    They are steps as a run does them: whole units at home in host memory, by STEPs that the executor runs on the
    optimizer's lane. A rate of the bare kernel over one long plane is not what a run gets. There each STEP goes over
    five to seven planes of one unit, is cut where weight decay begins and ends, forks and joins the threads of a lane
    that is not the main thread, and finds none of its memory in a cache; the smaller the unit, the more of its time is
    not the kernel's. So the same classes run the same ops here, over a model's own units where it is known, and the
    time of an op is what the executor notes of it, as the heartbeat of a run has it.

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
    width = next((w for w in _WIDTHS if num_least * _BLOCK_SQUARES * w * w <= elements), _WIDTHS[-1])
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
