"""What torch keeps for the whole process: a run sets it, and leaves it as it was."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def borrowed_torch(*, deterministic: bool) -> Iterator[None]:
    """Give torch's random state and its choice of algorithms back when the context ends.

    Args:
        deterministic: whether only deterministic kernels are used meanwhile, where torch has them.
    """
    was = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if in_use else ()
    with torch.random.fork_rng(devices=devices):
        try:
            if deterministic:
                torch.use_deterministic_algorithms(True, warn_only=True)
            yield
        finally:
            torch.use_deterministic_algorithms(was, warn_only=warned_only)
