"""Measure the device memory that a forward takes beside weights, and place keys and values of a generation."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outsize.compat import torch_private
from outsize.runtime.device.device import Device
from outsize.runtime.trial.live_bytes import LiveBytes
from outsize.storage.ledger import Arena

# What kernels take inside themselves, as a share of the tensors they make (train.prepare uses the same).
KERNEL_SHARE = {"fp32": 0.125, "bf16": 0.375, "fp16": 0.375}
# Logits as the head gives them, in fp32, and once more while a token is chosen.
OUTPUT_COPIES = 3


@dataclass(frozen=True, slots=True)
class ForwardExtent:
    """The size of a forward: rows, and the length of a row."""

    rows: int
    length: int

    def covers(self, other: "ForwardExtent") -> bool:
        """Whether memory planned for this extent also holds ``other``."""
        return self.rows >= other.rows and self.length >= other.length


@dataclass(frozen=True, slots=True)
class Growth:
    """How far a generation goes on.

    Attributes:
        rows: texts at once, each beam one.
        length: tokens of the longest, prompt and new ones.
        num_new: of them, at most so many are new.
    """

    rows: int
    length: int
    num_new: int


class Workspace:
    """The most bytes that a unit needs while it computes, known for the largest forward so far."""

    def __init__(self, dtype: str) -> None:
        self._share = KERNEL_SHARE[dtype]
        self._largest: ForwardExtent | None = None
        self._known_bytes = 0
        self._measuring: ForwardExtent | None = None
        self._bytes = 0

    @property
    def known_bytes(self) -> int:
        """What the largest forward so far took; 0 before the first."""
        return self._known_bytes

    @property
    def measured_bytes(self) -> int:
        """What the forward that runs took so far, where it is larger than any before; else 0."""
        return 0 if self._measuring is None else self._bytes

    def begin(self, extent: ForwardExtent) -> bool:
        """A forward of that size begins; returns whether it is larger than any before, and measured therefore."""
        self._measuring = None if self._largest is not None and self._largest.covers(extent) else extent
        self._bytes = 0
        return self._measuring is not None

    def expected_bytes(self, extent: ForwardExtent) -> int:
        """What a forward of that size will take, as far as smaller ones tell; attention may grow with the square."""
        if self._largest is None or self._largest.covers(extent):
            return self._known_bytes
        rows = max(extent.rows / self._largest.rows, 1.0)
        length = max(extent.length / self._largest.length, 1.0)
        return int(self._known_bytes * rows * length**2)

    def run(self, real: Callable[..., Any], args: Any, kwargs: Any, weights: Tensor, last: bool) -> Any:
        """Call a unit, measured if this forward is."""
        if self._measuring is None:
            return real(*args, **kwargs)
        inputs = sum(x.nbytes for x in torch_private.leaves_of((args, kwargs)) if isinstance(x, Tensor))
        live = LiveBytes(weights.untyped_storage())
        try:
            with live:
                output = real(*args, **kwargs)
        finally:
            live.forget()
        most = inputs + live.peak
        if last:
            output_bytes = sum(x.nbytes for x in torch_private.leaves_of(output) if isinstance(x, Tensor))
            most = max(most, inputs + OUTPUT_COPIES * output_bytes)
        self._bytes = max(self._bytes, int(most * (1 + self._share)))
        return output

    def end(self) -> None:
        """The forward has come to its last unit: what was measured counts from here on."""
        if self._measuring is None:
            return
        largest = self._largest or self._measuring
        self._largest = ForwardExtent(
            max(largest.rows, self._measuring.rows), max(largest.length, self._measuring.length)
        )
        self._known_bytes = max(self._known_bytes, self._bytes)
        self._measuring = None


def extent_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardExtent:
    """The size of a forward, by what its first unit is called with: ids [B, S] or vectors [B, S, d]."""
    for leaf in torch_private.leaves_of((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim():
            return ForwardExtent(len(leaf), leaf.shape[1] if leaf.dim() > 1 else 1)
    return ForwardExtent(1, 1)


def bytes_held(calls: Iterable[Any]) -> int:
    """Bytes of the tensors that forwards have paused with, each memory once."""
    leaves = (leaf for call in calls for leaf in torch_private.leaves_of((call.args, call.kwargs)))
    memories = (leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor))
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())


def no_grad_parameter(tensor: Tensor) -> torch.nn.Parameter:
    """A parameter for a forward alone, an ordinary tensor even where the caller is in inference mode."""
    with ordinary():
        return torch.nn.Parameter(tensor, requires_grad=False)


@contextlib.contextmanager
def ordinary() -> Iterator[None]:
    """What is made in here outlives the caller's inference mode, whose own tensors may not be written outside of it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


# Tokens that a host copy has room to grow by before it is made anew.
GROWTH = 256
# What a layer of transformers' DynamicCache appends to; a window that slides, or a state, is replaced as a whole.
GROWING = frozenset({"keys", "values"})


def find_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the cache that a unit is called with, or None."""
    from transformers.cache_utils import Cache, EncoderDecoderCache

    for value in torch_private.leaves_of((args, kwargs)):
        if isinstance(value, Cache | EncoderDecoderCache):
            return value
    return None


def layers_of(cache: Any) -> Iterator[Any]:
    """The layers of a cache; of one for encoder and decoder, both its caches'."""
    for part in (
        getattr(cache, "self_attention_cache", cache),
        getattr(cache, "cross_attention_cache", None),
    ):
        yield from getattr(part, "layers", ())


def cache_bytes(cache: Any, hosted: bool = False) -> int:
    """Bytes that a cache holds: whole storages, since a sliding window is a view of more; if hosted, those in use."""
    if hosted:
        return sum(tensor.nbytes for layer in layers_of(cache) for _, tensor in _tensors(layer))
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for layer in layers_of(cache)
        for value in vars(layer).values()
        if isinstance(value, Tensor)
    }
    return sum(storages.values())


def grown_bytes(cache: Any, rows: int, length: int) -> int:
    """Bytes that a cache will hold of ``rows`` of ``length`` tokens; windows that are full and states do not grow."""
    parts = getattr(cache, "self_attention_cache", cache), getattr(cache, "cross_attention_cache", None)
    total = sum(tensor.nbytes for layer in getattr(parts[1], "layers", ()) for _, tensor in _tensors(layer))
    for layer in getattr(parts[0], "layers", ()):
        most = getattr(layer, "get_max_length", lambda: -1)()
        for name, tensor in _tensors(layer):
            num_bytes = tensor.nbytes
            if name in GROWING and tensor.dim() >= 2:
                num_bytes = num_bytes * max(rows, len(tensor)) // len(tensor)
                now = tensor.shape[-2]
                num_bytes = num_bytes // now * max(now, length if most <= 0 else min(length, most))
            total += num_bytes
    return total


class HostedCache:
    """A cache whose layers rest in host memory; each comes up for the unit that uses it, and its news go down after it.

    The host copy is written in place, with room to grow, so that of a layer that appends only the new tokens go down.

    Args:
        device: computes.
        modules: the units.
        arena: its own, where host copies come from; goes with the cache, whose memory is its caller's to keep.

    Attributes:
        bytes_moved: both ways, so far.
    """

    def __init__(self, device: Device, modules: Sequence[nn.Module], arena: Arena) -> None:
        self._device, self._arena = device, arena
        self._layers_of = [_numbers(unit) for unit in modules]
        self._room: dict[tuple[int, str], Tensor] = {}
        self._shown: dict[tuple[int, str], Tensor] = {}
        self.bytes_moved = 0

    @contextlib.contextmanager
    def up(self, cache: Any, unit: int) -> Iterator[None]:
        """Have the layers that ``unit`` uses on the device, and down again afterwards."""
        layers = list(layers_of(cache))
        used = [(index, layers[index]) for index in self._layers_of[unit] if index < len(layers)]
        for index, layer in used:
            for name, tensor in _tensors(layer):
                if tensor is not self._shown.get((index, name)):  # beams were put into another order, say
                    self._shown.pop((index, name), None)
                above = torch.empty_like(tensor, device=self._device.torch_device)
                self._device.copy(above, tensor)
                self.bytes_moved += tensor.nbytes
                setattr(layer, name, above)
        try:
            yield
        finally:
            for index, layer in used:
                for name, tensor in _tensors(layer):
                    setattr(layer, name, self._down((index, name), tensor))

    def _down(self, key: tuple[int, str], tensor: Tensor) -> Tensor:
        """Return the host copy of ``tensor``; what it begins with is there already where it has grown at its end."""
        shown, room = self._shown.get(key), self._room.get(key)
        start = 0
        appended = (
            shown is not None
            and room is not None
            and tensor.dim() == shown.dim() >= 2
            and tensor.shape[:-2] == shown.shape[:-2]
            and tensor.shape[-1] == shown.shape[-1]
            and shown.shape[-2] < tensor.shape[-2] <= room.shape[-2]
            and key[1] in GROWING
        )
        if appended and shown is not None:
            start = shown.shape[-2]
        elif tensor.dim() >= 2:
            shape = (*tensor.shape[:-2], tensor.shape[-2] + GROWTH, tensor.shape[-1])
            memory = self._arena.take(math.prod(shape) * tensor.itemsize, "keys and values")
            self._room[key] = memory.view(tensor.dtype).view(shape)
        else:
            return tensor.cpu()
        below = self._room[key][..., : tensor.shape[-2], :]
        news, place = tensor[..., start:, :], below[..., start:, :]
        with self._device.link(news.nbytes):
            place.copy_(news)
        self.bytes_moved += news.nbytes
        self._shown[key] = below
        if room is not None and room is not self._room[key]:
            self._arena.give_back(room)  # behind the copy, and so behind those up from there
        return below


def _numbers(unit: nn.Module) -> list[int]:
    """Which layers of a cache a unit uses, as its attention has been told."""
    indices = (getattr(module, "layer_idx", None) for module in unit.modules())
    return sorted({number for number in indices if isinstance(number, int)})


def _tensors(layer: Any) -> list[tuple[str, Tensor]]:
    return [
        (name, value) for name, value in vars(layer).items() if isinstance(value, Tensor) and value.numel()
    ]
