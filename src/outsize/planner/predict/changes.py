"""Parse a change of machine or settings (``vram=+8GB``, ``link=x2``, ``gpus=+1``), and apply it to a question."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import cast, get_args

from outsize.choices import Masters, Moments
from outsize.codecs.transport import Transport
from outsize.errors import ConfigError
from outsize.hardware.machine_spec import HOST_SHARE, Figure, Machine
from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.memory.memory_table import Tier
from outsize.planner.predict.question import Question
from outsize.units import parse_bytes

Change = Callable[[Question], Question]


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
            return _bound(apply, _size(_after("+", amount)))
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

    Those of fp16 wait, since a step that overflows is skipped, and so do those of nodes, which clip by the norm of all,
    and of several GPUs, which sum in host memory.
    """
    if name not in get_args(Moments):
        raise ValueError(name)

    def change(question: Question) -> Question:
        options = question.options
        layout = options.state or StateLayout(dtype=question.model.dtype)
        if not layout.num_moments:
            raise ConfigError("what-if state: this optimizer keeps no moments that could be rounded")
        unsplit = layout.dtype == "bf16" and not layout.splits
        masters: Masters = "split" if unsplit else layout.masters
        state = replace(layout, moments=cast(Moments, name), masters=masters)
        if question.model.compute_dtype == "fp16" or question.nodes > 1 or question.num_workers > 1:
            return question.deciding(state=state)
        return question.deciding(state=state, clip=False, unit_clip=options.clip or options.unit_clip)

    return change


def _with_home(tier: str) -> Change:
    """Weights and optimizer state rest there."""
    if tier not in get_args(Tier):
        raise ValueError(tier)
    return lambda question: replace(question, home=cast(Tier, tier))


def _with_mlp_parts(num_parts: int) -> Change:
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


def _size(text: str) -> int:
    """Return the bytes of ``text``, which names its unit."""
    if re.fullmatch(r"[0-9.]+", text):
        raise ValueError(f"{text} without a unit")
    return parse_bytes(text)


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
    more = int(HOST_SHARE * num_bytes)  # of what is bought, as of what is there
    budgets = replace(question.budgets, host=None if old is None else old + more)
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
            products_per_s=gpu.products_per_s and _times(gpu.products_per_s, factor),
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
