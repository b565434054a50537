"""Times of units on a GPU, bytes that stages share links for, and what a trace says of both."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import hypot, inf

from outsize.hardware.machine_spec import Machine
from outsize.model.sizes.model_spec import Workload
from outsize.planner.program.program import COMPUTE_KINDS, Kind, Op
from outsize.planner.program.stages import Extent
from outsize.planner.simulate.costs import EXCHANGE_S, UnitTimes
from outsize.planner.simulate.discrete import Cost
from outsize.planner.simulate.pipeline import sums
from outsize.planner.simulate.simulator import CostModel, Timeline

# Of the rate of dense products, what products of tokens with the experts that they visit reach in eager blocks, with
# tokens gathered and scattered around them: RoundPipe (arXiv 2604.27085) trains adapters of Qwen3-235B-A22B at half of
# the bound that dense products set on one GPU, and at 38 % on eight, whose processor asks for the work of all; at 100 %
# of it dense models. In fused kernels they are dense products but for what their elements take: 501 TFLOP/s forward of
# 128 experts of 768 on an H100 (github.com/linkedin/Liger-Kernel/pull/1294) is 499 here.
ROUTED_EAGER, ROUTED_EAGER_ON_SEVERAL = 0.5, 0.38
# What lies between products, norms and activations, writes the input of each and reads its result, in 2 bytes an
# element. A share of the peak holds that of the models that it was read off, the middle of which is Qwen2.5-7B:
# elements for each FLOP.
USUAL_ELEMENTS = 1.93e-4
# Bytes for each element of what adapters of linear layers read and return: added in kernels of their own, or in eager
# operations that cast to fp32, multiply, scale, cast and add.
ADAPTED_FUSED, ADAPTED_EAGER = 6, 36
# Least time that a pass over an eager block takes its thread: Llama 2 7B, 32 blocks, writes 25.5 tokens/s in plain
# PyTorch on an A100, whatever the GPU could do (pytorch.org/blog/accelerating-generative-ai-2).
EAGER_BLOCK_S = 1 / 25.5 / 32


def unit_times(machine: Machine, dtype: str, work: Workload) -> UnitTimes:
    """Return the times of each streamed unit on the slowest GPU of ``machine``.

    A unit without matrix products, the embedding, takes what its bytes take in the GPU's memory: it reads and writes
    its output once forward, twice backward.

    Raises:
        ConfigError: a GPU has no figure for ``dtype``.
    """
    rate = min(gpu.flops_per_s(dtype) for gpu in machine.gpus)
    memory = min(gpu.memory_bytes_per_s.value for gpu in machine.gpus)
    looked_up_s = 2 * work.boundary_bytes[-1] / memory
    slower = _slower(machine, work)
    forward = _seconds(work.forward_flops, slower, rate, looked_up_s)
    # What goes in parts, a mixture included, is computed again by the backward: the recompute leaves it out.
    again_flops = work.again_flops or (0.0,) * len(slower)
    of_recompute = (1.0 if again else more for again, more in zip(again_flops, slower, strict=True))
    recompute = _seconds(work.recompute_flops, tuple(of_recompute), rate, looked_up_s)
    # Kernels made for a layer (linear attention) spare what its reference computes in loops for its gradient.
    most = 2.0 if all(gpu.fused for gpu in machine.gpus) else inf
    both = zip(work.gradient_flops, work.forward_flops, strict=True)
    gradient_flops = tuple(min(gradient, most * flops) if flops else gradient for gradient, flops in both)
    gradient = tuple(
        flops * more / rate if down else 2 * looked_up_s
        for down, flops, more in zip(work.forward_flops, gradient_flops, slower, strict=True)
    )
    again = tuple(
        (flops + (more - 1) * forward_flops * (flops > 0)) / rate
        for flops, more, forward_flops in zip(again_flops, slower, work.forward_flops, strict=True)
    )
    faster = _faster(machine, work, slower)
    between = zip(_between(machine, work, memory), work.forward_flops, strict=True)
    s_per_flop = [seconds / flops if flops else 0.0 for seconds, flops in between]
    flops_of = (work.forward_flops, work.recompute_flops, gradient_flops)
    forward, recompute, gradient = (
        _launched(machine, work, [s * less + flops * more for s, less, flops, more in parts])
        for parts in (
            zip(seconds, faster, flops, s_per_flop, strict=True)
            for seconds, flops in zip((forward, recompute, gradient), flops_of, strict=True)
        )
    )
    again_s = (seconds * less for seconds, less in zip(again, faster, strict=True))
    return UnitTimes(
        forward_s=forward,
        backward_s=tuple(map(sum, zip(recompute, gradient, again_s, strict=True))),
        recompute_s=recompute,
        spared_s=_spared(machine, work, recompute, rate, memory),
    )


def _adapted_s(machine: Machine, work: Workload, memory: float) -> tuple[float, ...]:
    """Return what adapters of each unit add to a pass of it."""
    each = max(ADAPTED_FUSED if gpu.fused else ADAPTED_EAGER for gpu in machine.gpus)
    elements = work.low_rank_elements or (0.0,) * len(work.forward_flops)
    return tuple(each * count / memory for count in elements)


def _between(machine: Machine, work: Workload, memory: float) -> tuple[float, ...]:
    """Return what lies between products in each forward beyond what a share of the peak holds; less in wide models."""
    nothing, adapted = (0.0,) * len(work.forward_flops), _adapted_s(machine, work, memory)
    if not work.moved_elements:
        return adapted
    fused = all(gpu.fused for gpu in machine.gpus)
    experts = zip(work.routed_flops or nothing, work.routed_moved_elements or nothing, strict=True)
    apart = ((0.0, moved) if fused else (flops, 0.0) for flops, moved in experts)
    attention = work.attention_flops or nothing
    units = zip(adapted, work.moved_elements, work.forward_flops, attention, apart, strict=True)
    held = 0.0 if any(gpu.efficiency.measured for gpu in machine.gpus) else USUAL_ELEMENTS
    return tuple(
        adapted_s + 2 * (moved + more - held * max(0.0, flops - attended - routed)) / memory
        for adapted_s, moved, flops, attended, (routed, more) in units
    )


def _launched(machine: Machine, work: Workload, seconds: Sequence[float]) -> tuple[float, ...]:
    """Return no less than the thread of the slowest GPU takes to ask for the operations of each block."""
    least_s = max(0.0 if gpu.fused or gpu.is_host else EAGER_BLOCK_S for gpu in machine.gpus)
    blocks = zip(seconds[:-1], work.forward_flops[:-1], strict=True)
    return (*(max(one, least_s) if flops and one else one for one, flops in blocks), seconds[-1])


def _seconds(
    flops: Sequence[float], slower: Sequence[float], rate: float, idle_s: float
) -> tuple[float, ...]:
    return tuple(one * more / rate if one else idle_s for one, more in zip(flops, slower, strict=True))


def _slower(machine: Machine, work: Workload) -> tuple[float, ...]:
    """Return how many times as long each unit takes as all of its FLOPs in dense products would."""
    if not work.routed_flops or all(gpu.fused for gpu in machine.gpus):
        return (1.0,) * len(work.forward_flops)
    lost = 1 / (ROUTED_EAGER_ON_SEVERAL if len(machine.gpus) > 1 else ROUTED_EAGER) - 1
    return tuple(
        1 + lost * routed / flops if flops else 1.0
        for routed, flops in zip(work.routed_flops, work.forward_flops, strict=True)
    )


def _faster(machine: Machine, work: Workload, slower: Sequence[float]) -> tuple[float, ...]:
    """Return what of its time each unit takes where its linear layers multiply in fp8: blocks, and not the head."""
    gains = [gpu.fp8_gain for gpu in machine.gpus if gpu.fp8_gain is not None]
    saved = 1 - 1 / min(gain.value for gain in gains) if gains else 0.0
    nothing = (0.0,) * len(slower)
    others = zip(work.attention_flops or nothing, work.routed_flops or nothing, strict=True)
    blocks = zip(work.forward_flops[:-1], others, slower[:-1], strict=False)
    shares = ((flops - sum(other)) / (flops * more) if flops else 0.0 for flops, other, more in blocks)
    return (*(1 - saved * share for share in shares), 1.0)


def _spared(
    machine: Machine, work: Workload, recompute: Sequence[float], rate: float, memory: float
) -> dict[Extent, tuple[float, ...]]:
    """Return what of each recompute is spared where attention, or attention and products, are kept.

    Where products are kept too, what lies between them is made again, and adapters: it is read and written once.
    """
    if not work.attention_bytes:
        return {}
    units = zip(_adapted_s(machine, work, memory), work.saved_bytes, work.products_bytes, strict=True)
    between = [adapted_s + 2 * (saved - products) / memory for adapted_s, saved, products in units]
    others = [all_s - flops / rate for all_s, flops in zip(recompute, work.attention_flops, strict=True)]
    # What is left has its operations to ask for as before.
    without_attention, rest = (_launched(machine, work, left) for left in (others, between))
    each = zip(recompute, rest, work.products_bytes, strict=True)
    return {
        Extent.ATTENTION: tuple(max(0.0, a - b) for a, b in zip(recompute, without_attention, strict=True)),
        Extent.PRODUCTS: tuple(max(0.0, all_s - left) * (size > 0) for all_s, left, size in each),
    }


def with_shared(alone_s: float, shared_s: float) -> float:
    """Return about what a step takes that would take ``alone_s`` if nothing were shared, and ``shared_s`` of what is.

    Simulated steps of 8B and 14B on two to eight GPUs, whose host memory was in use for a sixth to nine tenths of a
    step, took 0.78 to 1.10 times that.
    """
    return hypot(alone_s, shared_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRates:
    """What all workers share, by its bytes per second.

    Attributes:
        host: reads and writes of host memory together.
        uplinks: each direction of a switch, with the share of the workers that are behind it.
    """

    host: float = inf
    uplinks: tuple[tuple[float, float], ...] = ()


class StageTraffic:
    """Counts bytes of stages that run backward down to unit ``bottom``.

    They cross the links of all workers in a step, counted from the numbers of its stages alone. All of it goes through
    host memory, which the optimizer and a disk use too, and what workers behind one switch move through its uplink.
    What is shared is in use for a time of its own, and the more of a step that is, the more copies wait for each other
    that would be hidden otherwise (`with_shared`). `memory.traffic.OpBytes` counts the same of a program, op by
    op.

    Args:
        weights: of each streamed unit, as they come up.
        gradients: of each, in a round.
        away: of what its forward keeps and lets leave, for a microbatch.
        boundary_bytes: of what stages hand over, and of an input that a backward needs, for a microbatch.
        bottom: lowest unit that runs backward.
        by_host: whether what stages hand over goes by way of host memory.
        others: bytes of host memory that a step takes whatever its stages.
        rates: of what is shared.
        passes: how often a byte of weights and gradients passes host memory: twice where a disk is behind it.
    """

    def __init__(
        self,
        *,
        weights: Sequence[float],
        gradients: Sequence[float],
        away: Sequence[float] = (),
        boundary_bytes: float = 0.0,
        bottom: int = 0,
        by_host: bool = True,
        others: float = 0.0,
        rates: SharedRates,
        passes: int = 1,
    ) -> None:
        self._weights, self._away = sums(weights), sums(away or (0.0,) * len(weights))
        self._backward_weights, self._gradients = sum(weights[bottom:]), sum(gradients[bottom:])
        self._boundary_bytes, self._bottom, self._by_host = boundary_bytes, max(1, bottom), by_host
        self._others, self._rates, self._passes = others, rates, passes

    def up_and_down(
        self, num_ups: int, fused: int, num_downs: int, num_microbatches: int, round_size: int
    ) -> tuple[float, float, float]:
        """Return the bytes of weights and gradients, those of all that goes up, and of all that goes down.

        Args:
            num_ups: forward stages.
            fused: lowest unit of the stage that turns around.
            num_downs: backward stages, that one included.
            num_microbatches: of a step.
            round_size: of them, in a round.
        """
        rounds = -(-num_microbatches // round_size)
        weights = rounds * (self._weights[fused] + self._backward_weights)
        summed, gradients = (rounds - 1) * self._gradients, rounds * self._gradients
        # Inputs that a backward needs; some are what a stage hands over anyhow.
        up = down = inputs = max(0, fused - self._bottom)
        if self._by_host:
            up += num_ups + num_downs - 1
            down += num_ups - min(inputs, max(0, num_ups - 1)) + num_downs - 1
        away = num_microbatches * self._away[fused]
        each = num_microbatches * self._boundary_bytes
        return (
            weights + summed + gradients,
            weights + summed + away + up * each,
            gradients + away + down * each,
        )

    def least_s(
        self, num_ups: int, fused: int, num_downs: int, num_microbatches: int, round_size: int
    ) -> float:
        """Return the seconds that what is shared takes for a step, see `up_and_down`."""
        state, up, down = self.up_and_down(num_ups, fused, num_downs, num_microbatches, round_size)
        host_s = (up + down + (self._passes - 1) * state + self._others) / self._rates.host
        return max([host_s, *(share * max(up, down) / rate for rate, share in self._rates.uplinks)])


# A rate from less than this many seconds of work says more about the clock than about the lane.
LEAST_S = 1e-4
_Key = tuple[Kind, int | None]


@dataclass(slots=True)
class _Sum:
    seconds: float = 0.0
    amount: float = 0.0
    count: int = 0

    def add(self, seconds: float, amount: float) -> None:
        self.seconds, self.amount, self.count = self.seconds + seconds, self.amount + amount, self.count + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The ops of some steps, added up.

    Attributes:
        by_op: by kind and unit, over microbatches, workers and steps; pieces of a unit count under its kind alone.
        rates: what each resource of a cost model carried per second while an op used it; those that nothing went
            through, or hardly, are left out.
        compute_share: what computing took, over what was predicted; 1 where nothing was.
    """

    by_op: Mapping[_Key, _Sum] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    compute_share: float = 1.0

    def costs(self, predicted: CostModel) -> CostModel:
        """Return costs with which each op takes as long as it took; ``predicted`` ones for ops that never ran."""
        return CostModel(cost_of=_measured(self.by_op, predicted.cost_of), capacity=predicted.capacity)


def read_trace(timeline: Timeline, costs: CostModel) -> Trace:
    """Add up the events of ``timeline``.

    Args:
        timeline: of steps that ran.
        costs: predicted, of the very ops that ran: how much each moves, and through what.
    """
    by_op: defaultdict[_Key, _Sum] = defaultdict(_Sum)
    resources: defaultdict[str, _Sum] = defaultdict(_Sum)
    took_s = expected_s = 0.0
    for event in timeline.events:
        op = event.op
        assert isinstance(op, Op), "the lanes of a run run its programs"
        seconds, cost = event.end_s - event.start_s, costs.cost_of(op)
        by_op[_key(op)].add(seconds, cost.amount)
        if cost.amount:
            behind_s = 0.0 if cost.then is None else cost.then.alone_s(costs.capacity)
            resources[_bottleneck(cost)].add(max(0.0, seconds - cost.seconds - behind_s), cost.amount)
        if op.kind in COMPUTE_KINDS:
            took_s, expected_s = took_s + seconds, expected_s + cost.seconds
    rates = {name: part.amount / part.seconds for name, part in resources.items() if part.seconds > LEAST_S}
    share = took_s / expected_s if took_s > 0 and expected_s > 0 else 1.0
    return Trace(by_op=dict(by_op), rates=rates, compute_share=share)


def _key(op: Op) -> _Key:
    return op.kind, None if op.tile is not None else op.unit


def _bottleneck(cost: Cost) -> str:
    """Return the resource that a lane waits for: the disk where bytes go on to it, else the first of its path."""
    return next((name for name in cost.through if name.startswith("disk")), cost.through[0])


def _measured(by_op: Mapping[_Key, _Sum], predicted: Callable[[Op], Cost]) -> Callable[[Op], Cost]:
    def cost_of(op: Op) -> Cost:
        timings, cost = by_op.get(_key(op)), predicted(op)
        if timings is None or not timings.count:
            return cost
        if op.tile is None or not timings.amount:
            return Cost(seconds=timings.seconds / timings.count)
        return Cost(
            seconds=timings.seconds / timings.amount * cost.amount
        )  # larger tiles than those that ran

    return cost_of


def crowded(
    times: UnitTimes,
    ops: Iterable[Op],
    costs: CostModel,
    *,
    cores: float,
    threads: int,
    core_s_per_byte: float,
) -> UnitTimes:
    """Return what units take where the lanes of a step compute beside them.

    On a CPU every lane is a thread. Units and lanes are timed one at a time, each with the cores to itself; in a step
    copies, optimizer, sums over ranks and the sending of bytes run beside compute. With a core to spare for them they
    cost nothing. Where compute keeps all cores busy, as with several ranks on one machine, a second of theirs costs
    compute a second of one core. They are taken to use one core at a time, and compute to share the loss evenly among
    its threads.

    Args:
        times: of units that have the cores to themselves.
        ops: of a step.
        costs: of these ops, one at a time.
        cores: that this process has, its part of those that it shares.
        threads: that compute keeps busy.
        core_s_per_byte: of a core, to send a byte to another rank and to receive and add one meanwhile.
    """
    free = min(1.0, max(0.0, cores - threads))
    compute_s = lanes_s = 0.0
    for op in ops:
        cost = costs.cost_of(op)
        if op.kind in COMPUTE_KINDS:
            compute_s += cost.seconds
        elif op.row.is_net:  # codecs and messages, but no waits
            lanes_s += max(0.0, cost.seconds - EXCHANGE_S) + cost.amount * core_s_per_byte
        elif op.row.price not in ("disk", "commit"):
            lanes_s += cost.alone_s(costs.capacity)
    if not compute_s:
        return times
    return scaled(times, 1.0 + (1.0 - free) * lanes_s / (threads * compute_s))


def scaled(times: UnitTimes, factor: float) -> UnitTimes:
    """Return ``times`` of compute that is so many times as slow."""

    def each(seconds: Iterable[float]) -> tuple[float, ...]:
        return tuple(s * factor for s in seconds)

    return replace(
        times,
        forward_s=each(times.forward_s),
        backward_s=each(times.backward_s),
        recompute_s=each(times.recompute_s),
        spared_s={extent: each(seconds) for extent, seconds in times.spared_s.items()},
        kept_forward_s=each(times.kept_forward_s),
        kept_backward_s=each(times.kept_backward_s),
    )
