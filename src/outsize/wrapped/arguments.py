"""What a user says to `outsize.wrap` and `outsize.load`, and the model's memory, checked before anything is moved."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from inspect import signature
from os import PathLike
from typing import Any, Literal, get_args

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from outsize.accelerators import Devices
from outsize.choices import Home, Moments
from outsize.codecs.codec_spec import FrozenCodec
from outsize.codecs.transport import Transport
from outsize.compat.torch_private import parameters_of
from outsize.config.memory_section import MemoryConfig
from outsize.config.model_section import OptimizerConfig
from outsize.errors import ConfigError, ModelError
from outsize.streamed.spec import BlockSettings, devices_of
from outsize.wrapped.at_home.at_rest import AtRest
from outsize.wrapped.at_home.home_parameter import plainly

Head = Literal["auto", "streamed", "resident"]
_WITH_HEAD: Mapping[Head, bool | None] = {"auto": None, "streamed": True, "resident": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapSettings:
    """How a model is streamed.

    Attributes:
        memory: budgets and home.
        devices: that compute.
        microbatches: most parts that a batch is cut into.
        store_dir: directory of the disk home; None for one that is gone with the process.
        codecs: how frozen matrices of blocks, and frozen tables, are written.
        head: where the head is, see `outsize.wrap`.
        transport: codecs on the link.
        moments: what `outsize.AdamW` keeps moments in.
        blocks: how blocks compute.

    Raises:
        ConfigError: a value that there is not.
    """

    memory: MemoryConfig
    devices: Devices = field(init=False)
    microbatches: int = 1
    store_dir: str | PathLike[str] | None = None
    codecs: tuple[FrozenCodec, FrozenCodec] = ("raw", "raw")
    head: Head = "auto"
    transport: Transport = field(default_factory=Transport)
    moments: Moments = "fp32"
    blocks: BlockSettings = field(default_factory=BlockSettings)

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", devices_of(self.memory))
        if self.head not in get_args(Head):
            raise ConfigError(f"head={self.head!r}: it is {' or '.join(get_args(Head))}")
        unknown = set(self.codecs) - set(get_args(FrozenCodec))
        if unknown:
            raise ConfigError(
                f"no codec {unknown.pop()!r} for frozen weights; use {', '.join(get_args(FrozenCodec))}"
            )
        if self.moments not in get_args(Moments):
            raise ConfigError(f"state={self.moments!r}: moments are kept in {', '.join(get_args(Moments))}")
        if self.microbatches < 1:
            raise ConfigError(f"microbatches is {self.microbatches}; a batch has at least one part")

    @property
    def with_head(self) -> bool | None:
        """Whether the head is a unit, see `split`; None until a forward takes its weight by itself."""
        return _WITH_HEAD[self.head]


def memory_of(
    called: Callable[..., Any],
    device: str,
    device_memory: str | int | None,
    home: Home,
    others: dict[str, Any],
) -> MemoryConfig:
    """Return the section ``memory`` that the arguments make.

    Args:
        called: `outsize.wrap` or `outsize.load`, for what errors say.
        device: see `outsize.wrap`, as for the next two.
        device_memory: see there.
        home: see there.
        others: more keys of the section.

    Raises:
        ConfigError: a key or a value that cannot be.
    """
    name = f"outsize.{called.__name__}"
    if "commits" in others:
        raise ConfigError(f"{name}: commits: it is of outsize train only; leave it out")
    unknown = next((key for key in others if key not in MemoryConfig.model_fields), None)
    if unknown is not None:
        known = [argument for argument in signature(called).parameters if argument != "memory"]
        raise ConfigError(f"{name}: {unknown}: {_unknown(unknown, known[1:])}")
    try:
        return MemoryConfig(device=device, device_memory=device_memory, home=home, **others)  # type: ignore[arg-type]
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"{name}: " + "; ".join(lines)) from error


def _unknown(key: str, others: Sequence[str]) -> str:
    """What to say about an argument that there is not."""
    if key in OptimizerConfig.model_fields:
        return (
            "it is of outsize train; a wrapped model keeps masters and gradients in fp32, and moments as state=... "
            "says; outsize.AdamW has lr, betas, eps and weight_decay"
        )
    known = sorted({*others, *MemoryConfig.model_fields} - {"commits"})
    meant = get_close_matches(key, known, n=1)
    return (
        f"no such argument; did you mean {meant[0]}?"
        if meant
        else f"no such argument; there is {', '.join(known)}"
    )


def transport_of(named: Mapping[str, str] | None) -> Transport:
    """Return the codecs on the link of a wrapped model.

    Raises:
        ConfigError: one that there is not, or that does not go with parameters which others may change.
    """
    given = dict(named or {})
    automatic = sorted(crossing for crossing, codec in given.items() if codec == "auto")
    if automatic:
        raise ConfigError(
            f"transport: {automatic[0]}: auto is chosen by the times of a run's steps, and those of a loop of your own "
            f"are not known before it; name a codec, e.g. {automatic[0]}=lossless4, or leave it out"
        )
    try:
        transport = Transport(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"transport: {error}; it names codecs of weights, activations and gradients"
        ) from error
    if transport.feedback:
        raise ConfigError(
            f"transport: {transport.gradients} makes up for what a gradient lost in the next one, and whether a loop "
            "of your own steps by every gradient is not known; use it without -ef"
        )
    return transport


# Where modules keep what is registered.
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Memory of a tensor of a model.

    Attributes:
        name: of the tensor, for messages.
        device: whose memory it is.
        elements: the memory as numpy sees it; none of it is read.
        start: its first address.
        stop: the address behind its last element.
        trains: whether steps change it.
        is_parameter: whether it is a parameter, which moves home.
    """

    name: str
    device: str
    elements: np.ndarray[Any, Any]
    start: int
    stop: int
    trains: bool
    is_parameter: bool


def check_memory(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Check that each parameter lies alone in its memory, as it will at home, and is where modules look it up.

    Returns:
        Frozen parameters that share memory, and what with: equal at home as long as nothing changes them.

    Raises:
        ModelError: one that trains shares memory, or a module holds one where it is not registered.
    """
    with plainly():
        stretches = list(_stretches_of(model))
    shared = []
    reaching: list[_Stretch] = []  # beyond where the next one begins
    in_order = sorted((each for each in stretches if each), key=lambda each: (each.device, each.start))
    for one in in_order:
        reaching = [other for other in reaching if other.device == one.device and other.stop > one.start]
        for other in reaching:
            if (one.is_parameter or other.is_parameter) and _overlap(other, one):
                shared.append(_check_pair(*sorted((other, one), key=lambda each: not each.is_parameter)))
        reaching.append(one)
    return tuple(shared)


def _stretches_of(model: nn.Module) -> Iterator[_Stretch | None]:
    """Yield the memory of all that a model holds.

    Raises:
        ModelError: a module holds a parameter where it is not registered.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        yield _stretch(name, parameter, is_parameter=True)
    for name, buffer in model.named_buffers():
        yield _stretch(f"the buffer {name}", buffer)
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in _REGISTERED or (isinstance(module, nn.RNNBase) and attribute == "_flat_weights"):
                continue
            # Made anew by a hook in each forward: `spectral_norm`.
            if f"{attribute}_orig" in parameters_of(module):
                continue
            name = f"{path}.{attribute}" if path else attribute
            for tensor in _tensors_in(value):
                if id(tensor) in names:
                    raise ModelError(
                        f"{name} holds the parameter {names[id(tensor)]} where it is not registered, and would go on "
                        "with the weights of before: look it up in its module in each forward, or hold that module"
                    )
                yield _stretch(f"the tensor {name}", tensor)


def _stretch(name: str, tensor: Tensor, *, is_parameter: bool = False) -> _Stretch | None:
    """Return the memory of a tensor, None where it has none of its own.

    Raises:
        ModelError: it trains, and several of its elements are one.
    """
    if isinstance(tensor, AtRest) or tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return None
    start, size = tensor.data_ptr(), tensor.element_size()
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    trains = is_parameter and tensor.requires_grad
    if trains and last + 1 < tensor.numel():
        raise ModelError(
            f"{name} trains, and several of its elements are one (expand): torch cannot step it either; give each "
            "memory of its own, parameter.data = parameter.data.contiguous()"
        )
    form = {"shape": tuple(tensor.shape), "strides": tuple(size * stride for stride in tensor.stride())}
    memory = {"data": (start, False), "typestr": f"|V{size}", "version": 3, **form}
    elements = np.asarray(type("Memory", (), {"__array_interface__": memory}))
    stop = start + (last + 1) * size
    return _Stretch(name, str(tensor.device), elements, start, stop, trains, is_parameter) if start else None


def _tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors that a value holds, also in containers of Python's."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, dict | list | tuple | set):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(inner, depth - 1)


def _overlap(one: _Stretch, other: _Stretch) -> bool:
    try:
        return np.shares_memory(one.elements, other.elements, max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _check_pair(parameter: _Stretch, other: _Stretch) -> tuple[str, str]:
    """Return the names of a parameter and of what lies in its memory.

    Raises:
        ModelError: either trains.
    """
    if not (parameter.trains or other.trains):
        return parameter.name, other.name
    trained = parameter.name if parameter.trains else other.name
    raise ModelError(
        f"{parameter.name} and {other.name} lie in one memory, and {trained} trains: outsize moves each parameter, and "
        "they would be two from then on. Make them one parameter (b.weight = a.weight), or give each memory of its own "
        "(b.weight = torch.nn.Parameter(a.weight.detach().clone())), before outsize.wrap"
    )
