"""Made-up weights for trials: what a model's own are not needed for, such as bytes and times."""

import torch
from torch import Tensor

from outsize.model.sizes.model_spec import ITEMSIZE, ModelSpec
from outsize.optim.optimizer_spec import WEIGHTS
from outsize.runtime.forward.binding import TORCH_DTYPE, Binder


def bind_trial_weights(
    binder: Binder, spec: ModelSpec, device: torch.device | None = None, deviation: float = 0.02
) -> Tensor:
    """Bind every unit to the same small random numbers, as many as the largest unit has; returns their memory.

    Args:
        binder: of the model.
        spec: its units.
        device: where the numbers lie; None for the CPU.
        deviation: standard deviation of the numbers.
    """
    kinds = {WEIGHTS: (spec.dtype, max(unit.numel for unit in spec.units))}
    for part in (part for unit in spec.units for part in unit.frozen):
        kinds[part.plane] = part.dtype, max(part.numel, kinds.get(part.plane, ("", 0))[1])
    memory = torch.empty(sum(numel * ITEMSIZE[dtype] for dtype, numel in kinds.values()), dtype=torch.uint8)
    end = 0
    spans = {}
    for name, (dtype, numel) in kinds.items():
        start, end = end, end + numel * ITEMSIZE[dtype]
        spans[name] = (start, end, TORCH_DTYPE[dtype])
        values = memory[start:end].view(TORCH_DTYPE[dtype])
        values.normal_(0.0, deviation, generator=torch.Generator().manual_seed(0))
    memory = memory.to(device)
    planes = {name: memory[start:end].view(dtype) for name, (start, end, dtype) in spans.items()}
    for unit in spec.units:
        parts = [planes[part.plane][: part.numel] for part in unit.frozen]
        binder.bind(unit, planes[WEIGHTS][: unit.numel], *parts)
    return memory
