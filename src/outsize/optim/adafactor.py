"""Adafactor (Shazeer and Stern, 2018): a second moment in rows and columns, next to no state. Torch's own.

It looks at whole parameters (their norms, their rows), so it steps whole units and no tiles.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.model.spec import TensorSpec, UnitSpec
from outsize.optim.adamw import check_numbers, check_range
from outsize.optim.planes import StatePlanes
from outsize.optim.split import join_master, split_master

# What torch keeps of a parameter: ``step``, and ``row_var`` and ``col_var`` or, of vectors, ``variance``.
Factors = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adafactor:
    """Settings of Adafactor, named and meant as in `torch.optim.Adafactor`; the learning rate comes with each step.

    Attributes:
        beta2_decay: exponent of the decay of the second moment, at most 0.
        eps: bounds of the root, None for that of fp32, and of the norm of a parameter.
        d: root mean square beyond which an update is scaled down, at least 1.
        weight_decay: decoupled weight decay per unit of learning rate, at least 0.

    Raises:
        ValueError: a value outside its range.
    """

    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(weight_decay=self.weight_decay, eps=self.eps[1])
        if not self.beta2_decay <= 0.0:
            raise ValueError(f"beta2_decay must be at most 0, not {self.beta2_decay}")
        if not self.d >= 1.0:
            raise ValueError(f"d must be at least 1, not {self.d}")


@torch.no_grad()
def step_factored(
    settings: Adafactor,
    unit: UnitSpec,
    planes: StatePlanes,
    gradient: Tensor,
    factors: Mapping[str, Factors],
    *,
    lr: float,
    clip_coefficient: Tensor | None = None,
    skip: AbstractSet[str] = frozenset(),
) -> None:
    """Step a unit in place: bit for bit ``torch.optim.Adafactor`` on fp32 masters, and their cast to the weights.

    Args:
        settings: of the optimizer.
        unit: whose parameters they are.
        planes: of the whole unit, without moments.
        gradient: fp32 or bf16 ``[unit.numel]``; it is left as it is.
        factors: by parameter name, from `factors_of` and updated in place; they count the steps.
        lr: learning rate.
        clip_coefficient: factor of the gradient; None for 1.
        skip: names of parameters that got no gradient.

    Raises:
        ValueError: planes or a gradient that do not fit the unit, or moments, which Adafactor has none of.
    """
    check_range(unit, 0, planes.numel, lr)
    if planes.numel != unit.numel or gradient.shape != (unit.numel,) or planes.num_moments:
        raise ValueError(f"{unit.name}: Adafactor steps whole units, and keeps factors for moments")
    for tensor in unit.tensors:
        if tensor.trainable and tensor.name not in skip:
            grad = gradient[tensor.offset : tensor.offset + tensor.numel].to(torch.float32, copy=True)
            if clip_coefficient is not None:
                grad *= clip_coefficient
            part = planes.cut(tensor.offset, tensor.offset + tensor.numel)
            _step_parameter(settings, tensor, part, grad, factors[tensor.name], lr)


def factors_of(unit: UnitSpec) -> dict[str, Factors]:
    """Return the factors of a unit that has not been stepped: zeros, one row and one column for each matrix."""
    found = {}
    for tensor in unit.tensors:
        if tensor.trainable:
            shape = tensor.shape
            state = {"step": torch.tensor(0.0)}
            if len(shape) > 1:
                state["row_var"] = torch.zeros(*shape[:-1], 1)
                state["col_var"] = torch.zeros(*shape[:-2], 1, shape[-1])
            else:
                state["variance"] = torch.zeros(shape)
            found[tensor.name] = state
    return found


def _step_parameter(
    settings: Adafactor,
    tensor: TensorSpec,
    planes: StatePlanes,
    gradient: Tensor,
    factors: Factors,
    lr: float,
) -> None:
    master = planes.master
    if planes.master_low is not None:
        master = torch.empty(tensor.numel)
        join_master(planes.weights, planes.master_low, planes.master_ties, master)
    elif master is None:
        master = planes.weights
    parameter = torch.nn.Parameter(master.view(tensor.shape))
    parameter.grad = gradient.view(tensor.shape)
    optimizer = torch.optim.Adafactor(
        [parameter],
        lr=lr,
        beta2_decay=settings.beta2_decay,
        eps=settings.eps,
        d=settings.d,
        weight_decay=settings.weight_decay if tensor.decay else 0.0,
    )
    optimizer.state[parameter] = factors
    optimizer.step()  # type: ignore[no-untyped-call]
    if planes.master_low is not None:
        split_master(master, planes.weights, planes.master_low, planes.master_ties)
    elif planes.master is not None:
        planes.weights.copy_(master)
