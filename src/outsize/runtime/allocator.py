"""Make the C allocator give memory back, where the device's memory is RAM and its budget is a promise.

glibc raises the size from which it maps memory directly to 32 MiB as a program frees large blocks; from then on
activations come from the heap, which fragments and does not shrink: 1.8 times the budget was seen. A fixed threshold
makes every large tensor a mapping of its own, which is gone when the tensor is.
"""

import ctypes
import logging

# Parameters of mallopt(3), from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
# Tensors below 1 MiB stay in the heap: mapping costs a page fault for every 4 KiB.
MMAP_THRESHOLD_BYTES = 2**20
TRIM_THRESHOLD_BYTES = 2**22
# Lanes allocate in a handful of threads; more arenas than this only keep more free memory.
ARENA_MAX = 2

_log = logging.getLogger(__name__)


def give_memory_back() -> bool:
    """Set glibc's thresholds for this process; returns whether they were set (other C libraries have none)."""
    try:
        libc = ctypes.CDLL(None)
        settings = (
            (_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
            (_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
            (_M_ARENA_MAX, ARENA_MAX),
        )
        done = all(libc.mallopt(name, value) == 1 for name, value in settings)
    except (OSError, AttributeError):
        done = False
    if not done:
        _log.warning("this C library has no mallopt: resident memory may exceed the budget by what it keeps")
    return done


def trim() -> None:
    """Ask the allocator to return what is free now, e.g. after tokenising and before the first step."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        _log.debug("no malloc_trim here")
