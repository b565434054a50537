"""AdamW on flat planes, in place: bit for bit ``torch.optim.AdamW(fused=True)`` on separate parameters.

A unit is stepped whole or in tiles. torch's fused kernel works element by element, but rounds its scalar tail
otherwise than its vector body, so a piece may end only where its parameter ends (its tail is then the
parameter's own) or at a multiple of 16 elements (it then has none). Tiles start at multiples of 2048 elements
and parameters at multiples of 64. So parameters that touch, without padding between them, have no tail and
are stepped as one: a block is two or three pieces, not ten, and each piece that is saved is a fork and a join
of all threads.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from outsize.compat.torch_private import fused_adamw
from outsize.model.sizes.model_spec import PLANE_ELEMENTS, UnitSpec
from outsize.optim.adamw_kernel import step_native
from outsize.optim.planes import StatePlanes
from outsize.optim.update import Update


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
        """Update in torch ops, see `outsize.optim.update.UpdateRule`; where not ``exact``, with a division less."""
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
        """Return torch's own, see `outsize.optim.update.UpdateRule`."""
        return torch.optim.AdamW(groups, lr=lr, betas=self.betas, eps=self.eps, fused=True)

    def step_native(self, update: Update, planes: StatePlanes, gradient: Tensor) -> int:
        """Step with the C kernel, see `outsize.optim.update.UpdateRule`."""
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
        former = pieces[-1] if pieces else None
        if former and former == replace(piece, start=former.start, stop=first):
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
