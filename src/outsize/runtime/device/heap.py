"""Memory of the process: the heap of the C library, and what is handed back of it.

Tensors on a CPU lie in that heap as everything else does. What is freed stays there until it is handed back. The heap
has one arena, so that what one lane frees another one can take. glibc gives the first thread beside the main one an
arena of its own, so the number of arenas is set before a run starts any thread.

That is for good, and for the whole process. So only a command does it (`own_process`), whose process is its own: where
outsize is a library, as in a notebook, thresholds and arenas stay those of whoever runs the process, and near the limit
free pages are handed back all the same.

A step frees and takes the same sizes over and over. Mapped one by one from the kernel, each costs a page fault for
every 4 KiB: a fifth of the processor time of a step (docs/log.md). Kept in glibc's heap they cost nothing, but a heap
has holes. So where the plan has room for some, memory stays in the heap, and whenever the process is seen over its
limit, in the middle of a backward too, the free pages are handed back; where it has none, every large tensor is a
mapping of its own, gone when the tensor is.
"""

import ctypes
import logging
import math
import mmap
import os
import threading
import time
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

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


# Room for holes, in workspaces of one computation: what a heap grows between two looks at the limit. Its holes were
# 0.1 to 0.2 GiB where tensors fit again where they have lain, and 0.5 GiB and more where they do not (docs/log.md).
HEAP_WORKSPACES = 0.5
# Pages of the libraries' own code that are touched by and by: some 20 MiB were seen. And holes, as far as the promise
# of 48 MiB has room for them: with 16 MiB in all, free pages were handed back four times as often (docs/log.md).
TOLERANCE_BYTES = 32 * 2**20
# After a trim what is left is alive; to trim again pays once more than this was taken.
AGAIN_BYTES = 8 * 2**20
# Between two looks at the limit. Kernels zero fresh pages at some 10 GB/s, so what comes meanwhile is within the
# tolerance; and each look gives the interpreter away, for which a lane that computes then waits.
LOOK_S = 1e-3

_STATM = "/proc/self/statm"


def begin_run(*, heap: bool) -> None:
    """Start with little that is free: for the steps of a run, after all that measured and tokenised.

    Args:
        heap: whether its plan has room for what a heap keeps.
    """
    set_thresholds(heap=heap)
    if not heap and is_owned():
        keep_no_kernel_buffers()
    trim()


def keep_no_kernel_buffers() -> None:
    """Have MKL give its packing buffers back after each call, for the rest of the process, where torch has MKL.

    They are some 10 MiB per thread. The function is behind ``mkl_disable_fast_mm`` of MKL's own reference.
    """
    try:
        ctypes.CDLL("libtorch_cpu.so").mkl_serv_disable_fast_mm()
    except (OSError, AttributeError):
        _log.debug("torch was built without MKL, or hides it")


class ResidentLimit:
    """Hands free memory of the heap back where the process is over its budget.

    Args:
        before_bytes: resident memory before anything was done.
        budget_bytes: of the device: what its computations may add to that.
        host_bytes: what else is going to be added, to the byte.

    Attributes:
        num_trims: how often memory was handed back.
    """

    def __init__(self, before_bytes: int, budget_bytes: int, host_bytes: int = 0) -> None:
        self.num_trims = 0
        self._limit_bytes = before_bytes + host_bytes + budget_bytes + TOLERANCE_BYTES
        self._trim_above = self._limit_bytes
        self._looked_s = -math.inf

    def keep(self) -> None:
        """Trim if need be; a look costs some microseconds, a trim about a millisecond."""
        now_s = time.perf_counter()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        resident = resident_bytes()
        if resident > self._trim_above:
            trim()
            self.num_trims += 1
            resident = resident_bytes()
            self._trim_above = resident + AGAIN_BYTES
        # What is left after a trim is alive, and may die: then the limit counts again.
        self._trim_above = max(self._limit_bytes, min(self._trim_above, resident + AGAIN_BYTES))

    def watched(self) -> AbstractContextManager[None]:
        """A context that keeps the limit at every tensor that autograd saves or uses: all through a backward."""
        import torch

        self.keep()
        return torch.autograd.graph.saved_tensors_hooks(self._saved, self._used)

    def _saved(self, tensor: "Tensor") -> "Tensor":
        self.keep()
        return tensor.detach()  # a result that its own graph holds would keep that graph alive for ever

    def _used(self, tensor: "Tensor") -> "Tensor":
        self.keep()
        return tensor


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
