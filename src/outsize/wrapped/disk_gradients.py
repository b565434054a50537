"""Gradients that rest on disk, as far as torch's own clipping can go with them.

A parameter over a disk home has a ``.grad`` of the right shape and no bytes: a mark that a gradient is at home. Its
norm can be taken, which reads it, and it can be multiplied by what came of norms, which is noted and done in the step.
That is all that `torch.nn.utils.clip_grad_norm_` does, so it works unmodified. Everything else is refused, and so every
optimizer but `outsize.AdamW`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from outsize.errors import ConfigError

_QUESTIONS = frozenset({"__get__", "__set__", "size", "dim", "numel", "requires_grad_", "detach"})


class Number(torch.Tensor):
    """A scalar that came of norms of gradients on disk; it stays in host memory when sent to where they seem to be."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do what is asked, but send nothing anywhere."""
        if getattr(func, "__name__", "") == "to":
            return args[0]
        if getattr(func, "__name__", "") == "mul_" and isinstance(args[0], DiskGradient):
            return DiskGradient.__torch_function__(func, types, args, kwargs)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class DiskGradient(torch.Tensor):
    """The mark that a gradient is on disk; see `mark`."""

    _read: Callable[[], Tensor]
    _scale: Callable[[Tensor], None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Take a norm, note a factor, tell shape and place.

        Raises:
            ConfigError: anything else is asked for.
        """
        name = getattr(func, "__name__", str(func))
        with torch._C.DisableTorchFunctionSubclass():
            if name == "linalg_vector_norm" and isinstance(args[0], DiskGradient):
                return func(args[0]._read(), *args[1:], **(kwargs or {})).as_subclass(Number)
            if name == "mul_" and isinstance(args[1], Number):
                args[0]._scale(args[1].as_subclass(Tensor))
                return args[0]
            if name in _QUESTIONS:
                return func(*args, **(kwargs or {}))
        raise ConfigError(
            f"{name}: this gradient rests on disk, where outsize.AdamW alone can use it; or wrap the model with "
            'home="host" to have gradients in memory'
        )


def mark(
    shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor], scale: Callable[[Tensor], None]
) -> DiskGradient:
    """Return the mark of a gradient.

    Args:
        shape: of its parameter.
        dtype: of its parameter.
        read: reads it, flat.
        scale: notes a factor that it is multiplied by in the step.
    """
    made: DiskGradient = torch.empty(shape, dtype=dtype, device="meta").as_subclass(DiskGradient)
    made._read, made._scale = read, scale
    return made
