"""Ranks as processes of this machine, as torchrun would start them, but forked: torch is imported once for all.

A process that has computed something must not be forked: threads of its libraries do not come along. So `fork_ranks` is
for a script of its own, whose first deed it is.
"""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path


def free_port(address: str = "127.0.0.1") -> int:
    """Return a TCP port that nobody uses at the moment, of the loopback or of another address of this machine."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def rank_variables(rank: int, size: int, port: int, restarts: int = 0) -> dict[str, str]:
    """Return what torchrun would tell a process about itself."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
    }


def fork_ranks(
    size: int, work: Callable[[int], None], logs: Path, *, restarts: int = 0
) -> Sequence[BaseProcess]:
    """Start ``size`` processes that call ``work`` with their rank, and return them; wait for them with ``join``.

    Args:
        size: how many.
        work: what each does; its output goes to ``logs/<rank>.txt``, and its SystemExit is its status.
        logs: an existing directory.
        restarts: how often the ranks have been started before, as they are told.
    """
    port, context = free_port(), multiprocessing.get_context("fork")

    def one(rank: int) -> None:
        os.environ.update(rank_variables(rank, size, port, restarts))
        log = os.open(logs / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        work(rank)

    processes = [context.Process(target=one, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    return processes
