"""Clipping by the global norm, bit for bit ``torch.nn.utils.clip_grad_norm_`` over separate parameters.

torch takes the norm of each parameter's gradient and then the norm of these norms, in the order of
``model.parameters()``. The first half can be done unit by unit, where each gradient lies; only the norms are
gathered.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outsize.compat.torch_private import norms
from outsize.model.sizes.model_spec import UnitSpec


@torch.no_grad()
def gradient_norms(unit: UnitSpec, gradient: Tensor) -> Tensor:
    """Return the L2 norm of each tensor of a unit, in the order of ``unit.tensors``.

    Args:
        unit: the unit.
        gradient: its whole fp32 gradient plane, on any device.

    Returns:
        fp32 tensor of ``len(unit.tensors)`` norms, on the gradient's device.

    Raises:
        ValueError: the plane has another size.
    """
    if gradient.shape != (unit.numel,):
        raise ValueError(
            f"{unit.name}: need a gradient of {unit.numel} elements, not {tuple(gradient.shape)}"
        )
    if not unit.tensors:
        return gradient.new_empty(0)
    views = [gradient[t.offset : t.offset + t.numel].view(t.shape) for t in unit.tensors]
    return norms(views)


@torch.no_grad()
def clip_coefficient(norms: Sequence[Tensor], max_norm: float) -> tuple[Tensor, Tensor]:
    """Return the global norm and the factor that clips it to ``max_norm``.

    Args:
        norms: one fp32 scalar per parameter that got a gradient, in the order of ``model.parameters()``.
        max_norm: largest norm that is left alone, above 0.

    Returns:
        Two fp32 scalars on the device of the first norm: the norm before clipping, and a coefficient of at
        most 1. Where the norm is not finite, the caller must not use the coefficient.

    Raises:
        ValueError: ``max_norm`` is not a positive number.
    """
    if not max_norm > 0.0:
        raise ValueError(f"max_norm must be above 0, not {max_norm}")
    if not norms:
        return torch.tensor(0.0), torch.tensor(1.0)
    device = norms[0].device
    total = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), 2.0)
    # 1e-6 keeps a zero norm from dividing, as in torch.nn.utils.clip_grads_with_norm_.
    return total, torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
