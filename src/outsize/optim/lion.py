"""Lion (Chen et al., 2023, arXiv:2302.06675, algorithm 2): steps of one size along the sign of a momentum."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.optim.adamw import check_betas, check_numbers
from outsize.optim.momentum_kernel import step_lion
from outsize.optim.planes import StatePlanes
from outsize.optim.update import Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Lion:
    """Settings of Lion; the learning rate comes with each step, a third to a tenth of that of AdamW.

    Attributes:
        betas: share of the momentum in the direction of a step, and what of the momentum is kept; each at least 0 and
            below 1.
        weight_decay: decoupled weight decay per unit of learning rate, at least 0.

    Raises:
        ValueError: a value outside its range.
    """

    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_betas(self.betas)
        check_numbers(weight_decay=self.weight_decay)

    @property
    def num_moments(self) -> int:
        """One, the momentum, in ``exp_avg``."""
        return 1

    def update(
        self, update: Update, master: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], *, exact: bool
    ) -> None:
        """Update in torch ops, see `outsize.optim.update.UpdateRule`."""
        (momentum,) = moments
        share, kept = self.betas
        direction = torch.mul(momentum, share).add_(gradient * (1.0 - share)).sign_()
        if update.decay and self.weight_decay:
            master.mul_(1.0 - update.lr * (self.weight_decay * update.decay))
        master.sub_(direction.mul_(update.lr))
        momentum.mul_(kept).add_(gradient.mul_(1.0 - kept))

    def step_native(self, update: Update, planes: StatePlanes, gradient: Tensor) -> int:
        """Step with the C kernel, see `outsize.optim.update.UpdateRule`."""
        return step_lion(self.betas, self.weight_decay, update, planes, gradient)
