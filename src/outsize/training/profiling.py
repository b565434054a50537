"""Steps under torch.profiler: their trace beside the timeline, with ranges named by op."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.profiler import ProfilerActivity, profile

from outsize.accelerators import VENDORS, kind_here
from outsize.compat.torch_private import of_all_threads
from outsize.runtime.device.driver import OpRanges

PROFILE = "profile.json"
# Steps of this process that are left alone: kernels and caches warm up. The first one recorded is that of
# timeline.json.
FIRST_PROFILED = 2


class StepProfiler:
    """Records some steps; a context manager.

    Args:
        run_dir: where the trace goes.
        num_steps: that are recorded; 0 records none.
        ranges: switched on meanwhile.
    """

    def __init__(self, run_dir: Path, num_steps: int, ranges: OpRanges) -> None:
        self._path = run_dir / PROFILE
        self._num_steps = num_steps
        self._ranges = ranges
        self._num_ended = 0
        self._profile: Any = None

    def step_ended(self, settle: Callable[[], None]) -> bool:
        """Begin or end a record between two steps; returns whether a trace has been written.

        Args:
            settle: returns when nothing of the step is under way any more: units may still have to be stepped when its
                loss is known, and they belong to its record.
        """
        self._num_ended += 1
        begins = self._num_steps > 0 and self._num_ended == FIRST_PROFILED
        ends = self._profile is not None and self._num_ended == FIRST_PROFILED + self._num_steps
        if begins or ends:
            settle()
        if begins:
            self._begin()
        return ends and self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _begin(self) -> None:
        kinds = [ProfilerActivity.CPU]
        kind = kind_here()
        if kind is not None and VENDORS[kind].activity:
            kinds.append(getattr(ProfilerActivity, VENDORS[kind].activity))
        # Lanes are threads that stand already: without this only those that begin from here on would be seen.
        self._profile = profile(activities=kinds, experimental_config=of_all_threads())
        self._profile.__enter__()
        self._ranges.on = True

    def _end(self) -> bool:
        if self._profile is None:
            return False
        self._ranges.on = False
        self._profile.__exit__(None, None, None)
        self._profile.export_chrome_trace(str(self._path))
        self._profile = None
        return True
