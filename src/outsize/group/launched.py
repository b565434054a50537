"""Ranks as torchrun starts them: environment, and how they meet in a store.

What torchrun tells a process about itself, by environment variables, and the group that comes of it.

How the ranks of one start find each other in a store that may remember those of an earlier start.

Launchers that start processes again keep the store (torchrun does), and count the starts differently on each node. So
the ranks agree on a name for this start by themselves:

1. rank 0 makes up a name and writes it to ``session``;
2. every other rank reads the name, perhaps that of an earlier start, and answers under it with a word of its own;
3. when rank 0 has all answers to its name, it writes them down under it;
4. a rank that finds its own word there has met the others; one that does not reads ``session`` again.
"""

import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d as c10d

from outsize.errors import ConfigError, LostRankError

if TYPE_CHECKING:
    from outsize.group.group import Group


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
    if not {"RANK", "WORLD_SIZE"} & set(there):
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
) -> "Group":
    """Return the group of a launch: of one, or over gloo.

    Raises:
        LostRankError: the meeting place does not answer, or not all ranks came within ``timeout_s``.
    """
    from outsize.group.gloo import GlooGroup
    from outsize.group.group import SingleGroup

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
