"""Names of ops for profilers: while it is on, each op runs within a range that carries its text.

The ranges are those of `torch.profiler`, and those of the driver's own profiler, on CUDA NVTX, which Nsight shows. Off,
an op costs one look at a flag.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.profiler import record_function

from outsize.accelerators import vendor_of


class OpRanges:
    """A switch for all lanes.

    Args:
        device: that the ops compute on.

    Attributes:
        on: may be switched at any time; ops that are running stay as they began.
    """

    def __init__(self, device: torch.device) -> None:
        self.on = False
        self._driver = vendor_of(device).ranges

    def around(self, op: object) -> AbstractContextManager[None]:
        """Return the context that an op runs in; its text is the name of the range."""
        return self._range(str(op)) if self.on else nullcontext()

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        with self._driver(name), record_function(name):
            yield
