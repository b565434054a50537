"""Muon on matrices of blocks, bit for bit ``torch.optim.Muon`` on fp32 masters, and AdamW on everything else.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) steps a matrix along its momentum made nearly
orthogonal, by iterations of Newton and Schulz in bf16. These multiply whole matrices, so parameters step whole, one
after the other. The operations are those of torch's ``_single_tensor_muon``, in its order; what they make goes into
the memory of the gradient, which nothing reads any more, and into one scratch. The first of these operations rounds to
bf16, so that somebody else who has the matrix in bf16 can do the rest: `outsize.runtime.ops.optimizer_ops`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from outsize.choices import AdjustRate
from outsize.optim import split_masters
from outsize.optim.adamw import PlaneAdamW, check_numbers
from outsize.optim.optimizer_names import BESIDE_MUON, Factor
from outsize.optim.optimizer_spec import GRADIENT
from outsize.optim.planes import StatePlanes, Update, WholeParameter
from outsize.optim.step import pack, step_piece, unpacked

# Defaults of torch.optim.Muon, which are those of the post above.
_COEFFICIENTS, _EPS = (3.4445, -4.7750, 2.0315), 1e-7
# A momentum of fewer bits is unpacked, changed and packed in tiles that stay in a cache.
_TILE_ELEMENTS = 2**17


class Products(Protocol):
    """What makes a matrix orthogonal, somewhere."""

    def __call__(self, update: Tensor, scratch: Tensor, iterations: int, unit: int) -> Tensor:
        """Return the orthogonal matrix next to ``update``, see `orthogonal`; ``unit`` is the index of its unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon:
    """Settings of Muon, named as in torch, and of what steps beside it; the learning rate comes with each step.

    Attributes:
        momentum: share of the former direction that is kept, at least 0 and below 1.
        nesterov: step along the gradient and the new momentum.
        ns_steps: iterations, 1 to 99.
        adjust_lr_fn: how the rate of a matrix follows from its shape: ``match_rms_adamw`` gives steps the size of
            AdamW's, so that one learning rate serves both (Liu et al., 2025, arXiv:2502.16982); ``original`` gives
            them a spectral norm of the learning rate, and more where there are more rows than columns.
        weight_decay: decoupled weight decay per unit of learning rate, at least 0.
        adamw: what steps everything else.
        products: what makes matrices orthogonal; None for the host.

    Raises:
        ValueError: a value outside its range.
    """

    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    adjust_lr_fn: AdjustRate = "match_rms_adamw"
    weight_decay: float = 0.1
    adamw: PlaneAdamW = field(default_factory=PlaneAdamW)
    products: Products | None = None

    @classmethod
    def of(cls, *, betas: tuple[float, float], eps: float, weight_decay: float, **settings: Any) -> "Muon":
        """Return the rule of a run, beside which AdamW has the same weight decay."""
        adamw = PlaneAdamW(betas=betas, eps=eps, weight_decay=weight_decay)
        return cls(adamw=adamw, weight_decay=weight_decay, **settings)

    def __post_init__(self) -> None:
        check_numbers(weight_decay=self.weight_decay)
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be a number of [0, 1), not {self.momentum}")
        if not 1 <= self.ns_steps < 100:
            raise ValueError(f"ns_steps must be 1 to 99, not {self.ns_steps}")

    @property
    def factors(self) -> tuple[Factor, ...]:
        """Second moments, of what is AdamW's."""
        return (BESIDE_MUON,)

    def step_parameter(self, parameter: WholeParameter, update: Update) -> None:
        """Step a parameter, see `outsize.optim.planes.WholeRule`."""
        if parameter.factors:
            gradient = parameter.flat(GRADIENT)
            assert gradient is not None
            step_piece(self.adamw, update, parameter.state(), gradient)
            return
        master, gradient = parameter.master(), parameter.gradient()
        if update.clip != 1.0:
            gradient.mul_(update.clip)
        self._follow(parameter.state(), gradient.view(-1), update)
        scratch = parameter.scratches[-1]
        if self.products is None:
            direction = orthogonal(gradient, scratch, self.ns_steps)
        else:
            direction = self.products(gradient, scratch, self.ns_steps, parameter.unit)
        if update.decay and self.weight_decay:
            master.mul_(1 - update.lr * (self.weight_decay * update.decay))
        master.add_(direction, alpha=-update.lr * self._rate_of(*gradient.shape))
        parameter.put_back(master, update.key)

    def resident(self, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        """Return torch's own, for matrices; everything else is that of `adamw`."""
        return torch.optim.Muon(
            groups,
            lr=lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            ns_steps=self.ns_steps,
            adjust_lr_fn=self.adjust_lr_fn,
        )

    def _follow(self, state: StatePlanes, gradient: Tensor, update: Update) -> None:
        """Move the momentum towards a gradient, both flat, and make of the gradient what is to be stepped along."""
        exact, numel = state.moments == "fp32", state.numel
        length = numel if exact else _TILE_ELEMENTS
        for first in range(0, numel, length):
            part, piece = state.cut(first, min(first + length, numel)), gradient[first : first + length]
            (momentum,) = unpacked(part)
            momentum.lerp_(piece, 1 - self.momentum)
            if self.nesterov:
                piece.lerp_(momentum, self.momentum)
            else:
                piece.copy_(momentum)
            if not exact:
                pack(part, (momentum,), split_masters.chances(update.first + first, update.key, part.numel))

    def _rate_of(self, rows: int, columns: int) -> float:
        """Return the factor of the learning rate of a matrix."""
        if self.adjust_lr_fn == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def orthogonal(update: Tensor, scratch: Tensor, iterations: int) -> Tensor:
    """Return the orthogonal matrix next to ``update``, roughly: its singular values come out between 0.5 and 1.5.

    Args:
        update: fp32 ``[m, n]``, contiguous; spent.
        scratch: fp32, beside it, of at least as many elements; spent.
        iterations: of Newton and Schulz.

    Returns:
        bf16 ``[m, n]``, in the memory of one of them.
    """
    rooms = [room.view(-1).view(torch.bfloat16) for room in (scratch, update)]
    rooms[0][: update.numel()].view(update.shape).copy_(update)
    return newton_schulz(rooms, update.shape, iterations)


def newton_schulz(rooms: Sequence[Tensor], shape: Sequence[int], iterations: int) -> Tensor:
    """Return the orthogonal matrix next to the one that the first of two rooms begins with, see `orthogonal`.

    Args:
        rooms: bf16, with room for the matrix and for the square of its shorter side; spent.
        shape: of the matrix, [m, n].
        iterations: of Newton and Schulz.

    Returns:
        bf16 ``[m, n]``, in the memory of one of them.
    """
    rows, columns = shape
    numel, side = rows * columns, min(rows, columns)
    gram, mixed = (room[numel : numel + side * side].view(side, side) for room in rooms)
    product = rooms[0][:numel].view(rows, columns)
    if rows > columns:
        product = product.T
    product.div_(product.norm().clamp(min=_EPS))
    a, b, c = _COEFFICIENTS
    for number in range(1, iterations + 1):
        torch.mm(product, product.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=mixed)
        there = rooms[number % 2][:numel].view(side, -1)
        product = torch.addmm(product, mixed, product, beta=a, out=there)
    return product.T if rows > columns else product
