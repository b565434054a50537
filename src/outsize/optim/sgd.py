"""SGD with momentum: bit for bit ``torch.optim.SGD(fused=True)`` where the momentum is kept in fp32."""

from dataclasses import dataclass

from torch import Tensor

from outsize.compat.optimizers import fused_sgd
from outsize.optim.adamw import check_numbers
from outsize.optim.momentum_kernel import Sgd, step_sgd
from outsize.optim.planes import StatePlanes
from outsize.optim.update import Update


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD:
    """Settings of SGD, named as in torch; the learning rate comes with each step.

    The momentum is kept in ``exp_avg``, in whatever form that has; without momentum nothing is.

    Attributes:
        momentum: share of the former direction that is kept, at least 0 and below 1.
        dampening: share of the gradient that does not enter it.
        nesterov: step along the gradient and the new momentum; needs a momentum and no dampening.
        weight_decay: factor of the weights that are added to the gradient, at least 0.

    Raises:
        ValueError: a value outside its range.
    """

    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be a number of [0, 1), not {self.momentum}")
        check_numbers(dampening=self.dampening, weight_decay=self.weight_decay)
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise ValueError("nesterov needs a momentum and no dampening")

    @property
    def num_moments(self) -> int:
        """One with momentum, else none."""
        return int(self.momentum != 0.0)

    def update(
        self, update: Update, master: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], *, exact: bool
    ) -> None:
        """Update in torch ops, see `update.UpdateRule`; where not ``exact``, one operation after the other."""
        if not exact:
            self._update_plainly(update, master, gradient, *moments)
            return
        fused_sgd(
            master,
            gradient,
            list(moments),
            weight_decay=self.weight_decay * update.decay,
            momentum=self.momentum,
            lr=update.lr,
            dampening=self.dampening,
            nesterov=self.nesterov,
            is_first_step=update.count == 1,
        )

    def _update_plainly(self, update: Update, master: Tensor, gradient: Tensor, momentum: Tensor) -> None:
        if update.decay and self.weight_decay:
            gradient.add_(master * (self.weight_decay * update.decay))
        if update.count == 1:
            momentum.copy_(gradient)
        else:
            momentum.mul_(self.momentum).add_(gradient * (1.0 - self.dampening))
        along = gradient.add_(momentum * self.momentum) if self.nesterov else momentum
        master.add_(along * -update.lr)

    def step_native(self, update: Update, planes: StatePlanes, gradient: Tensor) -> int:
        """Step with the C kernel, see `outsize.optim.update.UpdateRule`."""
        settings = Sgd(
            momentum=self.momentum,
            dampening=self.dampening,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
        )
        return step_sgd(settings, update, planes, gradient)
