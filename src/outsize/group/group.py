"""Sums and gathers between the ranks of a run, all made of one exchange of everyone with everyone.

Ranks are numbered from 0. Every call blocks until this rank has what it came for, may come from any thread, and has to
be made by all ranks in the same order *on the same channel*. Threads that call at the same time, such as the lanes of
an engine, take a channel each (`Group.channel`): calls on different channels do not wait for each other.

Sums are exact in this sense: pieces are added in the order of ranks, ((p0 + p1) + p2) + ..., in the dtype of the
tensor. So a sum has the same bits on all ranks and in every run with as many ranks, whichever piece arrives first. The
bytes are those of a ring: scattering a sum of n bytes over N ranks sends and receives (N - 1) / N * n on each rank, but
to and from N - 1 partners.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

# Bytes of a piece that is added at once: large enough that a message's latency is small beside its bytes (some ten
# microseconds against 3 ms at 10 Gbit/s), small enough that what is staged stays in the caches of a server.
CHUNK_BYTES = 4 * 2**20


class Group(ABC):
    """The ranks of a run, seen by one of them; everything is made of `exchange`, which is the kind's own.

    Attributes:
        rank: number of this one, from 0.
        size: how many there are.

    Every call raises `LostRankError` where a rank is gone, with its number, and leaves what it was to write undefined.
    """

    rank: int
    size: int

    def __init__(self) -> None:
        self._stage: dict[torch.dtype, Tensor] = {}

    @abstractmethod
    def channel(self, name: str) -> "Group":
        """Return the same ranks with an order of calls of its own; the same name is the same channel."""

    @abstractmethod
    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Send ``outgoing[p]`` to each rank p and fill ``incoming[p]`` from it.

        Args:
            outgoing: contiguous tensors on the CPU by rank; this rank is not among them.
            incoming: likewise; each as many bytes as that rank sends to this one. Nothing is sent of none.
        """

    @abstractmethod
    def close(self, error: BaseException | None = None) -> None:
        """Leave, and tell the others why; idempotent. A channel is closed with the group that it is of."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its sum over all ranks; for small ones, as every rank sends it to every other."""
        pieces = self._from_everyone(tensor.contiguous())
        total = pieces[0].clone()
        for piece in pieces[1:]:
            total += piece
        tensor.copy_(total)

    def reduce_scatter(self, flat: Tensor, ranges: Sequence[range]) -> Tensor:
        """Add ``ranges[self.rank]`` of ``flat`` over all ranks, in place, and return that part of it.

        It goes chunk by chunk, every rank its k-th at the same time.

        Args:
            flat: contiguous ``[n]``, of the same n on all ranks; outside the own range it stays as it was.
            ranges: elements that each rank is to have summed, by rank, the same on all of them; may be empty.
        """
        self._check(flat, ranges)
        length = CHUNK_BYTES // flat.element_size()
        longest = max(len(part) for part in ranges)
        for begin in range(0, longest, length):
            cut = {peer: _cut(flat, ranges[peer], begin, length) for peer in range(self.size)}
            own_part = cut.pop(self.rank)
            incoming = self._staged(own_part, length)
            self.exchange(cut, incoming)
            _add_in_order(own_part, self.rank, incoming)
        return _cut(flat, ranges[self.rank], 0, len(flat))

    def all_gather(self, flat: Tensor, ranges: Sequence[range]) -> None:
        """Fill ``flat`` from all ranks: of ``ranges[p]``, what rank p has there.

        Args:
            flat: contiguous ``[n]``, the own range filled in; outside all ranges it stays as it was.
            ranges: elements that each rank has, by rank, the same on all of them; may be empty, never overlap.
        """
        self._check(flat, ranges)
        cut = {peer: _cut(flat, part, 0, len(flat)) for peer, part in enumerate(ranges)}
        own_part = cut.pop(self.rank)
        self.exchange(dict.fromkeys(cut, own_part), cut)

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self._from_everyone(torch.zeros(1, dtype=torch.uint8))

    def gather_objects(self, value: Any) -> list[Any]:
        """Return ``value`` of every rank, by rank, on all of them.

        Values are what JSON can say, NaN and infinities included: tuples come back as lists.
        """
        text = bytearray(json.dumps(value).encode())
        payload = torch.frombuffer(text, dtype=torch.uint8)
        lengths = self._from_everyone(torch.tensor([len(text)]))
        texts = {peer: torch.empty(int(lengths[peer]), dtype=torch.uint8) for peer in self._others()}
        self.exchange(dict.fromkeys(texts, payload), texts)
        texts[self.rank] = payload
        return [json.loads(texts[peer].numpy().tobytes()) for peer in range(self.size)]

    def _others(self) -> list[int]:
        """Return all ranks but this one, the next first, so that not all send to rank 0 at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _from_everyone(self, payload: Tensor) -> list[Tensor]:
        incoming = {peer: torch.empty_like(payload) for peer in self._others()}
        self.exchange(dict.fromkeys(incoming, payload), incoming)
        return [payload if peer == self.rank else incoming[peer] for peer in range(self.size)]

    def _staged(self, payload: Tensor, length: int) -> dict[int, Tensor]:
        """Return room for a chunk ``payload`` [m] of each other rank, m <= length; used again by the next call."""
        room = self._stage.get(payload.dtype)
        if room is None:
            self._stage.clear()  # a channel reduces one dtype; should it change, the former is not kept
            room = self._stage[payload.dtype] = torch.empty(self.size - 1, length, dtype=payload.dtype)
        return {peer: room[row, : len(payload)] for row, peer in enumerate(self._others())}

    def _check(self, flat: Tensor, ranges: Sequence[range]) -> None:
        if flat.dim() != 1 or not flat.is_contiguous():
            raise ValueError(f"a flat, contiguous tensor is needed, got shape {tuple(flat.shape)}")
        if len(ranges) != self.size:
            raise ValueError(f"{self.size} ranks need as many ranges, got {len(ranges)}")
        if any(part.step != 1 or part.start < 0 or part.stop > len(flat) for part in ranges):
            raise ValueError(f"ranges must lie within 0..{len(flat)}, got {list(ranges)}")


def _cut(flat: Tensor, part: range, begin: int, length: int) -> Tensor:
    """Return the elements of ``part`` from ``begin`` on, ``length`` at most, as a view."""
    start = min(part.start + begin, max(part.stop, part.start))
    return flat[start : max(min(start + length, part.stop), start)]


def _add_in_order(own_part: Tensor, rank: int, others: Mapping[int, Tensor]) -> None:
    """Write the sum of one piece of each rank, in the order of ranks, over ``own_part``, that of ``rank``."""
    if not others or not len(own_part):
        return
    total = (
        own_part if rank == 0 else others[0]
    )  # own comes later in the sum, so it cannot be what is summed into
    for peer in range(1, len(others) + 1):
        total += own_part if peer == rank else others[peer]
    if total is not own_part:
        own_part.copy_(total)


class SingleGroup(Group):
    """Group of a single rank: every collective returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = 0, 1

    def channel(self, name: str) -> "SingleGroup":
        """Return a group of one."""
        return SingleGroup()

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """There is nobody to send to."""
        if outgoing or incoming:
            raise ValueError(f"there is one rank only, got {sorted({*outgoing, *incoming})}")

    def close(self, error: BaseException | None = None) -> None:
        """There is nobody to leave."""


CHANNEL = "pace"


class Pace:
    """A context manager: who leaves it with an error gives up, and who comes to its end waits for the others.

    Each piece begins on all ranks at once and is repeated as often on all.

    Ranks of one machine share its cores, caches and memory. What one of them measures while the others are at something
    else, or wait for it, is not what it reaches in a step, in which all of them work. So before each piece they say
    what comes and how much of it they want, and all take the most that anyone wants. Ranks of other machines lose
    nothing by it.

    A rank that cannot go on says so once, in the place of its next word (`give_up`). The others go on by themselves
    from there, as they do where they find that they were about to measure different things. Nobody waits for anybody
    then.

    Args:
        group: the ranks; of one, every word is its own.
    """

    def __init__(self, group: Group) -> None:
        self._channel = group.channel(CHANNEL) if group.size > 1 else None

    def most(self, what: str, wanted: float) -> float:
        """Return the most that any rank wants of ``what``, when all have come to it; ``wanted`` where all are apart.

        Raises:
            LostRankError: a rank is gone.
        """
        if self._channel is None:
            return wanted
        answers = self._channel.gather_objects([what, wanted])
        if any(word is None or word[0] != what for word in answers):
            self._channel = None  # on all ranks: they have heard the same
            return wanted
        return max(float(word[1]) for word in answers)

    def meet(self, what: str) -> None:
        """Return when all ranks have come to ``what``; at once where they are apart."""
        self.most(what, 0.0)

    def give_up(self) -> None:
        """Tell the others to go on by themselves; idempotent."""
        if self._channel is not None:
            self._channel.gather_objects(None)
            self._channel = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.meet("the end")
        elif isinstance(error, Exception):  # who is told to stop at once does not talk
            self.give_up()
