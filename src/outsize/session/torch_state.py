"""What torch keeps for the whole process: a run sets it, and leaves it as it was."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils import deterministic as uninitialised

from outsize.accelerators import CPU, Devices, count_of, kind_here, module_of
from outsize.errors import ConfigError


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
            stack.enter_context(_deterministic(devices))
        yield


@contextmanager
def _deterministic(devices: Devices) -> Iterator[None]:
    was = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = uninitialised.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        torch.use_deterministic_algorithms(True, warn_only=not devices.accelerated)
        # Nothing here reads memory that nobody wrote; to fill all of it costs a pass over activations.
        uninitialised.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if devices.accelerated and devices.index < count_of(devices.kind):
            _check_products_repeat(devices.torch_device)
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned_only)
        uninitialised.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def _check_products_repeat(device: torch.device) -> None:
    """Check that cuBLAS repeats its bits: torch looks at the environment at the first product alone, whosever that was.

    Raises:
        ConfigError: it does not.
    """
    try:
        torch.mm(torch.ones(1, 1, device=device), torch.ones(1, 1, device=device))
    except RuntimeError as error:
        if "CUBLAS_WORKSPACE_CONFIG" not in str(error):
            raise
        raise ConfigError(
            "train.deterministic: cuBLAS was used in this process before outsize was imported, or "
            "CUBLAS_WORKSPACE_CONFIG is set otherwise, so that products would not repeat their bits: set "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8 before Python starts, import outsize first, or set "
            "train.deterministic=false"
        ) from error
