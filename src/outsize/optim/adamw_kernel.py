"""AdamW in C over the planes of a home (native/adamw.c).

With fp32 moments the kernel does what the vector body of torch's fused AdamW does, operation by operation. That order
is no promise of torch's, so the kernel is compared with the torch at hand before it is used, and left alone where they
differ by a bit. What is left of a parameter after a multiple of 16 elements torch steps itself, as it rounds otherwise
there.
"""

import ctypes
from functools import cache
from math import sqrt
from typing import Any, Protocol

import torch
from torch import Tensor

from outsize import native
from outsize.compat.torch_private import fused_adamw
from outsize.optim.planes import StatePlanes
from outsize.optim.split_masters import low_pair
from outsize.optim.update import Update

# torch's vectors have 16 elements at most.
VECTOR = 16
STATES = {"fp32": 0, "bf16": 1, "int8": 2}


class Settings(Protocol):
    """What the kernel asks of `outsize.optim.adamw.PlaneAdamW`."""

    @property
    def betas(self) -> tuple[float, float]:
        """Decay rates of the moments."""

    @property
    def eps(self) -> float:
        """Added to the root."""

    @property
    def weight_decay(self) -> float:
        """Per unit of learning rate."""


class _Arguments(ctypes.Structure):
    """``struct adamw`` of native/adamw.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hi", "lo", "lo8", "ties", "master", "gradient")),
        *((name, ctypes.c_void_p) for name in ("exp_avg", "exp_avg_sq", "exp_avg_top", "exp_avg_sq_top")),
        ("count", ctypes.c_size_t),
        ("first", ctypes.c_size_t),
        ("gradient_is_bf16", ctypes.c_int32),
        ("state", ctypes.c_int32),
        ("key", ctypes.c_uint32),
        *((name, ctypes.c_float) for name in ("clip", "decay", "lerp", "beta2", "square", "correction")),
        *((name, ctypes.c_float) for name in ("eps", "step")),
    )


def step_native(settings: Settings, update: Update, planes: StatePlanes, gradient: Tensor) -> int:
    """Step planes; return how many elements, from the first on, have been stepped. See `UpdateRule.step_native`."""
    count = planes.numel
    if planes.moments == "fp32":
        count -= count % VECTOR
        if not agrees_with_torch(native.level()):
            return 0
    if count:
        _call(settings, update, planes, gradient, count)
        round_weights(planes, count)
    return count


def _call(settings: Settings, update: Update, planes: StatePlanes, gradient: Tensor, count: int) -> None:
    beta1, beta2 = settings.betas
    arguments = _Arguments(
        **common_arguments(planes, gradient, count, update),
        exp_avg=address(planes.exp_avg),
        exp_avg_sq=address(planes.exp_avg_sq),
        exp_avg_top=address(planes.exp_avg_scales),
        exp_avg_sq_top=address(planes.exp_avg_sq_scales),
        # Made in fp64 and rounded once, as torch does.
        decay=1.0 - update.lr * (settings.weight_decay * update.decay),
        lerp=1.0 - beta1,
        beta2=beta2,
        square=1.0 - beta2,
        correction=sqrt(1.0 - beta2**update.count),
        eps=settings.eps,
        step=-(update.lr / (1.0 - beta1**update.count)),
    )
    native.call("adamw", ctypes.byref(arguments), ctypes.c_int(torch.get_num_threads()))


def common_arguments(planes: StatePlanes, gradient: Tensor, count: int, update: Update) -> dict[str, Any]:
    """Return what every kernel is told of the first ``count`` elements: how masters lie, the gradient, the chances."""
    split = planes.master_low is not None
    low, low8 = low_pair(planes.master_low)
    return {
        "hi": address(planes.weights if split else None),
        "lo": address(low),
        "lo8": address(low8),
        "ties": address(planes.master_ties),
        "master": address(None if split else planes.weights if planes.master is None else planes.master),
        "gradient": address(gradient),
        "count": count,
        "first": update.first,
        "gradient_is_bf16": gradient.dtype is torch.bfloat16,
        "state": STATES[planes.moments],
        "key": update.key,
        "clip": update.clip,
    }


def round_weights(planes: StatePlanes, count: int) -> None:
    """Make the first ``count`` weights of separate masters; a kernel has written those of split ones."""
    if planes.master is not None:
        planes.weights[:count].copy_(planes.master[:count])


def address(plane: Tensor | None) -> int | None:
    """Return where a plane begins, for C; None stands for NULL."""
    return None if plane is None else plane.data_ptr()


class _Trial:
    """Settings under which the kernel is compared with torch."""

    def __init__(self, betas: tuple[float, float], weight_decay: float) -> None:
        self.betas, self.weight_decay, self.eps = betas, weight_decay, 1e-8


@cache
def agrees_with_torch(level: str) -> bool:
    """Return whether the kernel, with instruction set ``level`` in use, steps as this torch's fused AdamW does."""
    trials = (_Trial((0.9, 0.999), 0.1), _Trial((0.3, 0.95), 0.0))
    return all(_same_as_torch(trial) for trial in trials)


def _same_as_torch(trial: _Trial) -> bool:
    numbers = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0))
    numbers[3].square_()
    weights, gradient, exp_avg, exp_avg_sq = numbers
    planes = StatePlanes(weights=weights.clone(), exp_avg=exp_avg.clone(), exp_avg_sq=exp_avg_sq.clone())
    update = Update(lr=1e-3, count=7, decay=True, clip=1.0, first=0, key=0)
    _call(trial, update, planes, gradient, planes.numel)
    fused_adamw(
        weights, gradient, exp_avg, exp_avg_sq, 7, lr=1e-3, beta1=trial.betas[0], beta2=trial.betas[1],
        weight_decay=trial.weight_decay, eps=trial.eps,
    )  # fmt: skip
    both = ((planes.weights, weights), (planes.exp_avg, exp_avg), (planes.exp_avg_sq, exp_avg_sq))
    return all(one is not None and torch.equal(one, other) for one, other in both)
