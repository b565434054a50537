"""Set up the heap of the C library, in which tensors on a CPU lie as everything else does.

What is freed stays there until it is handed back. The heap has one arena, so that what one lane frees another one can
take. glibc gives the first thread beside the main one an arena of its own, so the number of arenas is set before a run
starts any thread.

That is for good, and for the whole process. So only a command does it (`own_process`), whose process is its own: where
outsize is a library, as in a notebook, thresholds and arenas stay those of whoever runs the process, and near the limit
free pages are handed back all the same.
"""

import ctypes
import logging
import threading
from functools import cache

# Parameters of mallopt(3), from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
# With room for holes: the most that glibc allows. Without: below 1 MiB a mapping costs more than it frees.
HEAP_THRESHOLD_BYTES = 2**25
TIGHT_THRESHOLD_BYTES = 2**20
# Trimming is done here, not by free().
TRIM_THRESHOLD_BYTES = 2**30

_log = logging.getLogger(__name__)
# Set by what runs the process: a command.
_OWNED = threading.Event()


def own_process() -> None:
    """Have runs choose what malloc keeps of freed memory from now on; all threads that start later share one heap.

    For the main function of a process, before it starts a thread; there is no way back.
    """
    _OWNED.set()
    _set(_M_ARENA_MAX, 1)


def is_owned() -> bool:
    """Return whether runs may change settings of the whole process for good."""
    return _OWNED.is_set()


def set_thresholds(*, heap: bool) -> bool:
    """Set glibc's thresholds where the process is a command's: keep what is freed in one heap, or give it back at once.

    Returns:
        Whether they were set; other C libraries have none.
    """
    if not is_owned():
        return False
    threshold = HEAP_THRESHOLD_BYTES if heap else TIGHT_THRESHOLD_BYTES
    done = _set(_M_MMAP_THRESHOLD, threshold) and _set(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
    if not done:
        _log.warning("this C library has no mallopt: resident memory may exceed the budget by what it keeps")
    return done


def trim() -> None:
    """Hand every free page of the heap back, e.g. after tokenising and before the first step."""
    malloc_trim = getattr(_libc(), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def _set(parameter: int, value: int) -> bool:
    mallopt = getattr(_libc(), "mallopt", None)
    return mallopt is not None and mallopt(parameter, value) == 1


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
