"""Measure the device memory that a forward takes beside weights, and place keys and values of a generation."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from outsize.compat import torch_private
from outsize.compat.torch_private import num_holders
from outsize.compat.transformers_private import cache_layers, cached_tensors, layer_numbers, window_length
from outsize.errors import InfeasiblePlanError
from outsize.runtime.device.device import Device
from outsize.runtime.trial.live_bytes import LiveBytes
from outsize.storage.ledger import PAGE_BYTES, Arena
from outsize.units import align_up, format_bytes

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
        reorders: whether texts change places, as beams do, for which transformers copies what rests.
    """

    rows: int
    length: int
    num_new: int
    reorders: bool = False


class Workspace:
    """The most bytes that a unit needs while it computes, known for the largest forward so far.

    Attributes:
        known_bytes: what that took; 0 before the first.
        measured_bytes: what the forward that runs took so far, where it is larger than any before; else 0.
    """

    def __init__(self, dtype: str) -> None:
        self._share = KERNEL_SHARE[dtype]
        self._largest: ForwardExtent | None = None
        self._measuring: ForwardExtent | None = None
        self.known_bytes = self.measured_bytes = 0

    @property
    def bytes_per_token(self) -> float:
        """Of the largest forward so far; 0 before the first."""
        return self.known_bytes / (self._largest.rows * self._largest.length) if self._largest else 0.0

    def begin(self, extent: ForwardExtent) -> bool:
        """A forward of that size begins; returns whether it is larger than any before, and measured therefore."""
        self._measuring = None if self._largest is not None and self._largest.covers(extent) else extent
        self.measured_bytes = 0
        return self._measuring is not None

    def expected_bytes(self, extent: ForwardExtent) -> int:
        """What a forward of that size will take, as far as smaller ones tell; attention may grow with the square."""
        if self._largest is None or self._largest.covers(extent):
            return self.known_bytes
        rows = max(extent.rows / self._largest.rows, 1.0)
        length = max(extent.length / self._largest.length, 1.0)
        return int(self.known_bytes * rows * length**2)

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
        self.measured_bytes = max(self.measured_bytes, int(most * (1 + self._share)))
        return output

    def end(self) -> None:
        """The forward has come to its last unit: what was measured counts from here on."""
        if self._measuring is None:
            return
        largest = self._largest or self._measuring
        self._largest = ForwardExtent(
            max(largest.rows, self._measuring.rows), max(largest.length, self._measuring.length)
        )
        self.known_bytes = max(self.known_bytes, self.measured_bytes)
        self._measuring, self.measured_bytes = None, 0


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


def layers_of(cache: Any) -> list[Any]:
    """The layers of a cache; of one for encoder and decoder, both its caches'."""
    grow, crossed = cache_layers(cache)
    return grow + crossed


def cache_bytes(cache: Any, hosted: bool = False) -> int:
    """Bytes that a cache holds: whole storages, since a sliding window is a view of more; if hosted, those in use."""
    if hosted:
        return sum(tensor.nbytes for layer in layers_of(cache) for _, tensor in cached_tensors(layer))
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for layer in layers_of(cache)
        for value in vars(layer).values()
        if isinstance(value, Tensor)
    }
    return sum(storages.values())


def grown_bytes(cache: Any, rows: int, length: int) -> int:
    """Bytes that a cache will hold of ``rows`` of ``length`` tokens; windows that are full and states do not grow."""
    return sum(_grown_sizes(cache, rows, length))


def hosted_bytes(cache: Any, rows: int, length: int, *, reorders: bool) -> int:
    """Bytes of the host for a cache grown as far that rests there: pages, and one tensor that is made anew."""
    sizes = [align_up(size, PAGE_BYTES) for size in _grown_sizes(cache, rows, length)]
    return sum(sizes) * (2 if reorders else 1) + max(sizes, default=0)


def _grown_sizes(cache: Any, rows: int, length: int) -> Iterator[int]:
    grow, crossed = cache_layers(cache)
    yield from (tensor.nbytes for layer in crossed for _, tensor in cached_tensors(layer))
    for layer in grow:
        for name, tensor in cached_tensors(layer):
            num_bytes = tensor.nbytes
            if name in GROWING and tensor.dim() >= 2:
                num_bytes = num_bytes * max(rows, len(tensor)) // len(tensor)
                num_bytes = num_bytes // tensor.shape[-2] * _grown_length(layer, tensor.shape[-2], length)
            yield num_bytes


def _grown_length(layer: Any, now: int, length: int) -> int:
    """Tokens that a layer holds of a text of ``length``; of a window those that it shows."""
    most = window_length(layer)
    return max(now, length if most <= 0 else min(length, most))


def bytes_above(cache: Any, num_bytes: int) -> int:
    """Bytes on the device of a cache that rests on the host: a layer that came up, and the longer one made of it."""
    return num_bytes * 2 // max(len(layers_of(cache)), 1)


def check_growth(cache: Any, growth: Growth, shortage: Callable[[Growth], Mapping[str, int]]) -> None:
    """Refuse a generation whose cache will have no room, with the number of tokens that have.

    What a cache that has grown so far lacks of each memory ``shortage`` tells.

    Raises:
        InfeasiblePlanError: it lacks some.
    """
    if not (short := shortage(growth)):
        return
    least, most = 0, growth.length
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if shortage(replace(growth, length=middle)) else (middle, most)
    left = least - (growth.length - growth.num_new)
    advice = f"lower max_new_tokens to {left}" if left > 0 else "shorten the prompt"
    fewer = "take fewer texts at once, " if growth.rows > 1 else ""
    memories = (" or " if len(short) == 1 else " and ").join(
        f"{tier}_memory" for tier in {"device": 0, **short}
    )
    raise InfeasiblePlanError(
        f"keys and values of {growth.rows} x {growth.length} tokens ({growth.num_new} of each new) take "
        f"{format_bytes(grown_bytes(cache, growth.rows, growth.length))}, and beside the forward and a unit there is "
        f"room for {least} tokens; {advice}, {fewer}or raise {memories}",
        short,
    )


class HostedCache:
    """A cache whose layers rest in host memory; each comes up for the unit that uses it, and its news go down after it.

    The host copy is written in place, with room for all tokens to come where they are known, so that of a layer that
    appends only the new tokens go down. What a layer holds anew, a window or beams in another order, goes where it was,
    unless somebody has that still.

    Args:
        device: computes.
        modules: the units.
        arena: its own, where host copies come from; goes with the cache, whose memory is its caller's to keep.

    Attributes:
        bytes_moved: both ways, so far.
    """

    def __init__(self, device: Device, modules: Sequence[nn.Module], arena: Arena) -> None:
        self._device, self._arena = device, arena
        self._layers_of = [layer_numbers(unit) for unit in modules]
        self._room: dict[tuple[int, str], Tensor] = {}
        self._shown: dict[tuple[int, str], Tensor] = {}
        self.bytes_moved = 0

    @contextlib.contextmanager
    def up(self, cache: Any, unit: int, length: int) -> Iterator[None]:
        """Have the layers that ``unit`` uses on the device, and down again afterwards.

        Args:
            cache: it.
            unit: number of the unit.
            length: tokens of its longest text when all is written; 0 where nobody knows.

        Raises:
            BudgetExceededError: the host has no room for what is new.
        """
        layers = layers_of(cache)
        used = [(index, layers[index]) for index in self._layers_of[unit] if index < len(layers)]
        for index, layer in used:
            for name, tensor in cached_tensors(layer):
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
                for name, tensor in cached_tensors(layer):
                    setattr(layer, name, self._down((index, name), tensor, layer, length))

    @property
    def num_bytes(self) -> int:
        """Host memory that is held."""
        return self._arena.statistics().num_bytes

    def _down(self, key: tuple[int, str], tensor: Tensor, layer: Any, length: int) -> Tensor:
        """Return the host copy of ``tensor``; what it begins with is there already where it has grown at its end."""
        if tensor.dim() < 2:
            return tensor.cpu()
        shown, room = self._shown.get(key), self._room.get(key)
        now, start = tensor.shape[-2], 0
        fits = (
            room is not None
            and room.shape[:-2] == tensor.shape[:-2]
            and room.shape[-1] == tensor.shape[-1]
            and room.shape[-2] >= now
        )
        # A window drops its oldest tokens, and may be longer than before all the same.
        if (
            fits
            and shown is not None
            and key[1] in GROWING
            and shown.shape[-2] < now == layer.get_seq_length()
        ):
            start = shown.shape[-2]
        elif not fits or room is None or num_holders(room.untyped_storage()) > 1 + (shown is not None):
            if key[1] in GROWING:
                now = _grown_length(layer, now, length if length > now else now + GROWTH)
            shape = (*tensor.shape[:-2], now, tensor.shape[-1])
            memory = self._arena.take(math.prod(shape) * tensor.itemsize, "keys and values")
            # No view, which would hold what it is a view of.
            self._room[key] = torch.empty(0, dtype=tensor.dtype).set_(memory.untyped_storage()).resize_(shape)
        below = self._room[key][..., : tensor.shape[-2], :]
        news, place = tensor[..., start:, :], below[..., start:, :]
        with self._device.link(news.nbytes):
            place.copy_(news)
        self.bytes_moved += news.nbytes
        self._shown[key] = below
        if room is not None and room is not self._room[key]:
            self._arena.give_back(room)  # behind the copy, and so behind those up from there
        return below
