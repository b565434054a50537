"""How the ranks of one start find each other in a store that may remember those of an earlier start.

Launchers that start processes again keep the store (torchrun does), and count the starts differently on each node. So
the ranks agree on a name for this start by themselves:

1. rank 0 makes up a name and writes it to ``session``;
2. every other rank reads the name, perhaps that of an earlier start, and answers under it with a word of its own;
3. when rank 0 has all answers to its name, it writes them down under it;
4. a rank that finds its own word there has met the others; one that does not reads ``session`` again.
"""

import json
import time
import uuid
from collections.abc import Callable

from torch.distributed import distributed_c10d as c10d

from outsize.errors import ConfigError, LostRankError

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
