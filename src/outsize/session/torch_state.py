"""What torch keeps for the whole process: a run sets it, and leaves it as it was."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils import deterministic as uninitialised

from outsize.accelerators import CPU, Devices, count_of, kind_here, module_of

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def borrowed_torch(*, deterministic: bool, devices: Devices = CPU) -> Iterator[None]:
    """Give torch's random state and its choice of algorithms back when the context ends.

    Args:
        deterministic: whether only deterministic kernels are used meanwhile. On a GPU an operation without one raises:
            if it may pass with a warning, attention takes the faster backward as well, which is not deterministic.
        devices: that compute.
    """
    kind = kind_here()
    in_use = kind is not None and module_of(kind).is_initialized()
    drawn_from = range(count_of(kind)) if kind is not None and in_use else ()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=drawn_from, device_type=kind or "cpu"))
        if deterministic:
            stack.enter_context(_deterministic(warn_only=not devices.accelerated))
        yield


@contextmanager
def _deterministic(warn_only: bool) -> Iterator[None]:
    was = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = uninitialised.fill_uninitialized_memory  # type: ignore[attr-defined]
    workspace = os.environ.get(CUBLAS_WORKSPACE)
    try:
        # cuBLAS repeats itself only where its workspace is one of two.
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        # Nothing here reads memory that nobody wrote; to fill all of it costs a pass over activations.
        uninitialised.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned_only)
        uninitialised.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        if workspace is None:
            del os.environ[CUBLAS_WORKSPACE]
