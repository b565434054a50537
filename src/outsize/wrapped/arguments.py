"""What a user says to `outsize.wrap` and `outsize.load`, checked before anything is moved."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError
from torch import nn

from outsize.accelerators import Devices
from outsize.choices import Home, Moments
from outsize.codecs.codec_spec import FrozenCodec
from outsize.codecs.transport import Transport
from outsize.config import Config, Surroundings
from outsize.config.memory_section import MemoryConfig
from outsize.config.model_section import OptimizerConfig
from outsize.errors import ConfigError
from outsize.group.gloo import launched
from outsize.streamed.spec import BlockSettings, devices_of

_log = logging.getLogger(__name__)

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


def store_dir_of(store_dir: str | PathLike[str] | None) -> str | PathLike[str] | None:
    """Return the directory of a disk home; it may be absent, to be made and taken away, but not what it lies in.

    Raises:
        ConfigError: that is no directory.
    """
    parent = None if store_dir is None else Path(store_dir).absolute().parent
    if parent is not None and not parent.is_dir():
        raise ConfigError(
            f"store_dir={str(store_dir)!r}: there is no directory {parent}; make it, or name another"
        )
    return store_dir


def memory_of(
    called: Callable[..., Any],
    device: str,
    device_memory: str | int | None,
    home: Home,
    others: dict[str, Any],
    store_dir: str | PathLike[str] | None = None,
) -> MemoryConfig:
    """Return the section ``memory`` that the arguments make.

    Args:
        called: `outsize.wrap` or `outsize.load`, for what errors say.
        device: see `outsize.wrap`, as for the next two.
        device_memory: see there.
        home: see there.
        others: more keys of the section.
        store_dir: see there.

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
        section = MemoryConfig(device=device, device_memory=device_memory, home=home, **others)  # type: ignore[arg-type]
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"{name}: " + "; ".join(lines)) from error
    run = Config.model_validate({"model": {"path": name}, "data": {"path": name}})
    given = section.model_copy(update={"store_dir": store_dir})
    for note in run.model_copy(update={"memory": given}).notes(Surroundings(by_trainer=True)):
        if note.startswith("memory."):
            _log.warning("%s: %s", name, note.removeprefix("memory."))
    return section


# What from_pretrained calls them.
_PLAIN = {"quantization_config": "base_codec", "load_in_4bit": "base_codec", "load_in_8bit": "base_codec"}
_PLAIN |= {"torch_dtype": "dtype", "attn_implementation": "attention", "device_map": "device"}


def _unknown(key: str, others: Sequence[str]) -> str:
    if key in OptimizerConfig.model_fields:
        return (
            "it is of outsize train; a wrapped model keeps masters and gradients in fp32, and moments as state=... "
            "says; outsize.AdamW has lr, betas, eps and weight_decay"
        )
    known = sorted({*others, *MemoryConfig.model_fields} - {"commits"})
    plain = _PLAIN.get(key)
    meant = [plain] if plain in known else get_close_matches(key, known, n=1)
    return "no such argument; " + (f"did you mean {meant[0]}?" if meant else f"there is {', '.join(known)}")


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
    return transport


def check_one_process(model: nn.Module) -> None:
    """Check that no process beside this one trains a copy of the same model.

    Raises:
        ConfigError: it trains, and this is one of several.
    """
    place = launched() if any(parameter.requires_grad for parameter in model.parameters()) else None
    if place is not None and place.size > 1:
        raise ConfigError(
            f"this is one of {place.size} processes, and a wrapped model sums no gradients with those of others: start "
            "the script without torchrun (device='cuda:all' uses all GPUs), or share steps by outsize train "
            "(docs/nodes.md); to infer only, model.requires_grad_(False) first"
        )
