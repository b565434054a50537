"""Resident memory as a promise: what the C allocator keeps of what is freed is part of the budget.

A step frees and takes the same sizes over and over. Mapped one by one from the kernel, each costs a page fault for
every 4 KiB: a sixth of the processor time of a step here. Kept in glibc's heap they cost nothing, but the heap
fragments, and grew to 1.6 times a tight budget. So where the plan has room for a heap with holes, memory stays in the
heap, and a step that would go over its limit hands the free pages back first; where it has none, every large tensor is
a mapping of its own, gone when the tensor is.
"""

import ctypes
import logging
import mmap
import os
from functools import cache

# Parameters of mallopt(3), from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
# With a heap: the most that glibc allows. Without: below 1 MiB a mapping costs more than it frees.
HEAP_THRESHOLD_BYTES = 2**25
TIGHT_THRESHOLD_BYTES = 2**20
# Room for holes, in workspaces of one computation: what a heap without limit was seen to grow beyond its live bytes.
HEAP_WORKSPACES = 1.5
# Trimming is done here, not by free().
TRIM_THRESHOLD_BYTES = 2**30
# What one lane frees another one can take, and one heap is trimmed as a whole.
ARENA_MAX = 1
# What kernels and libraries keep inside themselves, beside a twentieth of the budget.
TOLERANCE_BYTES = 8 * 2**20

_STATM = "/proc/self/statm"
_log = logging.getLogger(__name__)


def set_thresholds(*, heap: bool) -> bool:
    """Set glibc's thresholds for this process: keep what is freed in one heap, or give it back at once.

    Returns:
        Whether they were set; other C libraries have none.
    """
    threshold = HEAP_THRESHOLD_BYTES if heap else TIGHT_THRESHOLD_BYTES
    settings = (
        (_M_MMAP_THRESHOLD, threshold),
        (_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
        (_M_ARENA_MAX, ARENA_MAX),
    )
    mallopt = getattr(_libc(), "mallopt", None)
    done = mallopt is not None and all(mallopt(name, value) == 1 for name, value in settings)
    if not done:
        _log.warning("this C library has no mallopt: resident memory may exceed the budget by what it keeps")
    return done


def trim() -> None:
    """Hand every free page of the heap back, e.g. after tokenising and before the first step."""
    malloc_trim = getattr(_libc(), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


class ResidentLimit:
    """Trims the heap before a computation that could take the process over its budget.

    What is free in the heap may be too scattered to serve the computation, so its workspace is counted as if nothing
    were. The tolerance is what kernels and libraries keep inside themselves.

    Args:
        budget_bytes: what may be added to the resident memory of this moment.
        workspace_bytes: the most that one computation takes, a part of the budget.

    Attributes:
        num_trims: how often memory was handed back.
    """

    def __init__(self, budget_bytes: int, workspace_bytes: int) -> None:
        self.num_trims = 0
        tolerance = budget_bytes // 20 + TOLERANCE_BYTES
        self._limit_bytes = resident_bytes() + budget_bytes - workspace_bytes + tolerance

    def keep(self) -> None:
        """Trim if need be; a look costs some microseconds, a trim about a millisecond."""
        if resident_bytes() > self._limit_bytes:
            trim()
            self.num_trims += 1


def resident_bytes() -> int:
    """Resident memory of the process now; 0 where the kernel does not tell."""
    try:
        descriptor = os.open(_STATM, os.O_RDONLY)
    except OSError:
        return 0
    try:
        return int(os.read(descriptor, 128).split()[1]) * mmap.PAGESIZE
    finally:
        os.close(descriptor)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
