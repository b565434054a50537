"""Another machine to ask about: one change, such as ``vram=+8GB``, ``link=x2`` or ``gpus=+1``, and what it gains."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import cast, get_args

from outsize.codecs.codec_spec import LOSSLESS4
from outsize.codecs.transport import Transport
from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.hardware.machine_spec import Figure, Machine
from outsize.optim.optimizer_spec import Masters, Moments, StateLayout
from outsize.planner.memory.memory_table import Tier
from outsize.planner.predict.decision import clocked_s
from outsize.planner.predict.feasibility import missing_host_bytes
from outsize.planner.predict.prediction import (
    COMPUTE,
    FULL_SHARE,
    LINK_UP,
    Prediction,
    fastest,
    predict_again,
)
from outsize.planner.predict.question import Question
from outsize.units import parse_bytes

_MORE = ("vram", "ram", "gpus")
_RATES = ("compute", "link", "bandwidth", "disk", "net")
# Changes that no estimate knows.
_SIMULATED = ("net", "nodes", "weights", "home")
# Changes that leave neither microbatches nor stages as they are; where there is time, these neither.
_SEARCHED, _SEARCHED_AT_LENGTH = ("gpus", "state", "home"), ("vram", "mlp_parts")
COPIES = ("link to the GPU", "link from the GPU", "host memory")
OPTIMIZER, OPTIMIZER_WAIT = "optimizer on the host", "the optimizer on the host"
# What gains less is no advice.
LEAST_GAIN = 0.01
# From here on what a block needs at once is so much of the device that MLPs in parts are asked about.
LARGE_WORKSPACE = 0.25
Change = Callable[[Question], Question]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a change would bring.

    Attributes:
        change: as it was written.
        prediction: with it; None where nothing fits.
        gain: tokens per second over those without it, less one; None where either does not fit.
        error: why there is none; empty where there is one.
        estimated: whether the step was not simulated; see `estimated_outcome`.
    """

    change: str
    prediction: Prediction | None
    gain: float | None
    error: str = ""
    estimated: bool = False


def estimated_outcome(question: Question, base: Prediction, text: str) -> Outcome:
    """Return about what the change ``text`` would bring over ``base``, in a fraction of the time of `outcome`.

    For several GPUs. The partitioner's own clock times the stages of both machines, and stages for more memory or more
    GPUs are searched for a moment. What the simulated step of ``base`` takes beyond that is waiting for the optimizer,
    and copies that share what they go through; both become as much shorter as what they wait for becomes faster. What
    else than compute ends the step is in use for no more of it than is usual. Changes rank nearly as in simulations.

    Raises:
        ConfigError: not a change.
    """
    change = parse_change(text)
    name = text.partition("=")[0].strip()
    if name in _SIMULATED:
        return outcome(question, base, text)
    changed = change(question)
    same = None if name in ("vram", "gpus", "mlp_parts") else base.stages
    microbatches = base.microbatches
    try:
        before_s = clocked_s(question.deciding(stages=base.stages), microbatches, base.home)
        after_s = min(before_s, clocked_s(changed.deciding(stages=same), microbatches, base.home))
    except (InfeasiblePlanError, ConfigError) as error:
        return Outcome(change=text, prediction=None, gain=None, error=str(error))
    faster = _shares(question, changed)
    more_s = max(0.0, base.step_s - before_s)
    waits_s = min(more_s, base.stalls.get(OPTIMIZER_WAIT, 0.0) * base.step_s)
    copies_s = more_s - waits_s  # what links and host memory that are shared add
    weights = {kind: base.usage.get(kind, 0.0) for kind in COPIES}
    copies_s *= sum(weights[kind] * faster[kind] for kind in COPIES) / (sum(weights.values()) or 1.0)
    step_s = after_s + waits_s * faster[OPTIMIZER] + copies_s
    used_s = {kind: share * base.step_s * faster.get(kind, 1.0) for kind, share in base.usage.items()}
    limits = {kind: 1.0 if kind == COMPUTE else max(FULL_SHARE, share) for kind, share in base.usage.items()}
    step_s = min(base.step_s, max(step_s, *(used / limits[kind] for kind, used in used_s.items())))
    usage = sorted(((kind, used / step_s) for kind, used in used_s.items()), key=lambda item: -item[1])
    tokens_per_s = question.tokens_per_step / step_s
    found = replace(base, step_s=step_s, tokens_per_s=tokens_per_s, usage=dict(usage))
    return Outcome(change=text, prediction=found, gain=base.step_s / step_s - 1, estimated=True)


def _shares(before: Question, after: Question) -> dict[str, float]:
    """Return what of its time each resource takes on the changed machine, by its name in `Prediction.usage`."""
    old, new, dtype = before.machine, after.machine, before.model.compute_dtype
    links = [
        (link.up_bytes_per_s.value, link.down_bytes_per_s.value) for link in (old.links[0], new.links[0])
    ]
    gpus = len(old.gpus) / len(new.gpus)
    disks = {}
    if old.disk is not None and new.disk is not None:
        disks["disk read"] = old.disk.read_bytes_per_s.value / new.disk.read_bytes_per_s.value
        disks["disk write"] = old.disk.write_bytes_per_s.value / new.disk.write_bytes_per_s.value
    return {
        **disks,
        COMPUTE: gpus * old.gpus[0].flops_per_s(dtype) / new.gpus[0].flops_per_s(dtype),
        "link to the GPU": gpus * links[0][0] / links[1][0],
        "link from the GPU": gpus * links[0][1] / links[1][1],
        "host memory": old.host.bytes_per_s.value / new.host.bytes_per_s.value,
        OPTIMIZER: old.host.adamw_params_per_s.value / new.host.adamw_params_per_s.value,
    }


def outcome(question: Question, base: Prediction | None, text: str, *, near: bool = False) -> Outcome:
    """Return what the change ``text`` would bring over ``base``.

    Where only a rate changes, microbatches, stages and home stay, and so do microbatches and stages with more host
    memory for several GPUs, whose home is there already. More memory otherwise, more GPUs and another home are
    searched anew. ``near`` takes a fraction of the time, and may find less: where GPUs, home and bytes per parameter
    stay, microbatches and stages do, where a rate changes perhaps the whole plan; and plans are compared unsimulated.

    Raises:
        ConfigError: not a change.
    """
    change = parse_change(text)
    try:
        changed = change(question)
    except (
        ConfigError
    ) as error:  # a change that is none of this model and machine; others are, and the plan is
        return Outcome(change=text, prediction=None, gain=None, error=str(error))
    name = text.partition("=")[0].strip()
    stays = name not in _SEARCHED and (near or name not in _SEARCHED_AT_LENGTH)
    if base is not None and name == "ram" and not near:
        stays = len(changed.machine.gpus) > 1 and base.home == "host"
    if base is not None and name in _RATES:
        changed = replace(changed, home=base.home)
    if base is not None and stays:
        changed = replace(changed, microbatches=base.microbatches).deciding(stages=base.stages)
    try:
        if base is not None and near and name in _RATES:
            prediction = predict_again(base, changed, may_gain=_plan_may_gain(question, changed, base))
        else:
            prediction = fastest(replace(changed, brief=near))
    except (InfeasiblePlanError, ConfigError) as error:
        return Outcome(change=text, prediction=None, gain=None, error=str(error))
    if base is not None and name in _MORE and prediction.step_s > base.step_s:
        prediction = base  # what fitted before still does, and a GPU may stay idle
    gain = None if base is None else prediction.tokens_per_s / base.tokens_per_s - 1
    return Outcome(change=text, prediction=prediction, gain=gain)


def _plan_may_gain(question: Question, changed: Question, base: Prediction) -> bool:
    """Return whether the plan of ``base`` could gain `LEAST_GAIN`: not where what is no faster is in use throughout."""
    faster = _shares(question, changed)
    least = max(share * faster.get(kind, 1.0) for kind, share in base.usage.items())
    return least * (1 + LEAST_GAIN) < 1


def usual_changes(question: Question, base: Prediction) -> tuple[str, ...]:
    """Return the changes that people ask about first: more of each thing that a plan runs on.

    Where the home is on disk for want of host memory, that memory is as much as brings it there. Where the link to a
    GPU ends a step, weights that go over it in fewer bytes are asked about, too, unless they do already. So is an
    optimizer state of 8 bits, where the home is on disk for want of host memory and not all but adapters is frozen; but
    for nodes its gradients pass through a ring. And so are MLPs that take their tokens in parts, where what a block
    needs at once is a quarter of the device. And so is a home on disk, where nobody has said where it rests, and host
    memory has room for so few inputs beside it that several GPUs wait for each other.
    """
    on_disk = base.home == "disk"
    missing = missing_host_bytes(question, base.microbatches) if on_disk else 0
    ram = f"ram=+{-(-missing // 2**30)}GiB" if missing else "ram=+64GB"
    disk = ("disk=x2",) if on_disk else ()
    nodes = ("net=x2", "nodes=+1") if question.nodes > 1 else ()
    options = question.options
    encodes = base.home == "host" and options.transport.is_raw("weights")
    codec = (f"weights={LOSSLESS4.name}",) if encodes and base.binding == LINK_UP else ()
    rounds = options.state is None or options.state.num_moments > 0
    short = on_disk and base.num_gpus == 1 and question.home != "disk"
    short &= (
        2 * question.model.num_trainable > question.model.num_parameters
    )  # of adapters the state is small
    state = ("state=int8",) if short and rounds else ()
    large = base.memory["device"].get("workspace", 0) > LARGE_WORKSPACE * question.budgets.device
    parts = ("mlp_parts=4",) if large and question.in_mlp_parts is not None else ()
    crowded = base.round_microbatches < min(base.num_gpus, base.microbatches)
    crowded &= base.home == "host" and question.home == "auto" and options.round_microbatches is None
    home = ("home=disk",) if crowded and question.machine.disk is not None else ()
    return (
        "vram=+8GB",
        *parts,
        ram,
        *state,
        "link=x2",
        *codec,
        "bandwidth=x2",
        *disk,
        "compute=x2",
        "gpus=+1",
        *nodes,
        *home,
    )


def parse_change(text: str) -> Change:
    """Return the change that ``text`` describes.

    Raises:
        ConfigError: an unknown thing (suggests the nearest), or not an amount that suits it.
    """
    name, equals, amount = (part.strip() for part in text.partition("="))
    if not equals or name not in CHANGES:
        near = get_close_matches(name, CHANGES, n=1)
        hint = f"did you mean {near[0]}?" if near else "write for example vram=+8GB, link=x2 or gpus=+1"
        raise ConfigError(f"unknown what-if {text!r}; {hint} There are {', '.join(CHANGES)}")
    how, apply = CHANGES[name]
    try:
        if how == "more":
            return _bound(apply, parse_bytes(_after("+", amount)))
        if how == "codec":
            return _with_codec(amount)
        if how == "state":
            return _with_state(amount)
        if how == "tier":
            return _with_home(amount)
        if how == "parts":
            return _with_mlp_parts(int(amount))
        if how == "count":
            return _bound(apply, int(_after("+", amount)))
        return _bound(apply, float(_after("x", amount)))
    except ValueError as error:
        raise ConfigError(f"what-if {text!r}: {EXAMPLES[how]}") from error


def _with_codec(name: str) -> Change:
    """The weights go over the link as codec ``name`` writes them."""
    transport = Transport(weights=name)

    def change(question: Question) -> Question:
        return question.deciding(transport=transport)

    return change


def _with_state(name: str) -> Change:
    """Moments are kept in ``name``, masters of bf16 weights are split, and gradients pass through a ring.

    Those of fp16 wait, since a step that overflows is skipped, and those of nodes, which clip by the norm of all.
    """
    if name not in get_args(Moments):
        raise ValueError(name)

    def change(question: Question) -> Question:
        if len(question.machine.gpus) > 1:
            raise ConfigError("what-if state: priced for one GPU only; leave it out, or ask about one")
        options = question.options
        former = options.state or StateLayout(dtype=question.model.dtype)
        if not former.num_moments:
            raise ConfigError("what-if state: this optimizer keeps no moments that could be rounded")
        unsplit = former.dtype == "bf16" and not former.splits
        masters: Masters = "split" if unsplit else former.masters
        state = replace(former, moments=cast(Moments, name), masters=masters)
        if question.model.compute_dtype == "fp16" or question.nodes > 1:
            return question.deciding(state=state)
        return question.deciding(state=state, clip=False, unit_clip=options.clip or options.unit_clip)

    return change


def _with_home(tier: str) -> Change:
    """Weights and optimizer state rest there."""
    if tier not in get_args(Tier):
        raise ValueError(tier)
    return lambda question: replace(question, home=cast(Tier, tier))


def _with_mlp_parts(num_parts: int) -> Change:
    """MLPs take the tokens of a microbatch in so many parts."""
    if num_parts < 2:
        raise ValueError(num_parts)

    def change(question: Question) -> Question:
        if question.in_mlp_parts is None:
            raise ConfigError(
                "what-if mlp_parts: of models whose MLPs are whole, and can take their tokens in parts; leave it out"
            )
        return replace(question, workload_of=question.in_mlp_parts(num_parts), in_mlp_parts=None)

    return change


def _after(sign: str, amount: str) -> str:
    match = re.fullmatch(rf"\{sign}\s*([0-9.]+\s*[a-zA-Z]*)" if sign == "+" else r"[xX]\s*([0-9.]+)", amount)
    if match is None or not float(re.sub(r"[^0-9.]", "", match[1])):
        raise ValueError(amount)
    return match[1]


def _bound(apply: Callable[[Question, float], Question], amount: float) -> Change:
    return lambda question: apply(question, amount)


def _vram(question: Question, num_bytes: float) -> Question:
    gpus = tuple(
        replace(gpu, memory_bytes=gpu.memory_bytes + int(num_bytes)) for gpu in question.machine.gpus
    )
    budgets = replace(question.budgets, device=question.budgets.device + int(num_bytes))
    return replace(question, machine=replace(question.machine, gpus=gpus), budgets=budgets)


def _ram(question: Question, num_bytes: float) -> Question:
    host = replace(question.machine.host, memory_bytes=question.machine.host.memory_bytes + int(num_bytes))
    old = question.budgets.host
    budgets = replace(question.budgets, host=None if old is None else old + int(num_bytes))
    return replace(question, machine=replace(question.machine, host=host), budgets=budgets)


def _gpus(question: Question, count: float) -> Question:
    return replace(question, machine=question.machine.with_more_gpus(int(count)))


def _link(question: Question, factor: float) -> Question:
    machine = question.machine
    links = tuple(
        replace(
            link,
            up_bytes_per_s=_times(link.up_bytes_per_s, factor),
            down_bytes_per_s=_times(link.down_bytes_per_s, factor),
        )
        for link in machine.links
    )
    uplinks = {name: _times(figure, factor) for name, figure in machine.uplinks.items()}
    peers = tuple(
        peer if peer.own_wire else replace(peer, bytes_per_s=_times(peer.bytes_per_s, factor))
        for peer in machine.peers
    )
    return replace(question, machine=replace(machine, links=links, uplinks=uplinks, peers=peers))


def _compute(question: Question, factor: float) -> Question:
    gpus = tuple(
        replace(
            gpu,
            peak_flops_per_s={name: _times(peak, factor) for name, peak in gpu.peak_flops_per_s.items()},
        )
        for gpu in question.machine.gpus
    )
    return replace(question, machine=replace(question.machine, gpus=gpus))


def _bandwidth(question: Question, factor: float) -> Question:
    """Host memory bandwidth, and with it the optimizer, which it bounds."""
    host = question.machine.host
    host = replace(
        host,
        bytes_per_s=_times(host.bytes_per_s, factor),
        adamw_params_per_s=_times(host.adamw_params_per_s, factor),
    )
    return replace(question, machine=replace(question.machine, host=host))


def _disk(question: Question, factor: float) -> Question:
    machine: Machine = question.machine
    if machine.disk is None:
        raise ConfigError(f"what-if disk: {machine.name} has no disk")
    disk = replace(
        machine.disk,
        read_bytes_per_s=_times(machine.disk.read_bytes_per_s, factor),
        write_bytes_per_s=_times(machine.disk.write_bytes_per_s, factor),
    )
    return replace(question, machine=replace(machine, disk=disk))


def _net(question: Question, factor: float) -> Question:
    if question.net_bytes_per_s is None:
        raise ConfigError("what-if net: there is one node")
    return replace(question, net_bytes_per_s=_times(question.net_bytes_per_s, factor))


def _nodes(question: Question, count: float) -> Question:
    """More nodes, each with as many sequences as one has now."""
    if question.net_bytes_per_s is None:
        raise ConfigError("what-if nodes: say how they are connected, with --nodes and --net")
    return question.deciding(nodes=question.nodes + int(count))


def _times(figure: Figure, factor: float) -> Figure:
    return Figure(value=figure.value * factor, source=f"what if: x{factor:g} of {figure.source}")


EXAMPLES = {
    "more": "write how much more, for example +8GB",
    "count": "write how many more, for example +1",
    "times": "write how many times as fast, for example x2",
    "codec": "write a codec that keeps every bit: lossless4 or lossless3",
    "state": "write what moments are kept in: fp32, bf16 or int8",
    "parts": "write how many parts, at least 2",
    "tier": "write where it rests: host or disk",
}
# What can change: how its amount is written, and what it does.
CHANGES: Mapping[str, tuple[str, Callable[[Question, float], Question]]] = {
    "vram": ("more", _vram),
    "ram": ("more", _ram),
    "gpus": ("count", _gpus),
    "compute": ("times", _compute),
    "link": ("times", _link),
    "bandwidth": ("times", _bandwidth),
    "disk": ("times", _disk),
    "weights": ("codec", lambda question, _: question),
    "state": ("state", lambda question, _: question),
    "mlp_parts": ("parts", lambda question, _: question),
    "home": ("tier", lambda question, _: question),
    "net": ("times", _net),
    "nodes": ("count", _nodes),
}
