"""REDUCE, AGREE and GATHER: gradients, norms and weights between ranks, and their bytes on the wire.

The story of a unit, on every rank:

1. A GRAD has put the whole gradient of this rank's microbatches into a host buffer. Of several rounds that is the last;
   what those before summed lies at home, and went up to be summed on. REDUCE tells the others which of
   its tensors got one, and zeroes the rest: it holds anything. Then each rank sends every other the elements which that
   one owns, chunk by chunk, and adds up what it gets, in the order of ranks, into its own share of the gradient at
   home. Squares of that share, tensor by tensor, are kept for the norm.
2. AGREE sends these squares and the loss to all. Each rank adds them up in the order of ranks, so that all have the
   same norms and the same loss, to the bit, and decide the same in CLIP.
3. STEP steps the own share. GATHER sends its new weights to all others, and puts theirs beside them.

A piece crosses the network once and is rounded once, if at all: it is added by the rank that owns it, not on the way
round a ring. So the same number of ranks gives the same bits, and all ranks have the same weights.

Lanes ``net:reduce`` and ``net:gather`` have a channel each, on which all ranks do the same in the same order. Whatever
is first in the programs and not done can be done everywhere: nobody waits for ever.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.codecs.codec import open_codec
from outsize.codecs.transport import Wire
from outsize.group.group import Group
from outsize.model.sizes.model_spec import ModelSpec, UnitSpec
from outsize.optim.optimizer_spec import GRADIENT, WEIGHTS
from outsize.optim.shares import shares
from outsize.planner.memory.step_bytes import NetStaging
from outsize.planner.program.program import Kind, Op
from outsize.runtime.forward.binding import TORCH_DTYPE
from outsize.runtime.ops.context import Moved, StepContext, handles
from outsize.runtime.ops.link_codecs import EncodedWeights, gaps
from outsize.runtime.ops.load_ops import typed_plane
from outsize.storage.home import Home
from outsize.storage.ledger import Arena

# Primes above the units of a model, the ranks of a run and the chunks of a share: every piece has chances of its own.
_SEEDS_OF_A_STEP, _SEEDS_OF_A_UNIT, _SEEDS_OF_A_RANK = 1_000_000_007, 10_000_019, 10_007


class GradientWire:
    """Writes pieces of gradients for other ranks, and reads theirs."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._dtype = TORCH_DTYPE[wire.gradient_dtype]
        self.codec = None if wire.gradient_spec.name == "raw" else open_codec(wire.gradient_spec.name)

    @property
    def as_it_is(self) -> bool:
        """Whether pieces are sent from where they lie."""
        return self.codec is None and self._dtype is torch.float32

    def write(self, piece: Tensor, into: Tensor, seed: int) -> Tensor:
        """Return what is to be sent of ``piece``, in ``into``."""
        size = self._wire.gradient_bytes(piece.numel())
        if self.codec is None:
            return into[:size].view(self._dtype).copy_(piece)
        size = self.codec.seeded(seed).encode(piece, into)
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


REDUCE_CHANNEL, GATHER_CHANNEL = "reduce", "gather"


@dataclass(frozen=True, slots=True)
class Shared:
    """A rank's part in a run of several ranks.

    Attributes:
        group: the ranks.
        wire: how they write what they exchange.
        staging: what is set aside for it.
    """

    group: Group
    wire: Wire
    staging: NetStaging


class ExchangeOps:
    """Exchanges gradients and weights with other ranks.

    Args:
        spec: the model.
        shared: with whom, and how.
        home: weights of all units, and the own share of everything else.
        host_buffers: where GRADs put gradients.
        arena: where memory for what is under way comes from.
        encoded: told of units whose weights have changed; None where nobody wants to know.

    Attributes:
        reduced: bytes sent of gradients so far.
        gathered: bytes sent of weights so far.
    """

    def __init__(
        self,
        spec: ModelSpec,
        shared: Shared,
        home: Home,
        host_buffers: Sequence[Tensor],
        arena: Arena,
        encoded: EncodedWeights | None = None,
    ) -> None:
        group, wire, staging = shared.group, shared.wire, shared.staging
        self._spec, self._home, self._host_buffers, self._encoded = spec, home, host_buffers, encoded
        self.rank, self._size = group.rank, group.size
        self._shares = shares(spec, group.size)
        self._reducing, self._gathering = group.channel(REDUCE_CHANNEL), group.channel(GATHER_CHANNEL)
        self._chunk = staging.chunk_elements
        others = [rank for rank in range(group.size) if rank != group.rank]

        def for_each(num_bytes: int) -> dict[int, Tensor]:
            return {rank: arena.take(num_bytes, "network") for rank in others} if num_bytes else {}

        def one(num_bytes: int, dtype: torch.dtype) -> Tensor | None:
            return arena.take(num_bytes, "network").view(dtype) if num_bytes else None

        self._gradient_in, self._gradient_out = for_each(staging.gradient_in), for_each(staging.gradient_out)
        self._decoded, self._summed = one(staging.decoded, torch.float32), one(staging.summed, torch.float32)
        self._weight_in = for_each(staging.weight_in)
        self._weight_out = one(staging.weight_out, torch.uint8)
        self._wire = GradientWire(wire)
        self.reduced = Moved()
        self.gathered = Moved()

    @property
    def own(self) -> tuple[range, ...]:
        """The elements of each unit that this rank steps."""
        return tuple(ranges[self.rank] for ranges in self._shares)

    @handles(Kind.REDUCE)
    def reduce(self, op: Op, context: StepContext) -> None:
        """REDUCE: host buffer → the own share of the gradient at home, summed over all ranks."""
        assert op.unit is not None
        assert op.buffer is not None
        unit = self._spec.units[op.unit]
        plane = typed_plane(self._host_buffers[op.buffer], unit, "fp32")
        ranges = self._shares[op.unit]
        self._tell_touched(unit, plane, context)
        squares = torch.zeros(len(unit.tensors), dtype=torch.float64)
        for chunk, start in enumerate(range(0, max(map(len, ranges)), self._chunk)):
            parts = [part[start : start + self._chunk] for part in ranges]
            summed = self._reduce_chunk(unit, plane, parts, chunk, context)
            if summed is not None:
                _add_squares(squares, unit, parts[self.rank], summed)
        context.squares[op.unit] = squares

    @handles(Kind.AGREE)
    def agree(self, op: Op, context: StepContext) -> None:
        """AGREE: loss and norms of this rank → those of all."""
        units = sorted(context.squares)
        own_squares = torch.cat(
            [torch.tensor([context.loss()], dtype=torch.float64), *(context.squares[u] for u in units)]
        )
        arrived = {rank: torch.empty_like(own_squares) for rank in range(self._size) if rank != self.rank}
        self._reducing.exchange(dict.fromkeys(arrived, own_squares), arrived)
        total = torch.zeros_like(own_squares)
        for rank in range(self._size):
            total += own_squares if rank == self.rank else arrived[rank]
        sizes = [1, *(len(context.squares[unit]) for unit in units)]
        loss, *squares = torch.split(total, sizes)
        context.agreed_loss = loss.item()
        context.norms |= {unit: square.sqrt().float() for unit, square in zip(units, squares, strict=True)}

    @handles(Kind.GATHER)
    def gather(self, op: Op, context: StepContext) -> None:
        """GATHER: the own share of the weights → all other homes, and theirs into this one."""
        assert op.unit is not None
        if context.skipped:
            return
        unit = self._spec.units[op.unit]
        weights = self._home.lend(op.unit, WEIGHTS)
        if weights is None:
            for parts in self._chunks(unit):
                self._gather_on_disk(unit, parts)
        else:
            self._gather_in_place(unit, weights)
        if self._encoded is not None:
            self._encoded.stepped(op.unit)

    def _tell_touched(self, unit: UnitSpec, plane: Tensor, context: StepContext) -> None:
        """Zero what got no gradient here, and learn of which tensors any rank has one."""
        touched = context.touched[unit.index]
        for start, stop in gaps(unit, touched):
            plane[start:stop].zero_()
        own_marks = torch.tensor(
            [position in touched for position in range(len(unit.tensors))], dtype=torch.uint8
        )
        arrived = {rank: torch.empty_like(own_marks) for rank in range(self._size) if rank != self.rank}
        self._reducing.exchange(dict.fromkeys(arrived, own_marks), arrived)
        for flags in arrived.values():
            own_marks |= flags
        context.touched[unit.index] = frozenset(own_marks.nonzero().flatten().tolist())

    def _reduce_chunk(
        self, unit: UnitSpec, plane: Tensor, parts: Sequence[range], chunk: int, context: StepContext
    ) -> Tensor | None:
        """Exchange one chunk of every share; returns the own one, summed; None where this rank has none."""
        mine = parts[self.rank]
        outgoing, incoming = {}, {}
        for rank, part in enumerate(parts):
            if rank == self.rank:
                continue
            piece = plane[part.start : part.stop]
            if len(part) and self._wire.as_it_is:
                outgoing[rank] = piece
            elif len(part):
                seed = seed_of_piece(context.number, unit.index, rank, chunk)
                outgoing[rank] = self._wire.write(piece, self._gradient_out[rank], seed)
            if len(mine):
                incoming[rank] = self._wire.room(self._gradient_in[rank], len(mine))
        self._reducing.exchange(outgoing, incoming)
        sent = sum(len(part) for rank, part in enumerate(parts) if rank != self.rank)
        self.reduced = self.reduced.and_then(sum(piece.nbytes for piece in outgoing.values()), 4 * sent)
        if not len(mine):
            return None
        at_home = self._home.lend(unit.index, GRADIENT, mine)
        total = self._room(len(mine)) if at_home is None else at_home
        own_part = plane[mine.start : mine.stop]
        decoded = None if self._decoded is None else self._decoded[: len(mine)]
        for rank in range(self._size):
            piece = own_part if rank == self.rank else self._wire.read(incoming[rank], decoded)
            total.add_(piece) if rank else total.copy_(piece)
        if at_home is None:
            self._home.write(unit.index, GRADIENT, mine.start, total)
        return total

    def _room(self, numel: int) -> Tensor:
        """Where a chunk of the own share is summed on its way to the disk."""
        assert self._summed is not None
        return self._summed[:numel]

    def _chunks(self, unit: UnitSpec) -> Iterator[list[range]]:
        ranges = self._shares[unit.index]
        for start in range(0, max(map(len, ranges)), self._chunk):
            yield [part[start : start + self._chunk] for part in ranges]

    def _gather_in_place(self, unit: UnitSpec, plane: Tensor) -> None:
        """Send and receive weights where they lie."""
        cut = {rank: plane[part.start : part.stop] for rank, part in enumerate(self._shares[unit.index])}
        own_part = cut.pop(self.rank)
        self._gathering.exchange(
            dict.fromkeys(cut, own_part) if len(own_part) else {},
            {rank: piece for rank, piece in cut.items() if len(piece)},
        )
        self.gathered = self.gathered.and_then(own_part.nbytes * len(cut), own_part.nbytes * len(cut))

    def _gather_on_disk(self, unit: UnitSpec, parts: Sequence[range]) -> None:
        """The same, of one chunk of every share, by way of memory."""
        assert self._weight_out is not None
        dtype, mine = TORCH_DTYPE[self._spec.dtype], parts[self.rank]

        def room(memory: Tensor, part: range) -> Tensor:
            return memory[: len(part) * dtype.itemsize].view(dtype)

        own_part = room(self._weight_out, mine)
        if len(mine):
            self._home.read(unit.index, WEIGHTS, mine.start, own_part)
        arriving = {
            rank: room(memory, parts[rank]) for rank, memory in self._weight_in.items() if len(parts[rank])
        }
        self._gathering.exchange(dict.fromkeys(self._weight_in, own_part) if len(mine) else {}, arriving)
        for rank, piece in arriving.items():
            self._home.write(unit.index, WEIGHTS, parts[rank].start, piece)
        sent = own_part.nbytes * len(self._weight_in)
        self.gathered = self.gathered.and_then(sent, sent)


def _add_squares(squares: Tensor, unit: UnitSpec, part: range, summed: Tensor) -> None:
    """Add to ``squares`` the sum of the squares of each tensor of a unit in elements ``part``, in fp64."""
    for position, tensor in enumerate(unit.tensors):
        start, stop = max(tensor.offset, part.start), min(tensor.offset + tensor.numel, part.stop)
        if start < stop:
            piece = summed[start - part.start : stop - part.start]
            norm = torch.linalg.vector_norm(piece, dtype=torch.float64).item()
            squares[position] += norm * norm if math.isfinite(norm) else norm
