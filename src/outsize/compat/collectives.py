"""The process group of all ranks, and its backend."""

from datetime import timedelta
from typing import Any

import torch


def world_group() -> Any:
    """Return the process group of all ranks that was initialized."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_group()


def limited_backend(group: Any, device: torch.device, seconds: float) -> Any:
    """Return the backend of ``group`` for tensors on ``device``, whose calls to come fail after ``seconds``."""
    backend = group._get_backend(device)
    backend._set_default_timeout(timedelta(seconds=seconds))
    return backend
