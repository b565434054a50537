"""Parse a change of machine or settings (``vram=+8GB``, ``link=x2``, ``gpus=+1``), and apply it to a question."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, TypeVar, cast, get_args

from outsize.choices import Masters, Moments
from outsize.codecs.transport import Transport
from outsize.errors import ConfigError
from outsize.hardware.machine_spec import HOST_SHARE, Disk, Figure, Host, Link, Machine, Peer
from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.memory.memory_table import Tier
from outsize.planner.predict.question import Question
from outsize.units import parse_bytes

Change = Callable[[Question], Question]
_Part = TypeVar("_Part", Link, Peer, Host, Disk)


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
    example, change_by = CHANGES[name]
    try:
        return change_by(amount)
    except ValueError as error:
        raise ConfigError(f"what-if {text!r}: {example}") from error


def _with_codec(name: str) -> Change:
    """The weights go over the link as codec ``name`` writes them."""
    transport = Transport(weights=name)
    return lambda question: question.deciding(transport=transport)


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


def _with_mlp_parts(amount: str) -> Change:
    num_parts = int(amount)
    if num_parts < 2:
        raise ValueError(amount)

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


def _scaled(part: _Part, factor: float, *names: str) -> _Part:
    """Return a part of a machine with some of its rates times ``factor``."""
    changed: dict[str, Any] = {name: _times(getattr(part, name), factor) for name in names}
    return replace(part, **changed)


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
    links = tuple(_scaled(link, factor, "up_bytes_per_s", "down_bytes_per_s") for link in machine.links)
    uplinks = {name: _times(figure, factor) for name, figure in machine.uplinks.items()}
    peers = tuple(p if p.own_wire else _scaled(p, factor, "bytes_per_s") for p in machine.peers)
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
    host = _scaled(question.machine.host, factor, "bytes_per_s", "adamw_params_per_s")
    return replace(question, machine=replace(question.machine, host=host))


def _disk(question: Question, factor: float) -> Question:
    machine: Machine = question.machine
    if machine.disk is None:
        raise ConfigError(f"what-if disk: {machine.name} has no disk")
    disk = _scaled(machine.disk, factor, "read_bytes_per_s", "write_bytes_per_s")
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


# How an amount is written, and how it is read.
_MORE = "write how much more, for example +8GB", lambda text: _size(_after("+", text))
_COUNT = "write how many more, for example +1", lambda text: int(_after("+", text))
_TIMES = "write how many times as fast, for example x2", lambda text: float(_after("x", text))


def _by(
    example: str, read: Callable[[str], float], apply: Callable[[Question, float], Question]
) -> tuple[str, Callable[[str], Change]]:
    """Return the row of what ``apply`` changes by an amount."""

    def change_by(text: str) -> Change:
        amount = read(text)
        return lambda question: apply(question, amount)

    return example, change_by


# What can change: how its amount is written, and what makes a change of that.
CHANGES: Mapping[str, tuple[str, Callable[[str], Change]]] = {
    "vram": _by(*_MORE, _vram),
    "ram": _by(*_MORE, _ram),
    "gpus": _by(*_COUNT, _gpus),
    "compute": _by(*_TIMES, _compute),
    "link": _by(*_TIMES, _link),
    "bandwidth": _by(*_TIMES, _bandwidth),
    "disk": _by(*_TIMES, _disk),
    "weights": ("write a codec that keeps every bit: lossless4 or lossless3", _with_codec),
    "state": ("write what moments are kept in: fp32, bf16 or int8", _with_state),
    "mlp_parts": ("write how many parts, at least 2", _with_mlp_parts),
    "home": ("write where it rests: host or disk", _with_home),
    "net": _by(*_TIMES, _net),
    "nodes": _by(*_COUNT, _nodes),
}
