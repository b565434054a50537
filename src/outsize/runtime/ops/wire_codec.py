"""Gradients on the wire between ranks: pieces of fp32 into bytes and back, and what was lost on the way."""

import torch
from torch import Tensor

from outsize.codecs.codec import open_codec
from outsize.codecs.transport import Wire
from outsize.model.sizes.model_spec import ModelSpec
from outsize.runtime.forward.binding import TORCH_DTYPE
from outsize.storage.arena import Arena

# Primes above the units of a model, the ranks of a run and the chunks of a share: every piece has chances of its own.
_SEEDS_OF_A_STEP, _SEEDS_OF_A_UNIT, _SEEDS_OF_A_RANK = 1_000_000_007, 10_000_019, 10_007


class Residuals:
    """What encodings of gradients have lost, bf16, of all elements that a rank sends away.

    Args:
        spec: the model.
        own: elements of each unit that stay with this rank.
        arena: where the memory comes from.
    """

    def __init__(self, spec: ModelSpec, own: tuple[range, ...], arena: Arena) -> None:
        self._own = own
        self._planes: dict[int, Tensor] = {}
        for unit in spec.units:
            sent = unit.numel - len(own[unit.index])
            if unit.trainable and sent:
                plane = arena.take(2 * sent, "network residuals").view(torch.bfloat16)
                self._planes[unit.index] = plane.zero_()

    def of(self, unit: int, part: range) -> Tensor:
        """Return those of elements ``part``, which lie on one side of the own ones."""
        start = part.start - (len(self._own[unit]) if part.start >= self._own[unit].stop else 0)
        return self._planes[unit][start : start + len(part)]

    def plane(self, unit: int) -> Tensor | None:
        """Return those of all elements of a unit, in order, to be read or filled; None where nothing is sent of it."""
        return self._planes.get(unit)


class GradientWire:
    """Writes pieces of gradients for other ranks, and reads theirs.

    Args:
        wire: how.
        residuals: of codecs with error feedback; None for others.
        lost: room for a decoded chunk, fp32, to know what was lost; needed with residuals.
    """

    def __init__(self, wire: Wire, residuals: Residuals | None, lost: Tensor | None) -> None:
        self._wire = wire
        self._dtype = TORCH_DTYPE[wire.gradient_dtype]
        self.codec = None if wire.gradient_spec.name == "raw" else open_codec(wire.gradient_spec.name)
        self._residuals = residuals
        self._lost = lost

    @property
    def as_it_is(self) -> bool:
        """Whether pieces are sent from where they lie."""
        return self.codec is None and self._dtype is torch.float32

    def write(
        self, piece: Tensor, unit: int, part: range, into: Tensor, seed: int, loss_scale: float
    ) -> Tensor:
        """Return what is to be sent of ``piece``, elements ``part`` of a unit, in ``into``; uses ``piece`` up.

        With error feedback what was lost before is added first, and what is lost now is remembered, both without
        ``loss_scale``.
        """
        size = self._wire.gradient_bytes(piece.numel())
        if self.codec is None:
            return into[:size].view(self._dtype).copy_(piece)
        residual = self._residuals.of(unit, part) if self._residuals is not None else None
        if residual is not None:
            piece.add_(residual, alpha=loss_scale)
        size = self.codec.seeded(seed).encode(piece, into)
        if residual is not None:
            assert self._lost is not None
            lost = self._lost[: piece.numel()]
            self.codec.decode(into[:size], lost)
            torch.sub(piece, lost, out=lost)
            # A step that is not finite is given up; what it lost must not spoil the next one.
            residual.copy_(lost.div_(loss_scale).nan_to_num_(0.0, 0.0, 0.0))
        return into[:size]

    def room(self, memory: Tensor, numel: int) -> Tensor:
        """Return the part of ``memory`` that ``numel`` elements of another rank fill, as it is sent."""
        room = memory[: self._wire.gradient_bytes(numel)]
        return room if self.codec is not None else room.view(self._dtype)

    def read(self, arrived: Tensor, decoded: Tensor | None) -> Tensor:
        """Return the elements that ``arrived`` holds, to be added to fp32; ``decoded`` is room for them as fp32."""
        if self.codec is None:
            return arrived
        assert decoded is not None
        self.codec.decode(arrived, decoded)
        return decoded


def seed_of_piece(step: int, unit: int, rank: int, chunk: int) -> int:
    """Return the seed of the chances of one piece: it repeats when the run does."""
    return step * _SEEDS_OF_A_STEP + unit * _SEEDS_OF_A_UNIT + rank * _SEEDS_OF_A_RANK + chunk
