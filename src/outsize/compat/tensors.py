"""What subclasses of `torch.Tensor` need that has no public name."""

from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor


def no_function_override() -> Any:
    """Return the ``__torch_function__`` of a subclass whose operations go straight to its ``__torch_dispatch__``."""
    return torch._C._disabled_torch_function_impl


def formed_like(kind: type[Tensor], form: Tensor, device: torch.device) -> Any:
    """Return a tensor of class ``kind`` that has no bytes, and shape, strides and dtype of ``form``."""
    return torch.Tensor._make_wrapper_subclass(
        kind,
        form.shape,
        strides=form.stride(),
        storage_offset=form.storage_offset(),
        dtype=form.dtype,
        device=device,
    )


def as_plain_tensors() -> AbstractContextManager[Any]:
    """Return a context in which subclasses of tensors are treated as tensors: no ``__torch_function__`` is called."""
    return cast(AbstractContextManager[Any], torch._C.DisableTorchFunctionSubclass())
