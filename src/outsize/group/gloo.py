"""Ranks started by torchrun: how they meet in a store, and tensors between them by gloo.

Collectives of gloo have to be called in one order by all ranks of a process group, and add in an order of their own. So
only its messages are used: each channel is a tag, and `Group` makes the rest.

The store in which the ranks of one start find each other may remember those of an earlier start: launchers that
start processes again keep the store (torchrun does), and count the starts differently on each node. So the ranks
agree on a name for this start by themselves:

1. rank 0 makes up a name and writes it to ``session``;
2. every other rank reads the name, perhaps that of an earlier start, and answers under it with a word of its own;
3. when rank 0 has all answers to its name, it writes them down under it;
4. a rank that finds its own word there has met the others; one that does not reads ``session`` again.
"""

import contextlib
import json
import os
import time
import uuid
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from outsize.errors import ConfigError, LostRankError
from outsize.group.group import Group, SingleGroup
from outsize.group.liveness import Liveness

# Set by torchrun, Ray Train, and by hand under SLURM's srun. Two of them alone are no launch.
REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """One process among several.

    Attributes:
        rank: of this process, from 0.
        size: how many processes there are.
        local_rank: the same among those of this machine.
        local_size: processes of this machine.
        address: host at which all meet.
        port: the same.
        restarts: how often the launcher has started the processes again.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    restarts: int = 0

    @property
    def num_nodes(self) -> int:
        """Machines, where all have as many processes."""
        return -(-self.size // self.local_size)

    def describe(self) -> str:
        """Describe the rank in a line for people."""
        again = f", restarted {self.restarts} times" if self.restarts else ""
        return (
            f"rank {self.rank} of {self.size} on {self.num_nodes} nodes, at {self.address}:{self.port}{again}"
        )


def launched(variables: Mapping[str, str] = os.environ) -> Launched | None:
    """Return what the launcher says, or None where this process was not launched as one of several.

    Raises:
        ConfigError: some of the variables are there and others are not, or one is no number.
    """
    there = [name for name in REQUIRED if variables.get(name)]
    if "RANK" not in there and variables.get("WORLD_SIZE", "") in ("", "1"):
        return None
    missing = [name for name in REQUIRED if name not in there]
    if missing:
        raise ConfigError(
            f"{', '.join(there)} are set but {', '.join(missing)} are not: start all processes with torchrun, or set "
            "all of them, or none"
        )
    rank, size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
    if not 0 <= rank < size:
        raise ConfigError(f"RANK={rank} of WORLD_SIZE={size}: ranks are numbered from 0")
    return Launched(
        rank=rank,
        size=size,
        local_rank=_number(variables, "LOCAL_RANK", 0),
        local_size=_number(variables, "LOCAL_WORLD_SIZE", 1),
        address=variables["MASTER_ADDR"],
        port=_number(variables, "MASTER_PORT"),
        restarts=_number(variables, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def open_group(
    place: Launched | None, *, timeout_s: float, variables: Mapping[str, str] = os.environ
) -> Group:
    """Return the group of a launch: of one, or over gloo.

    Raises:
        LostRankError: the meeting place does not answer, or not all ranks came within ``timeout_s``.
    """
    if place is None or place.size == 1:
        return SingleGroup()
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # torchrun keeps the store in its agent, where it has one; otherwise rank 0 does.
    agent = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            place.address,
            place.port,
            is_master=place.rank == 0 and not agent,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,  # `GlooGroup` does, and can say who did not come
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise LostRankError(
            f"rank {place.rank} cannot reach {place.address}:{place.port} (MASTER_ADDR, MASTER_PORT): {first_line}",
            0,
        ) from error
    return GlooGroup(store, place.rank, place.size, timeout_s=timeout_s)


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"{name}={text!r} is no whole number") from None


_POLL_S = 0.02


def meet(store: c10d.Store, rank: int, size: int, timeout_s: float) -> str:
    """Return the name of this start, the same on all ranks, when all of them have come.

    Raises:
        LostRankError: one did not come within ``timeout_s``; names it.
        ConfigError: there is no such rank.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"rank {rank} of {size}: ranks are numbered from 0; look at RANK and WORLD_SIZE")
    word = uuid.uuid4().hex
    try:
        return (
            _invite(store, size, word, timeout_s) if rank == 0 else _join(store, rank, size, word, timeout_s)
        )
    except RuntimeError as error:
        raise LostRankError(
            f"the meeting place of the ranks (MASTER_ADDR:MASTER_PORT) no longer answers: rank 0 is lost: {error}",
            0,
        ) from error


def _invite(store: c10d.Store, size: int, session: str, timeout_s: float) -> str:
    store.set("outsize/session", session)
    answers = {peer: f"outsize/{session}/answer/{peer}" for peer in range(1, size)}
    if not _until(lambda: store.check(list(answers.values())), timeout_s):
        missing = [peer for peer, key in answers.items() if not store.check([key])] or [size - 1]
        raise _did_not_come(missing, size, timeout_s)
    store.set(f"outsize/{session}/met", json.dumps([store.get(key).decode() for key in answers.values()]))
    return session


def _join(store: c10d.Store, rank: int, size: int, word: str, timeout_s: float) -> str:
    session = ""

    def met() -> bool:
        nonlocal session
        if store.check(["outsize/session"]) and (now := store.get("outsize/session").decode()) != session:
            session = now
            store.set(f"outsize/{session}/answer/{rank}", word)
        done = f"outsize/{session}/met"
        return bool(session) and store.check([done]) and word in json.loads(store.get(done))

    if not _until(met, timeout_s):
        answers = [f"outsize/{session}/answer/{peer}" for peer in range(1, size)]
        missing = [peer for peer, key in enumerate(answers, start=1) if not store.check([key])]
        raise _did_not_come(missing if session and missing else [0], size, timeout_s)
    return session


def _until(done: Callable[[], bool], timeout_s: float) -> bool:
    until = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True


def _did_not_come(missing: list[int], size: int, timeout_s: float) -> LostRankError:
    named = ", ".join(map(str, missing))
    text = (
        f"rank {named} of {size} did not come within {timeout_s:g} s: look at its output, at MASTER_ADDR and "
        "MASTER_PORT there, and at firewalls between"
    )
    return LostRankError(text, missing[0])


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

    Attributes:
        timeout_s: as given.
        store: the same, for keys of this start alone; for process groups of torch's.

    Raises:
        LostRankError: not all ranks came in time; names one that did not.
    """

    def __init__(self, store: c10d.Store, rank: int, size: int, *, timeout_s: float = 60.0) -> None:
        super().__init__()
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._tag = 0
        self._wait = timedelta(seconds=WAIT_S)
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
