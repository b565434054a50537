"""Computing with another number of threads, which leaves nothing behind."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from outsize.runtime.engine.executor import release_team


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Let torch compute with ``count`` threads.

    Those that have helped end with it: a thread of OpenMP that has once run a loop inside a loop of three goes on as
    one of three, and MKL divides products of such a thread otherwise: tests that came later got other last bits.
    """
    former = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(former)
        release_team()
