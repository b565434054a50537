"""One team of OpenMP threads at a time, so that its threads may spin between two parallel loops.

libgomp starts a team of its own for each thread that computes, and keeps it. While all teams together have more threads
than there are cores, none spins (``gomp_throttled_spin_count_var`` of its env.c): each of thousands of loops in a step
then puts threads to sleep and wakes them up, which made steps up to a tenth longer on two cores (docs/log.md).

Ending the team also makes results independent of what the process computed before: a helping thread keeps for good the
number of threads that holds at its first loop inside a loop (``lazy_init_num_threads`` of ATen/Parallel.h), and MKL
divides that thread's products by it.
"""

import ctypes
from functools import cache


def release_team() -> None:
    """End the threads that wait for loops of the calling thread; its next loop starts others, in some 50 us."""
    library = _libgomp()
    if library is not None:
        library.omp_pause_resource_all(1)  # omp_pause_soft: settings stay


@cache
def _libgomp() -> ctypes.CDLL | None:
    """Return the OpenMP that torch is linked with where it is GNU's; that of LLVM pauses the teams of all threads."""
    try:
        library = ctypes.CDLL("libtorch_cpu.so")
    except OSError:
        return None
    is_gnu = hasattr(library, "omp_pause_resource_all") and not hasattr(library, "__kmpc_fork_call")
    return library if is_gnu else None
