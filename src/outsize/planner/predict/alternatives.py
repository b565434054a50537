"""Bound the step time of other ways to train on the same machines, to compare a prediction with.

A way is a bound and no simulation: products at the same rate as ours, every exchange at the full rate of its link and
hidden behind compute where the way allows it, nothing lost between kernels. A system that takes the way is no faster
and needs no less memory. State is the 16 bytes per trained parameter of mixed precision with Adam, and gradients are
exchanged in two (ZeRO, arXiv 1910.02054). In a block, tensor parallelism sums activations twice forward, twice
backward, and twice more where the forward is computed again (Megatron-LM, arXiv 1909.08053); a pipeline of p stages
idles for p - 1 of its m + p - 1 turns (arXiv 2104.04473).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from outsize.hardware.link_fit import crossing_bytes
from outsize.model.sizes.model_spec import Workload
from outsize.planner.predict.question import Question
from outsize.planner.simulate.gpu_times import unit_times

STATE_BYTES, GRADIENT_BYTES = 16, 2
# AdamW in fp32 reads a parameter, its gradient and two moments, and writes all but the gradient.
ADAMW_BYTES = 28
ACTIVATION_SUMS = "sums of activations"
# Sums of activations that one block waits for: two forward and two backward; with its forward computed again, six.
SUMS, SUMS_AGAIN = 4, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One way to train.

    Attributes:
        name: for people.
        device_bytes: needed on each GPU at least.
        host_bytes: needed in host memory of each node at least.
        fits: whether both fit the budgets.
        tokens_per_s: at most, whether it fits or not.
        compute_s: of a step, on each GPU.
        waits_s: of a step, for what compute cannot hide.
        waits_for: what that is, most of it; empty where nothing is waited for.
    """

    name: str
    device_bytes: int
    host_bytes: int
    fits: bool
    tokens_per_s: float
    compute_s: float
    waits_s: float
    waits_for: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """How GPUs share a step: in ``tensor`` parts of each product, ``stages``, and ``replicas`` of all that."""

    tensor: int
    stages: int
    replicas: int

    @property
    def is_hybrid(self) -> bool:
        """Whether it is more than one way at once."""
        return sum(count > 1 for count in (self.tensor, self.stages, self.replicas)) > 1

    @property
    def name(self) -> str:
        parts = (
            ("tensor parallel", self.tensor),
            ("pipeline parallel", self.stages),
            ("data parallel", self.replicas),
        )
        return (
            " x ".join(f"{name} {count}" for name, count in parts if count > 1) or "one GPU, all of it there"
        )


def alternatives(question: Question) -> tuple[Alternative, ...]:
    """Return other ways to train what ``question`` asks about, on all GPUs of its nodes.

    Of hybrids only the best is told. Those that share a product are next to one another, stages are furthest apart.
    """
    count = _num_gpus(question)
    shares = [
        _Share(tensor=tensor, stages=stages, replicas=count // tensor // stages)
        for tensor in _divisors(count)
        for stages in _divisors(count // tensor)
    ]
    pure = [_best(_resident(question, share)) for share in shares if not share.is_hybrid]
    hybrids = [_best(_resident(question, share)) for share in shares if share.is_hybrid]
    sharded = [_best(_sharded(question, offloads=offloads)) for offloads in (False, True)]
    if count == 1:
        del sharded[0]  # nothing is sharded over one
    return (*pure, *([_best(hybrids)] if hybrids else ()), *sharded)


def managed_tokens_per_s(question: Question) -> float:
    """Return the most tokens per second where pages come to each GPU when a kernel faults on them; 0 where none fits.

    Nothing is loaded ahead then: compute and copies go one after the other. Weights come twice for a microbatch and
    gradients leave; the state comes once, for the optimizer.
    """
    link = min(link.up_bytes_per_s.value for link in question.machine.links)
    moved_s = (2 * _weights(question) + _gradients(question)) / link
    state_s = STATE_BYTES * question.model.num_trainable / link
    rates = [
        state_s + num_microbatches * (_compute_s(question, work, again=True) + moved_s)
        for work, num_microbatches in _microbatches(question, _num_gpus(question))
        if _activation_bytes(work, again=True) <= question.budgets.device
    ]
    return question.tokens_per_step / min(rates) if rates else 0.0


def _num_gpus(question: Question) -> int:
    return question.nodes * question.num_workers


def _divisors(count: int) -> list[int]:
    return [number for number in range(1, count + 1) if count % number == 0]


def _best(alternatives: Iterator[Alternative] | list[Alternative]) -> Alternative:
    """Return the fastest that fits; where none fits, the one that needs the least memory on a GPU."""
    return max(
        alternatives,
        key=lambda way: (way.fits, way.tokens_per_s if way.fits else -way.device_bytes - way.host_bytes),
    )


def _microbatches(question: Question, replicas: int) -> Iterator[tuple[Workload, int]]:
    """Yield what a microbatch takes, of one sequence, two, four …, and how many each replica has in a step."""
    assert question.workload_of is not None
    sequences, size = max(1, -(-question.nodes * question.sequences // replicas)), 1
    while size <= sequences:
        yield question.workload_of(size), -(-sequences // size)
        size *= 2


def _resident(question: Question, share: _Share) -> Iterator[Alternative]:
    """Yield the way in which weights and state stay on the GPUs, by size of a microbatch and what is kept."""
    model, gpus = question.model, question.machine.gpus
    parts = share.tensor * share.stages
    state = (STATE_BYTES * model.num_trainable + _frozen(question)) // parts
    optimizer_s = (
        ADAMW_BYTES * model.num_trainable / parts / min(gpu.memory_bytes_per_s.value for gpu in gpus)
    )
    for work, num_microbatches in _microbatches(question, share.replicas):
        for again in (False, True):
            in_flight = min(share.stages, num_microbatches)
            activations = _activation_bytes(work, again) * in_flight // parts
            device = state + activations + question.fixed_bytes
            one_s = _compute_s(question, work, again) / parts
            idle_s = (share.stages - 1) * one_s
            gradients_s = _sum_s(question, _gradients(question) / parts, share.replicas, apart=share.tensor)
            waits = {
                ACTIVATION_SUMS: num_microbatches * _activation_sums_s(question, work, share, again),
                "the pipeline's bubble": idle_s,
                # They leave while the last microbatch's backward goes on, two thirds of what it computes.
                "gradients of the other replicas": max(0.0, gradients_s - 2 / 3 * one_s),
                "the optimizer": optimizer_s,
            }
            yield _way(question, share.name, device, 0, num_microbatches * one_s, waits)


def _sharded(question: Question, *, offloads: bool) -> Iterator[Alternative]:
    """Yield ZeRO-3, or FSDP, in which each GPU has a share of everything and gathers a unit when it computes it.

    Where it ``offloads``, shares rest in host memory, and the optimizer steps there when the backward is over.
    """
    model, count, nodes = question.model, _num_gpus(question), question.nodes
    weights, gradients = _weights(question), _gradients(question)
    gathered = 2 * max(unit.weight_bytes(model.dtype) for unit in model.units)
    state = STATE_BYTES * model.num_trainable + _frozen(question)
    others = (count - 1) / count
    alone = question.num_workers == 1
    rate = question.machine.links[0].up_bytes_per_s.value if alone else _exchange_rate(question)
    for work, num_microbatches in _microbatches(question, count):
        for again in (False, True):
            device = gathered + _activation_bytes(work, again) + question.fixed_bytes
            device += 0 if offloads else state // count
            # Of what arrives a share is the GPU's own; it comes from the host where shares rest there.
            share = 1.0 if offloads else others
            across_s = share * (2 * weights + gradients) / rate
            if question.net_bytes_per_s is not None:
                arriving = (nodes - 1) / nodes * (2 * weights + gradients)
                across_s = max(across_s, arriving / question.net_bytes_per_s.value)
            compute_s = _compute_s(question, work, again)
            host = question.machine.host
            steps_s = (
                model.num_trainable / nodes / host.adamw_params_per_s.value
                if offloads
                else ADAMW_BYTES
                * model.num_trainable
                / count
                / question.machine.gpus[0].memory_bytes_per_s.value
            )
            waits = {
                "weights and gradients": num_microbatches * max(0.0, across_s - compute_s),
                "the optimizer": steps_s,
            }
            name = "ZeRO-3 or FSDP" + (", state in host memory" if offloads else "")
            yield _way(
                question, name, device, state // nodes if offloads else 0, num_microbatches * compute_s, waits
            )


def _way(
    question: Question, name: str, device: int, host: int, compute_s: float, waits: dict[str, float]
) -> Alternative:
    budgets = question.budgets
    waits_s = sum(waits.values())
    most = max(waits, key=lambda cause: waits[cause])
    return Alternative(
        name=name,
        device_bytes=device,
        host_bytes=host,
        fits=device <= budgets.device and host <= (inf if budgets.host is None else budgets.host),
        tokens_per_s=question.tokens_per_step / (compute_s + waits_s),
        compute_s=compute_s,
        waits_s=waits_s,
        waits_for=most if waits[most] else "",
    )


def _weights(question: Question) -> int:
    return sum(unit.link_bytes(question.model.dtype) for unit in question.model.units)


def _gradients(question: Question) -> int:
    return GRADIENT_BYTES * question.model.num_trainable


def _frozen(question: Question) -> int:
    """Return the bytes of weights that do not train."""
    model = question.model
    every = model.num_parameters
    return _weights(question) * (every - model.num_trainable) // every


def _compute_s(question: Question, work: Workload, again: bool) -> float:
    """Return the seconds of a microbatch's forwards and backwards on one GPU that does all of it."""
    times = unit_times(question.machine, question.model.compute_dtype, work)
    seconds = sum(times.forward_s) + sum(times.backward_s)
    return seconds if again else seconds - sum(times.recompute_s[:-1])


def _activation_bytes(work: Workload, again: bool) -> int:
    """Return what a microbatch keeps: inputs of units, or all that backwards need; and what one backward allocates."""
    activation_bytes = sum(work.boundary_bytes) if again else sum(work.saved_bytes)
    return activation_bytes + max(work.backward_workspace_bytes.values()) + work.held_bytes


def _activation_sums_s(question: Question, work: Workload, share: _Share, again: bool) -> float:
    """Return the seconds of a microbatch's sums over tensor parallel GPUs."""
    blocks = work.boundary_bytes[1:-1] or work.boundary_bytes
    sums = SUMS_AGAIN if again else SUMS
    return sums * sum(_sum_s(question, size, share.tensor) for size in blocks) / share.stages


def _sum_s(question: Question, num_bytes: float, ranks: int, apart: int = 1) -> float:
    """Return the seconds of a sum of so many bytes over so many GPUs, each so many ``apart``, at its slower links.

    Within a node they are summed first, and so cross its network once; all groups with a rank in a node share that.
    """
    inside = max(1, min(ranks, question.num_workers // apart))
    across = -(-ranks // inside)
    seconds = crossing_bytes(num_bytes, inside) / _exchange_rate(question) if inside > 1 else 0.0
    if across == 1 or question.net_bytes_per_s is None:
        return seconds
    crossing = crossing_bytes(num_bytes, across) * (question.num_workers // inside)
    return max(seconds, crossing / question.net_bytes_per_s.value)


def _exchange_rate(question: Question) -> float:
    """Return the bytes per second, in each direction, that every GPU exchanges with others while all do.

    Without a wire of their own, what one sends passes through its link and, where GPUs do not copy to each other,
    through host memory, which is written and read.
    """
    machine = question.machine
    count = len(machine.gpus)
    if count == 1:
        return inf
    pairs = count * (count - 1)
    if len(machine.peers) == pairs and all(peer.own_wire for peer in machine.peers):
        return min(peer.bytes_per_s.value for peer in machine.peers)
    rate = min(min(link.up_bytes_per_s.value, link.down_bytes_per_s.value) for link in machine.links)
    return rate if len(machine.peers) == pairs else min(rate, machine.host.bytes_per_s.value / (2 * count))
