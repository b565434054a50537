"""What torch's profilers have no public name for."""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def allocations(work: Callable[[], T]) -> tuple[T, list[int]]:
    """Return what ``work`` returns, and the bytes of each allocation on the CPU in it; of a release, negative."""
    from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
    from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

    settings = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(settings)  # the present one, Kineto, says on standard error that it runs
    try:
        result = work()
    finally:
        events = [event for thread in _disable_profiler_legacy() for event in thread]
    return result, [num_bytes for event in events if (num_bytes := event.cpu_memory_usage())]


def of_all_threads() -> Any:
    """Return the setting of `torch.profiler.profile` that has it see threads which stand already."""
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=True)
