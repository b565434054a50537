"""Encode and decode planes that cross a device's link, piece by piece.

Weights are encoded once at home (those that train, each time they have stepped) and decoded in the slot. Gradients are
encoded where they were summed and decoded at home. Both count what went over the link (wire bytes) and what it stands
for (logical bytes).
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outsize.accelerators import Devices
from outsize.codecs.codec import DTYPE_NAME, Codec, device_kernels, open_codec
from outsize.codecs.codec_spec import codec_spec
from outsize.codecs.transport import (
    DEVICE_PIECE_ELEMENTS,
    GRADIENT_ELEMENTS,
    PIECE_ALIGN,
    PIECE_ELEMENTS,
    Transport,
    room_bytes,
    staging_bytes,
)
from outsize.model.sizes.model_spec import FrozenPart, ModelSpec, UnitSpec
from outsize.optim.optimizer_spec import WEIGHTS
from outsize.planner.memory.step_bytes import encoded_planes
from outsize.runtime.device.device import Device
from outsize.runtime.ops.context import StepContext
from outsize.storage.home import Home
from outsize.storage.ledger import Arena
from outsize.units import align_up

# Primes above the units of a model and the pieces of a unit: every piece of every step has a seed of its own.
_SEEDS_OF_A_STEP, _SEEDS_OF_A_UNIT = 1_000_000_007, 100_003


@dataclass(slots=True)
class _Encoding:
    """One plane's: its memory, its pieces in it, and the version of the plane that they are of; None of none."""

    room: Tensor
    pieces: list[Tensor]
    version: int | None = None


class EncodedWeights:
    """Encodings of all weights of a host home: beside those that train, and instead of those that do not.

    Args:
        spec: the model.
        home: holds the weights.
        codec: writes them; `decode` runs on the device.
        arena: where the memory comes from.

    Attributes:
        num_too_long: how often an encoding found no room, so that the plane goes as it is.
    """

    def __init__(self, spec: ModelSpec, home: Home, codec: Codec, arena: Arena) -> None:
        self.codec = codec
        self.num_too_long = 0
        self._spec = spec
        self._home = home
        self._lock = threading.Lock()
        self._of = {
            (unit.index, plane): _Encoding(
                arena.take(room_bytes(codec.spec, numel, dtype), "encoded weights"), []
            )
            for unit in spec.units
            for plane, numel, dtype in encoded_planes(unit, spec.dtype)
            if home.packed(unit.index, plane) is None
        }

    def pieces(self, unit: int, plane: str) -> list[Tensor]:
        """Return the encoding of a plane, as it is now, in pieces; empty where it goes as it is."""
        packed = self._home.packed(unit, plane)
        if packed is not None:
            return packed.pieces()
        encoding = self._of.get((unit, plane))
        if encoding is None:
            return []
        with self._lock:  # two workers may ask for the same unit
            if encoding.version != self._home.version(unit, plane):
                self._encode(unit, plane, encoding)
        return encoding.pieces

    def stepped(self, unit: int) -> None:
        """Encode a unit anew, since its weights were changed in place."""
        with self._lock:
            self._encode(unit, WEIGHTS, self._of[unit, WEIGHTS])

    def forget(self, unit: int) -> None:
        """Encode a unit anew before its weights next go up, since somebody else has changed them in place."""
        with self._lock:
            for (index, _), encoding in self._of.items():
                if index == unit:
                    encoding.version = None

    def _encode(self, unit: int, plane: str, encoding: _Encoding) -> None:
        source = self._home.view(unit, plane)
        at, encoding.pieces = 0, []
        encoding.version = self._home.version(unit, plane)
        for piece in source.split(PIECE_ELEMENTS):  # type: ignore[no-untyped-call]
            most = self.codec.spec.max_bytes(piece.numel(), DTYPE_NAME[piece.dtype])
            if at + most > encoding.room.numel():
                scratch = torch.empty(most, dtype=torch.uint8)
                size = self.codec.encode(piece, scratch)
                if at + size > encoding.room.numel():
                    encoding.pieces = []
                    self.num_too_long += 1
                    return
                encoding.room[at : at + size] = scratch[:size]
            else:
                size = self.codec.encode(piece, encoding.room[at:])
            encoding.pieces.append(encoding.room[at : at + size])
            at = align_up(at + size, PIECE_ALIGN)


def bring_up(
    device: Device, codec: Codec, pieces: Iterable[Tensor], plane: Tensor, staging: Sequence[Tensor]
) -> int:
    """Move the encoding of ``plane`` over the link and decode it there; return the bytes that went.

    Args:
        device: owner of ``plane`` and ``staging``.
        codec: wrote the pieces.
        pieces: encodings of `PIECE_ELEMENTS` elements each, the last of fewer.
        plane: where the elements go.
        staging: two byte buffers for as many pieces, by turns: one is being filled while the other is decoded, on
            streams of their own where the device has streams.
    """
    stride = codec.spec.max_bytes(PIECE_ELEMENTS, DTYPE_NAME[plane.dtype])
    at_once = staging[0].numel() // stride
    pieces, wire_bytes = list(pieces), 0
    decoded: list[Any] = [None, None]
    before: tuple[Any, Callable[[], None]] | None = None
    for index, target in enumerate(plane.split(at_once * PIECE_ELEMENTS)):  # type: ignore[no-untyped-call]
        sent = pieces[index * at_once : (index + 1) * at_once]
        sizes = [piece.numel() for piece in sent]
        room = staging[index % 2][: len(sent) * stride]
        device.rejoin(decoded[index % 2])
        with device.link(sum(sizes)):
            for piece, part in zip(sent, room.split(stride), strict=True):  # type: ignore[no-untyped-call]
                part[: piece.numel()].copy_(piece, non_blocking=True)
            arrived = device.here()
            if before is not None:
                decoded[(index - 1) % 2] = device.beside(*before)
        before = arrived, partial(codec.decode_pieces, room, sizes, target, PIECE_ELEMENTS)
        wire_bytes += sum(sizes)
    if before is not None:
        device.rejoin(device.beside(*before))
    return wire_bytes


class GradientCarrier:
    """Brings gradients home encoded.

    Args:
        codec: writes them.
        device: where they are.
        staging: two byte buffers on the device.
        landing: as many at home, pinned: one piece is decoded while the next one is under way.
    """

    def __init__(
        self, codec: Codec, device: Device, staging: Sequence[Tensor], landing: Sequence[Tensor]
    ) -> None:
        self._codec = codec
        self._device = device
        self._staging, self._landing = staging, landing

    def bring_home(self, unit: UnitSpec, plane: Tensor, into: Tensor, context: StepContext) -> int:
        """Encode ``plane``, decode it into ``into``, and return the bytes that went over the link.

        What lies between tensors, and tensors that got no gradient, hold anything: they are zeroed first, since groups
        of elements share a scale. Chances are those of the step, so that what rounding makes of an element differs from
        step to step, and repeats when the run does.
        """
        for start, stop in gaps(unit, context.touched[unit.index]):
            plane[start:stop].zero_()
        wire_bytes, before = 0, None
        for index, start in enumerate(range(0, plane.numel(), GRADIENT_ELEMENTS)):
            piece, target = plane[start : start + GRADIENT_ELEMENTS], into[start : start + GRADIENT_ELEMENTS]
            seed = context.number * _SEEDS_OF_A_STEP + unit.index * _SEEDS_OF_A_UNIT + index
            size = self._codec.seeded(seed).encode(piece, self._staging[index % 2])
            arrived = self._landing[index % 2][:size]
            with self._device.link(size):
                arrived.copy_(self._staging[index % 2][:size], non_blocking=True)
            if before is not None:
                self._decode(*before)
            before = self._device.here(), arrived, target
            wire_bytes += size
        if before is not None:
            self._decode(*before)
        return wire_bytes

    def _decode(self, mark: Any, arrived: Tensor, target: Tensor) -> None:
        if mark is not None:
            mark.synchronize()  # asleep, while the next piece is encoded and under way
        self._codec.decode(arrived, target)


def gaps(unit: UnitSpec, touched: frozenset[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a plane of ``unit`` that belong to no touched tensor: they hold anything."""
    end = 0
    for position, tensor in enumerate(unit.tensors):
        if position in touched:
            if tensor.offset > end:
                yield end, tensor.offset
            end = tensor.offset + tensor.numel
    if end < unit.numel:
        yield end, unit.numel


def encode_weights(transport: Transport, spec: ModelSpec, home: Home, arena: Arena) -> EncodedWeights | None:
    """Return the weights of ``home`` as ``transport`` sends them; None where they go as they are.

    Raises:
        BudgetExceededError: the arena's tier has too little left.
        ValueError: the home is on disk.
    """
    if transport.is_raw("weights"):
        return None
    if not home.in_memory:
        raise ValueError("weights are sent encoded from a home in host memory only")
    return EncodedWeights(spec, home, open_codec(transport.weights), arena)


def packed_codec(transport: Transport) -> Codec | None:
    """Return what weights that do not train are kept in at home; None where they lie there as they are."""
    return None if transport.is_raw("weights") else open_codec(transport.weights)


def take_staging(
    transport: Transport, crossing: str, device: Device, largest: tuple[int, str] = (0, "")
) -> list[Tensor]:
    """Take two buffers of ``device``, see `staging_bytes`; none where a crossing goes as it is."""
    size = staging_bytes(transport, crossing, largest)
    return [device.allocate(size, "codec staging") for _ in range(2)] if size else []


def gradient_carrier(
    transport: Transport, device: Device, host: Arena, largest: tuple[int, str]
) -> GradientCarrier | None:
    """Return what brings gradients home as ``transport`` sends them; None where they go as they are."""
    if transport.is_raw("gradients"):
        return None
    codec = open_codec(transport.spec("gradients").name)
    staging = take_staging(transport, "gradients", device, largest)
    landing = host.take_all([room.nbytes for room in staging], "encoded gradients")
    return GradientCarrier(codec, device, staging, landing)


def activation_codec(transport: Transport) -> Codec | None:
    """Return the codec of activations; None where they go as they are."""
    return None if transport.is_raw("activations") else open_codec(transport.activations)


# What decoding in torch takes beside the encoding: pieces that stay in a cache, or off the host larger ones, of 6 bytes
# per element; and for scales that are encoded themselves up to three numbers of 4 bytes per group of 64 elements.
_PIECES_BYTES, _ELEMENT_BYTES, _SCALE_BYTES, _GROUP = 2**21, 6, 12, 64


def encoded_parts(spec: ModelSpec) -> list[FrozenPart]:
    """The frozen parts of ``spec`` that a codec writes."""
    return [part for unit in spec.units for part in unit.frozen if part.codec is not None]


def decoding_bytes(spec: ModelSpec, devices: Devices) -> int:
    """Return what decoding takes on each device: the largest encoding, and the work; 0 without codecs."""
    parts = encoded_parts(spec)
    if not parts:
        return 0
    room, largest = max(part.encoded_bytes for part in parts), max(part.numel for part in parts)
    device = devices.torch_device
    if device_kernels(device) is not None:
        return room
    on_host = device.type == "cpu"
    pieces = _PIECES_BYTES if on_host else _ELEMENT_BYTES * min(largest, DEVICE_PIECE_ELEMENTS)
    return room + largest // _GROUP * _SCALE_BYTES + pieces


def encode(part: FrozenPart, values: Tensor, into: Tensor) -> None:
    """Write ``values`` [part.numel] as they rest at home, uint8 [part.encoded_bytes]; what is over is zero."""
    assert part.codec is not None
    into[open_codec(part.codec).encode(values, into) :].zero_()


def decode(part: FrozenPart, encoded: Tensor, into: Tensor, codec: Codec | None = None) -> None:
    """Fill ``into`` [part.numel] from what `encode` has written; ``codec`` is that of the part, if there is one yet."""
    assert part.codec is not None
    size = codec_spec(part.codec).max_bytes(part.numel, part.dtype)
    (codec or open_codec(part.codec)).decode(encoded[:size], into)


class Decoding:
    """Room on one device for one encoding, and the codecs of a model. For one lane: loads are decoded one at a time."""

    def __init__(self, spec: ModelSpec, device: Device, held: Set[int] = frozenset()) -> None:
        parts = encoded_parts(spec)
        self._codecs: dict[str, Codec] = {part.codec: open_codec(part.codec) for part in parts if part.codec}
        size = max((part.encoded_bytes for part in parts), default=0)
        self._room = device.allocate(size, "encoded weights") if size else None
        self._rooms = {
            (unit, part.plane): device.allocate(part.encoded_bytes, "encoded weights")
            for unit in sorted(held)
            for part in spec.units[unit].frozen
            if part.codec is not None
        }

    def room(self, unit: int, part: FrozenPart) -> Tensor:
        """Return where the encoding of ``part`` comes, uint8 [part.encoded_bytes]: its own room if ``unit`` is held."""
        if (unit, part.plane) in self._rooms:
            return self._rooms[unit, part.plane][: part.encoded_bytes]
        assert self._room is not None
        return self._room[: part.encoded_bytes]

    def decode(self, part: FrozenPart, encoded: Tensor, plane: Tensor) -> None:
        """Decode what has come into ``plane`` [part.numel], in order with the lane that calls."""
        assert part.codec is not None
        decode(part, encoded, plane, self._codecs[part.codec])
