"""Adafactor: bit for bit ``torch.optim.Adafactor`` on fp32 masters, in host memory that has been set aside.

An update is scaled by root mean squares of a whole parameter and of its update, so parameters step whole, one after the
other. The operations are those of torch's ``_single_tensor_adafactor``, in its order, but for two things that change no
bit: the estimate of the second moment is never there as a whole, and the update takes the place of the gradient. So a
step needs no tensors besides those that it changes, where masters and gradients are planes of fp32; a split master is
joined in a scratch, and a gradient in bf16 widened in another.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.optim.adamw import check_numbers
from outsize.optim.factored_kernel import column_norms, divide_by_root
from outsize.optim.factors import FACTORS, Factor
from outsize.optim.planes import WholeParameter
from outsize.optim.update import Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Adafactor:
    """Settings of Adafactor, named as in torch; the learning rate comes with each step.

    Attributes:
        beta2_decay: power of the number of the step by which a new square weighs, at most 0.
        eps: what the root of an estimate is at least, None for the least step of fp32 beside 1; and what the root mean
            square of a parameter is taken to be at least. Each at least 0.
        d: root mean square to which an update is clipped, at least 1.
        weight_decay: decoupled weight decay per unit of learning rate, at least 0.

    Raises:
        ValueError: a value outside its range.
    """

    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(eps1=self.eps[0] or 0.0, eps2=self.eps[1], weight_decay=self.weight_decay)
        if not (math.isfinite(self.beta2_decay) and self.beta2_decay <= 0.0):
            raise ValueError(f"beta2_decay must be a finite number of at most 0, not {self.beta2_decay}")
        if not (math.isfinite(self.d) and self.d >= 1.0):
            raise ValueError(f"d must be a finite number of at least 1, not {self.d}")

    @property
    def factors(self) -> tuple[Factor, ...]:
        """Of its second moments."""
        return FACTORS

    def step_parameter(self, parameter: WholeParameter, update: Update) -> None:
        """Step a parameter, see `outsize.optim.update.WholeRule`."""
        master, gradient = parameter.master(), parameter.gradient()
        if update.clip != 1.0:
            gradient.mul_(update.clip)
        self._step(master, gradient, parameter, update)
        parameter.put_back(master, update.key)

    def _step(self, master: Tensor, gradient: Tensor, parameter: WholeParameter, update: Update) -> None:
        """Step an fp32 master by a gradient that is clipped, both in their shape."""
        factors = {
            factor: parameter.planes[factor][seen.offset : seen.offset + seen.numel].view(seen.shape)
            for factor, seen in parameter.factors.items()
        }
        eps1, eps2 = self.eps
        if eps1 is None:
            eps1 = torch.finfo(torch.float32).eps
        root = master.numel() ** 0.5
        weight = float(update.count) ** self.beta2_decay
        rho = min(update.lr, 1 / float(update.count) ** 0.5)
        alpha = max(eps2, master.norm(2).item() / root) * rho
        if update.decay and self.weight_decay:
            master.mul_(1 - update.lr * (self.weight_decay * update.decay))
        if gradient.dim() > 1:
            rows = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
            factors["row_var"].lerp_(rows.square_().div_(gradient.size(-1)), weight)
            columns = column_norms(gradient)
            factors["col_var"].lerp_(columns.square_().div_(gradient.size(-2)), weight)
            divide_by_root(gradient, factors["row_var"], factors["col_var"], eps1)
        else:
            factors["variance"].lerp_(gradient * gradient, weight)
            gradient.mul_(factors["variance"].clone().clamp_(min=eps1 * eps1).rsqrt_())
        denominator = max(1.0, gradient.norm(2).item() / (root * self.d))
        master.add_(gradient, alpha=-alpha / denominator)
