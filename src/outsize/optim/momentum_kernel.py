"""SGD and Lion in C over the planes of a home (native/momentum.c).

Lion is of single operations, in C as in torch ops. torch's fused SGD is plain C++ whose compiler chooses which products
it fuses with a sum; so with a momentum in fp32 the kernel is compared with the torch at hand before it is used, in each
way in which that may have come out, and left alone where none is the same to the bit. What is left of a parameter after
a multiple of 16 elements torch steps itself, as for AdamW.
"""

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from outsize import native
from outsize.compat.optimizers import fused_sgd
from outsize.optim.adamw_kernel import VECTOR, address, common_arguments, round_weights
from outsize.optim.planes import StatePlanes
from outsize.optim.update import Update

_SGD, _LION = 0, 1
# No product is fused; or those alone in a sum, and of the momentum's two that of the momentum, or of the gradient.
_UNFUSED, _FORMS = 0, (0, 1, 2)


class _Arguments(ctypes.Structure):
    """``struct momentum`` of native/momentum.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hi", "lo", "lo8", "ties", "master", "gradient", "moment")),
        ("moment_top", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("first", ctypes.c_size_t),
        *((name, ctypes.c_int32) for name in ("gradient_is_bf16", "state", "rule", "fused")),
        *((name, ctypes.c_int32) for name in ("nesterov", "first_step")),
        ("key", ctypes.c_uint32),
        *((name, ctypes.c_float) for name in ("clip", "decay", "kept", "taken", "share", "rest", "lr")),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """Settings of `outsize.optim.sgd.SGD`."""

    momentum: float
    dampening: float
    nesterov: bool
    weight_decay: float


def step_sgd(settings: Sgd, update: Update, planes: StatePlanes, gradient: Tensor) -> int:
    """Step planes; return how many elements, from the first on, have been stepped. See `UpdateRule.step_native`."""
    count, form = planes.numel, _UNFUSED
    if planes.moments == "fp32":
        count -= count % VECTOR
        found = form_of_torch(native.level())
        if found is None:
            return 0
        form = found
    if count:
        _call_sgd(settings, update, planes, gradient, count, form)
        round_weights(planes, count)
    return count


def step_lion(
    betas: tuple[float, float], weight_decay: float, update: Update, planes: StatePlanes, gradient: Tensor
) -> int:
    """Step planes; return how many elements have been stepped: all. See `UpdateRule.step_native`."""
    share, kept = betas
    _call(
        planes,
        gradient,
        planes.numel,
        update,
        rule=_LION,
        decay=1.0 - update.lr * (weight_decay * update.decay),
        kept=kept,
        taken=1.0 - kept,
        share=share,
        rest=1.0 - share,
    )
    round_weights(planes, planes.numel)
    return planes.numel


def _call_sgd(
    settings: Sgd, update: Update, planes: StatePlanes, gradient: Tensor, count: int, form: int
) -> None:
    _call(
        planes,
        gradient,
        count,
        update,
        rule=_SGD,
        fused=form,
        nesterov=settings.nesterov,
        first_step=update.count == 1,
        decay=settings.weight_decay * update.decay,
        kept=settings.momentum,
        taken=1.0 - settings.dampening,
    )


def _call(planes: StatePlanes, gradient: Tensor, count: int, update: Update, **numbers: float) -> None:
    arguments = _Arguments(
        **common_arguments(planes, gradient, count, update),
        moment=address(planes.exp_avg),
        moment_top=address(planes.exp_avg_scales),
        lr=update.lr,
        **numbers,
    )
    native.call("momentum", ctypes.byref(arguments), ctypes.c_int(torch.get_num_threads()))


@cache
def form_of_torch(level: str) -> int | None:
    """Return the way in which the kernel, with instruction set ``level`` in use, steps as this torch's fused SGD does.

    None where it does in no way.
    """
    trials = (
        Sgd(momentum=0.9, dampening=0.3, nesterov=True, weight_decay=0.1),
        Sgd(momentum=0.95, dampening=0.0, nesterov=False, weight_decay=0.01),
        Sgd(momentum=0.0, dampening=0.0, nesterov=False, weight_decay=0.1),
    )
    agreeing = (form for form in _FORMS if all(_same_as_torch(trial, form) for trial in trials))
    return next(agreeing, None)


def _same_as_torch(trial: Sgd, form: int) -> bool:
    weights, gradient, momentum = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0))
    for count in (1, 7):
        planes = StatePlanes(weights=weights.clone(), exp_avg=momentum.clone() if trial.momentum else None)
        update = Update(lr=1e-3, count=count, decay=True, clip=1.0, first=0, key=0)
        _call_sgd(trial, update, planes, gradient, planes.numel, form)
        fused_sgd(
            weights, gradient.clone(), [momentum] if trial.momentum else [],
            weight_decay=trial.weight_decay, momentum=trial.momentum, lr=1e-3, dampening=trial.dampening,
            nesterov=trial.nesterov, is_first_step=count == 1,
        )  # fmt: skip
        if not torch.equal(planes.weights, weights):
            return False
        if planes.exp_avg is not None and not torch.equal(planes.exp_avg, momentum):
            return False
    return True
