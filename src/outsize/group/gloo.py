"""Ranks over the network, or over the loopback of one machine: tensors go by torch's gloo, point to point.

Collectives of gloo have to be called in one order by all ranks of a process group, and add in an order of their own. So
only its messages are used: each channel is a tag, and `Group` makes the rest.
"""

import contextlib
import zlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from outsize.errors import LostRankError
from outsize.group.group import Group
from outsize.group.launched import meet
from outsize.group.liveness import Liveness

# A rank that beats but does not come to where the others wait: torch's own limit for gloo is as long.
WAIT_S = 1800.0
# How long rank 0 stays for the others, who may be reading from the store that it holds.
_LEAVE_S = 10.0
# A tag that no message has.
_NEVER_SENT = 2**31 - 1


class Messages(Protocol):
    """What is used of a `ProcessGroupGloo`."""

    def rank(self) -> int:
        """Number of this rank."""

    def size(self) -> int:
        """How many there are."""

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Any:
        """Begin to send one tensor."""

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        """Begin to receive one tensor."""


class GlooGroup(Group):
    """The ranks of one rendezvous; a context manager, which leaves with the error that passes through it.

    Args:
        store: where the ranks meet, the same for all.
        rank: of this process.
        size: how many processes come.
        timeout_s: seconds without a heartbeat after which a rank is lost, and those to wait for all to come.
        wait_s: seconds that a call waits for a rank that beats but does not come.

    Attributes:
        timeout_s: as given.
        store: the same, for keys of this start alone; for process groups of torch's.

    Raises:
        LostRankError: not all ranks came in time; names one that did not.
    """

    def __init__(
        self, store: c10d.Store, rank: int, size: int, *, timeout_s: float = 60.0, wait_s: float = WAIT_S
    ) -> None:
        super().__init__()
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._tag = 0
        self._wait = timedelta(seconds=wait_s)
        self._closed = False
        self._ends: list[Callable[[], None]] = []
        session = meet(store, rank, size, timeout_s)
        beats = c10d.PrefixStore(f"outsize/{session}/alive", store.clone())  # type: ignore[attr-defined]
        self._liveness = Liveness(beats, rank, size, timeout_s=timeout_s, on_loss=self._break_off)
        self.store = c10d.PrefixStore(f"outsize/{session}", store)
        self._messages: Messages | None = None
        try:
            self._messages = _messages(self.store, rank, size, timeout_s)
        except RuntimeError as error:
            lost = self.blame(error) or LostRankError(f"not all ranks can be connected to: {error}")
            self._liveness.leave(lost)
            raise lost from error
        self._liveness.start()

    def channel(self, name: str) -> "GlooChannel":
        """Return the same ranks, with messages of their own."""
        return GlooChannel(self, zlib.crc32(name.encode()) % _NEVER_SENT)

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Send to and receive from each other rank, see `Group.exchange`."""
        self.exchange_tagged(outgoing, incoming, self._tag)

    def exchange_tagged(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int
    ) -> None:
        """The same, among the messages with this tag."""
        if self._liveness.lost is not None:
            raise self._again(self._liveness.lost)
        if self._messages is None:
            raise ValueError("the group is closed")
        peer = self.rank
        try:
            works = []
            for peer, tensor in incoming.items():
                if tensor.numel():
                    works.append((peer, self._messages.recv([_bytes(tensor)], peer, tag)))
            for peer, tensor in outgoing.items():
                if tensor.numel():
                    works.append((peer, self._messages.send([_bytes(tensor)], peer, tag)))
            for peer, work in works:  # noqa: B007 (whom to blame)
                work.wait(self._wait)
        except RuntimeError as error:
            lost = self._liveness.blame(peer, error)
            assert lost is not None
            raise self._again(lost) from error

    def blame(self, error: RuntimeError) -> LostRankError | None:
        """Return which rank is lost, where that is why a process group on `store` failed; None where all beat on."""
        lost = self._liveness.blame(None, error)
        return None if lost is None else self._again(lost)

    def on_loss(self, end: Callable[[], None]) -> None:
        """Have ``end`` called, from another thread, when a rank is lost: to end what waits for it elsewhere."""
        self._ends.append(end)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group; without an error only after all ranks, which may still read sent data or the store."""
        if self._closed:
            return
        self._closed = True
        self._liveness.leave(error)
        if error is not None:
            self._break_off()  # threads of this rank may still wait for the others
        if error is None or self.rank == 0:
            self._liveness.wait_until_all_left(_LEAVE_S)
        self._messages = None  # with it its connections, and whoever still waits for this rank knows

    def __enter__(self) -> "GlooGroup":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def _break_off(self) -> None:
        """End whatever waits for a lost rank."""
        if self._messages is not None:
            break_off(self._messages)
        for end in self._ends:
            end()

    def _again(self, lost: LostRankError) -> LostRankError:
        """Return an error of its own for each who raises it: a traceback belongs to one thread."""
        return LostRankError(str(lost), lost.rank)


class GlooChannel(Group):
    """A channel of a `GlooGroup`."""

    def __init__(self, group: GlooGroup, tag: int) -> None:
        super().__init__()
        self._whole = group
        self._tag = tag
        self.rank, self.size = group.rank, group.size

    def channel(self, name: str) -> "GlooChannel":
        """Return another channel of the same group."""
        return self._whole.channel(name)

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Send to and receive from each other rank, see `Group.exchange`."""
        self._whole.exchange_tagged(outgoing, incoming, self._tag)

    def close(self, error: BaseException | None = None) -> None:
        """Nothing: a channel is closed with its group."""


def _messages(store: c10d.Store, rank: int, size: int, timeout_s: float) -> Messages:
    """Connect to all ranks; what waits for messages later has a time limit of its own."""
    backend = c10d.ProcessGroupGloo(c10d.PrefixStore("gloo", store), rank, size, timedelta(seconds=timeout_s))
    return cast(Messages, backend)


def break_off(messages: Messages) -> None:
    """Have every call on a process group fail that waits for another rank.

    Gloo has no call for that (``abort`` of torch 2.13 does nothing), but a wait that runs out of time closes all
    connections of its process group.
    """
    with contextlib.suppress(RuntimeError):
        never = messages.recv([torch.empty(1)], (messages.rank() + 1) % messages.size(), _NEVER_SENT)
        never.wait(timedelta(milliseconds=1))


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes ``[n]``: gloo does not know all dtypes."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"a contiguous tensor on the CPU is needed, got one on {tensor.device}")
    return tensor.reshape(-1).view(torch.uint8)
