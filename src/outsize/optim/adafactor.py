"""Adafactor: bit for bit ``torch.optim.Adafactor`` on fp32 masters, in host memory that has been set aside.

An update is scaled by root mean squares of a whole parameter and of its update, so parameters step whole, one after the
other. The operations are those of torch's ``_single_tensor_adafactor``, in its order, but for two things that change no
bit: the estimate of the second moment is never there as a whole, and the update takes the place of the gradient. So a
step needs no tensors besides those that it changes, where masters and gradients are planes of fp32; a split master is
joined in a scratch, and a gradient in bf16 widened in another.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.model.sizes.model_spec import TensorSpec, UnitSpec
from outsize.optim.adamw import check_numbers
from outsize.optim.factored_kernel import column_norms, divide_by_root
from outsize.optim.factors import FACTORS, factored
from outsize.optim.optimizer_spec import GRADIENT, MASTER, MASTER_LOW, MASTER_TIES, WEIGHTS
from outsize.optim.split_masters import join_master, split_master, ties_bytes


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


@torch.no_grad()
def step_whole(
    rule: Adafactor,
    unit: UnitSpec,
    planes: Mapping[str, Tensor],
    scratches: Sequence[Tensor],
    *,
    step: Mapping[str, int],
    lr: float,
    clip_coefficient: Tensor | None = None,
    skip: AbstractSet[str] = frozenset(),
    rounds: bool = True,
) -> None:
    """Step all parameters of a unit in place; frozen and skipped ones keep what they have. The gradient is spent.

    Args:
        rule: the settings.
        unit: whose parameters they are.
        planes: of the whole unit, by name, gradient included: fp32 or bf16.
        scratches: as many as `StateLayout.num_scratches`, fp32, each as long as the largest parameter; what they hold
            is lost.
        step: how often each parameter has been stepped, this step included.
        lr: learning rate of parameters whose factor is 1.
        clip_coefficient: factor of the gradient; None for 1.
        skip: names of parameters that got no gradient.
        rounds: whether weights beside a separate master are made of it.
    """
    seen = {factor: factored(unit, factor).tensors for factor in FACTORS}
    factors: dict[str, dict[str, Tensor]] = {}
    for factor, tensors in seen.items():
        for tensor in tensors:
            factors.setdefault(tensor.name, {})[factor] = _view(planes[factor], tensor)
    for tensor in unit.tensors:
        if not tensor.trainable or tensor.name in skip or not tensor.numel:
            continue
        part = {name: plane for name, plane in planes.items() if name not in FACTORS}
        room = iter(scratches)
        master = _master(part, tensor, room)
        gradient = _gradient(part, tensor, room)
        if clip_coefficient is not None:
            gradient.mul_(float(clip_coefficient))
        _step(
            rule,
            master,
            gradient,
            factors[tensor.name],
            step[tensor.name],
            lr * tensor.lr_scale,
            decay=tensor.decay,
        )
        _put_back(part, tensor, master, rounds=rounds)


def _view(plane: Tensor, tensor: TensorSpec) -> Tensor:
    return plane[tensor.offset : tensor.offset + tensor.numel].view(tensor.shape)


def _split_parts(planes: Mapping[str, Tensor], tensor: TensorSpec) -> tuple[Tensor, Tensor, Tensor | None]:
    """The planes of a split master, flat."""
    ties = planes.get(MASTER_TIES)
    if ties is not None:
        ties = ties[tensor.offset // 8 :][: ties_bytes(tensor.numel)]
    weights, low = (_view(planes[name], tensor).view(-1) for name in (WEIGHTS, MASTER_LOW))
    return weights, low, ties


def _master(planes: Mapping[str, Tensor], tensor: TensorSpec, room: Iterator[Tensor]) -> Tensor:
    """The fp32 master of a parameter, in its shape: where it lies, or joined in a scratch."""
    if MASTER_LOW not in planes:
        return _view(planes[MASTER if MASTER in planes else WEIGHTS], tensor)
    master = next(room)[: tensor.numel]
    join_master(*_split_parts(planes, tensor), master)
    return master.view(tensor.shape)


def _gradient(planes: Mapping[str, Tensor], tensor: TensorSpec, room: Iterator[Tensor]) -> Tensor:
    """The gradient of a parameter in fp32, in its shape: where it lies, or widened in a scratch."""
    gradient = _view(planes[GRADIENT], tensor)
    if gradient.dtype is torch.float32:
        return gradient
    return next(room)[: tensor.numel].view(tensor.shape).copy_(gradient)


def _put_back(planes: Mapping[str, Tensor], tensor: TensorSpec, master: Tensor, *, rounds: bool) -> None:
    """Make of a master that has been stepped what lies beside it."""
    if MASTER_LOW in planes:
        split_master(master.view(-1), *_split_parts(planes, tensor))
    elif MASTER in planes and rounds:
        _view(planes[WEIGHTS], tensor).copy_(master)


def _step(
    rule: Adafactor,
    master: Tensor,
    gradient: Tensor,
    factors: Mapping[str, Tensor],
    count: int,
    lr: float,
    *,
    decay: float,
) -> None:
    """Step one parameter; all tensors in its shape but the factors, the gradient free to be overwritten."""
    eps1, eps2 = rule.eps
    if eps1 is None:
        eps1 = torch.finfo(torch.float32).eps
    root = master.numel() ** 0.5
    weight = float(count) ** rule.beta2_decay
    rho = min(lr, 1 / float(count) ** 0.5)
    alpha = max(eps2, master.norm(2).item() / root) * rho
    if decay and rule.weight_decay:
        master.mul_(1 - lr * (rule.weight_decay * decay))
    if gradient.dim() > 1:
        rows = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        factors["row_var"].lerp_(rows.square_().div_(gradient.size(-1)), weight)
        columns = column_norms(gradient)
        factors["col_var"].lerp_(columns.square_().div_(gradient.size(-2)), weight)
        divide_by_root(gradient, factors["row_var"], factors["col_var"], eps1)
    else:
        factors["variance"].lerp_(gradient * gradient, weight)
        gradient.mul_(factors["variance"].clone().clamp_(min=eps1 * eps1).rsqrt_())
    denominator = max(1.0, gradient.norm(2).item() / (root * rule.d))
    master.add_(gradient, alpha=-alpha / denominator)
