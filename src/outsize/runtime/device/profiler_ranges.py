"""Names of ops for profilers: while it is on, each op runs within a range that carries its text.

The ranges are those of `torch.profiler`, and on CUDA those of NVTX too, which Nsight shows. Off, an op costs one look
at a flag.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.profiler import record_function


class OpRanges:
    """A switch for all lanes.

    Args:
        nvtx: whether NVTX ranges are made, too.

    Attributes:
        on: may be switched at any time; ops that are running stay as they began.
    """

    def __init__(self, *, nvtx: bool) -> None:
        self.on = False
        self._nvtx = nvtx

    def around(self, op: object) -> AbstractContextManager[None]:
        """Return the context that an op runs in; its text is the name of the range."""
        return self._range(str(op)) if self.on else nullcontext()

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        if self._nvtx:
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        try:
            with record_function(name):
                yield
        finally:
            if self._nvtx:
                torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
