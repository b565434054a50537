"""AdamW over flat buffers: in torch operations, and its kernel in C.

Both are bit for bit ``torch.optim.AdamW(fused=True)`` on separate parameters. A unit is stepped whole or in tiles.
torch's fused kernel works element by element, but rounds its scalar tail otherwise than its vector body, so a piece may
end only where its parameter ends (its tail is then the parameter's own) or at a multiple of 16 elements (it then has
none). Tiles start at multiples of 2048 elements and parameters at multiples of 64. So parameters that touch, without
padding between them, have no tail and are stepped as one: a block is two or three pieces, not ten, and each piece that
is saved is a fork and a join of all threads.
"""

import ctypes
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite, sqrt
from typing import Any, Protocol

import torch
from torch import Tensor

from outsize import native
from outsize.compat.torch_private import fused_adamw
from outsize.model.sizes.model_spec import PLANE_ELEMENTS, UnitSpec
from outsize.optim.planes import StatePlanes, Update

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
    """Step planes; return how many elements, from the first on, have been stepped. See `UpdateRule.step_native`.

    With fp32 moments the kernel does what the vector body of torch's fused AdamW does, operation by operation. That
    order is no promise of torch's, so the kernel is compared with the torch at hand before it is used, and left alone
    where they differ by a bit. What is left of a parameter after a multiple of 16 elements torch steps itself, as it
    rounds otherwise there.
    """
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
    low, short = planes.master_low, planes.master_low is not None and planes.master_low.dtype is torch.int8
    return {
        "hi": address(planes.weights if split else None),
        "lo": address(None if short else low),
        "lo8": address(low if short else None),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneAdamW:
    """Settings of AdamW (Loshchilov and Hutter, 2019, algorithm 2); the learning rate comes with each step.

    Attributes:
        betas: decay rates of the two moments, each at least 0 and below 1.
        eps: added to the root of the second moment, at least 0.
        weight_decay: decoupled weight decay per unit of learning rate, at least 0.

    Raises:
        ValueError: a value outside its range.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        check_betas(self.betas)
        check_numbers(eps=self.eps, weight_decay=self.weight_decay)

    @property
    def num_moments(self) -> int:
        """Two."""
        return 2

    def update(
        self, update: Update, master: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], *, exact: bool
    ) -> None:
        """Update in torch ops, see `outsize.optim.planes.UpdateRule`; where not ``exact``, with a division less."""
        exp_avg, exp_avg_sq = moments
        weight_decay = self.weight_decay * update.decay
        if exact:
            fused_adamw(
                master,
                gradient,
                exp_avg,
                exp_avg_sq,
                update.count,
                lr=update.lr,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=weight_decay,
                eps=self.eps,
            )
            return
        beta1, beta2 = self.betas
        exp_avg.add_((gradient - exp_avg).mul_(1.0 - beta1))
        exp_avg_sq.mul_(beta2).add_((gradient * (1.0 - beta2)).mul_(gradient))
        inverse = torch.tensor(sqrt(1.0 - beta2**update.count), dtype=torch.float32).reciprocal_()
        # torch's own sqrt of fp32 may be a library's, which is not always the nearest.
        root = exp_avg_sq.to(torch.float64).sqrt_().to(torch.float32).mul_(inverse).add_(self.eps)
        step = -(update.lr / (1.0 - beta1**update.count))
        master.mul_(1.0 - update.lr * weight_decay).add_((exp_avg * step).div_(root))

    def resident(self, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        """Return torch's own, see `outsize.optim.planes.UpdateRule`."""
        return torch.optim.AdamW(groups, lr=lr, betas=self.betas, eps=self.eps, fused=True)

    def step_native(self, update: Update, planes: StatePlanes, gradient: Tensor) -> int:
        """Step with the C kernel, see `outsize.optim.planes.UpdateRule`."""
        return step_native(self, update, planes, gradient)


@dataclass(frozen=True, slots=True)
class StepPiece:
    """Neighbouring parameters that step alike, in elements from the start of the range.

    Attributes:
        start: first element.
        stop: end.
        decay: factor of weight decay.
        lr_scale: factor of the learning rate.
        count: how often they have been stepped, this step included.
    """

    start: int
    stop: int
    decay: float
    lr_scale: float
    count: int


def pieces_of(
    unit: UnitSpec, start: int, stop: int, step: int | Mapping[str, int], skip: AbstractSet[str]
) -> list[StepPiece]:
    """Cut the parameters that step to the range ``start`` to ``stop``, and join those that touch and step alike."""
    pieces: list[StepPiece] = []
    for tensor in unit.tensors:
        first = max(tensor.offset, start) - start
        last = min(tensor.offset + tensor.numel, stop) - start
        if first >= last or not tensor.trainable or tensor.name in skip:
            continue
        count = step if isinstance(step, int) else step[tensor.name]
        piece = StepPiece(first, last, tensor.decay, tensor.lr_scale, count)
        previous = pieces[-1] if pieces else None
        if previous and previous == replace(piece, start=previous.start, stop=first):
            piece = replace(piece, start=pieces.pop().start)
        pieces.append(piece)
    return pieces


def check_betas(betas: tuple[float, float]) -> None:
    """Raise ValueError where ``betas`` are not two decay rates."""
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas must be two numbers of [0, 1), not {betas}")


def check_numbers(**numbers: float) -> None:
    """Raise ValueError where one of ``numbers`` is not finite or below 0, with its name."""
    for name, value in numbers.items():
        if not (isfinite(value) and value >= 0.0):
            raise ValueError(f"{name} must be a finite number of at least 0, not {value}")


def check_range(unit: UnitSpec, start: int, stop: int, lr: float) -> None:
    """Raise ValueError where elements ``start`` to ``stop`` are no tiles of ``unit``, or ``lr`` is no learning rate."""
    if start % PLANE_ELEMENTS or stop % PLANE_ELEMENTS or not 0 <= start <= stop <= unit.numel:
        raise ValueError(
            f"elements {start}..{stop} of {unit.name}: need multiples of {PLANE_ELEMENTS}"
            f" within 0..{unit.numel}"
        )
    if not (isfinite(lr) and lr >= 0.0):
        raise ValueError(f"learning rate must be a finite number of at least 0, not {lr}")
