"""Learning rates: the schedule over steps, and groups of parameters with rates and weight decay of their own."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any, get_args

import torch
from torch import Tensor, nn

from outsize.choices import Schedule
from outsize.compat.torch_private import parameters_of
from outsize.errors import ModelError
from outsize.model.sizes.model_spec import ModelSpec, TensorSpec, UnitSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSchedule:
    """Learning rate as a function of the step.

    Attributes:
        kind: what happens after the warm-up: ``constant`` stays; ``linear`` falls to 0, ``cosine`` to ``min_lr``;
            ``cosine_restarts`` falls to 0 ``num_cycles`` times; ``wsd`` stays, and falls to ``min_lr`` in the last
            ``num_decay_steps``; ``inverse_sqrt`` falls with the root of the step.
        lr: learning rate at the end of the warm-up.
        num_warmup_steps: steps over which the rate rises from 0.
        num_training_steps: step at which the rate has fallen.
        min_lr: the least rate, of ``cosine`` and ``wsd``.
        num_decay_steps: of ``wsd``.
        num_cycles: of ``cosine_restarts``.

    Raises:
        ValueError: an unknown kind, a negative or non-finite number, or a warm-up longer than the training.
    """

    kind: Schedule = "constant"
    lr: float
    num_warmup_steps: int = 0
    num_training_steps: int
    min_lr: float = 0.0
    num_decay_steps: int = 0
    num_cycles: int = 1
    _factor: Callable[[int], float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(Schedule):
            raise ValueError(f"unknown schedule {self.kind!r}; choose {', '.join(get_args(Schedule))}")
        if not (math.isfinite(self.lr) and self.lr >= 0.0):
            raise ValueError(f"lr must be a finite number of at least 0, not {self.lr}")
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"min_lr must lie in 0..lr ({self.lr:g}), not {self.min_lr:g}")
        if not 0 <= self.num_warmup_steps <= self.num_training_steps:
            raise ValueError(
                f"num_warmup_steps must lie in 0..{self.num_training_steps}, not {self.num_warmup_steps}"
            )
        object.__setattr__(self, "_factor", _factor_of(self))

    def learning_rate(self, step: int) -> float:
        """Return the rate of step ``step``, counted from 0; the first step of a warm-up has rate 0."""
        return self.lr * self._factor(step)


def _factor_of(schedule: LearningRateSchedule) -> Callable[[int], float]:
    """Return what a rate is multiplied by as a function of the step: what transformers gives to torch's `LambdaLR`."""
    from transformers import optimization

    share = schedule.min_lr / schedule.lr if schedule.lr else 0.0
    warmup, total = schedule.num_warmup_steps, schedule.num_training_steps
    # A schedule wants an optimizer, of which only its first rate is read.
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=schedule.lr)
    factor_at: Any
    if schedule.kind == "constant":
        factor_at = optimization.get_constant_schedule_with_warmup(optimizer, warmup)
    elif schedule.kind == "linear":
        factor_at = optimization.get_linear_schedule_with_warmup(optimizer, warmup, total)
    elif schedule.kind == "cosine":
        factor_at = optimization.get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, warmup, total, min_lr_rate=share
        )
    elif schedule.kind == "cosine_restarts":
        factor_at = optimization.get_cosine_with_hard_restarts_schedule_with_warmup(
            optimizer, warmup, total, schedule.num_cycles
        )
    elif schedule.kind == "wsd":
        factor_at = optimization.get_wsd_schedule(
            optimizer, warmup, schedule.num_decay_steps, num_training_steps=total, min_lr_ratio=share
        )
    else:
        factor_at = optimization.get_inverse_sqrt_schedule(optimizer, warmup)
    factor: Callable[[int], float] = factor_at.lr_lambdas[0]
    return factor


# The rule of transformers 5: no decay inside a LayerNorm module, nor where a lower-cased name matches one of
# these.
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decay_parameter_names(model: nn.Module) -> frozenset[str]:
    """Return the names, as in ``model.named_parameters()``, of the parameters that decay.

    Biases and the weights of normalisation layers do not. A tied parameter is listed under all of its names.
    """
    return frozenset(name for name in _outside_layer_norms(model, "") if not _NO_DECAY.search(name.lower()))


def _outside_layer_norms(module: nn.Module, prefix: str) -> list[str]:
    names = [prefix + name for name in parameters_of(module)]
    for name, child in module.named_children():
        if not isinstance(child, nn.LayerNorm):
            names += _outside_layer_norms(child, f"{prefix}{name}.")
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class RateGroup:
    """Parameters with rates of their own.

    Attributes:
        params: glob patterns of their names.
        lr: factor of the learning rate.
        weight_decay: factor of weight decay; None where that is by the rule.
        muon: whether Muon may step them.
    """

    params: tuple[str, ...]
    lr: float = 1.0
    weight_decay: float | None = None
    muon: bool = True


def with_rates(spec: ModelSpec, layer_decay: float, groups: Sequence[RateGroup]) -> ModelSpec:
    """Return the model with the rates of its parameters.

    Args:
        spec: the model.
        layer_decay: factor of the learning rate from the head to the last block, from each block to the one below it,
            and from the first block to the embedding, as timm has it. What lies outside all units goes with the head.
        groups: of parameters; a parameter has the factors of the first one that it fits, besides that of its layer.

    Raises:
        ModelError: a pattern matches no parameter that trains.
    """
    names = [tensor.name for unit in spec.units for tensor in unit.tensors if tensor.trainable]
    for pattern in (pattern for group in groups for pattern in group.params):
        if not any(fnmatch(name, pattern) for name in names):
            raise ModelError(
                f"optimizer.groups: {pattern!r} matches no parameter that trains; names look like {names[0]!r} and "
                f"{names[-1]!r}"
            )
    blocks = [unit.index for unit in spec.units if unit.kind == "block"]

    def rated(unit: UnitSpec) -> UnitSpec:
        below = {"block": len(blocks) - (unit.index - blocks[0]), "embedding": len(blocks) + 1}.get(
            unit.kind, 0
        )
        return replace(unit, tensors=tuple(_rated(t, layer_decay**below, groups) for t in unit.tensors))

    if layer_decay == 1.0 and not groups:
        return spec
    return replace(spec, units=tuple(map(rated, spec.units)))


def _rated(tensor: TensorSpec, scale: float, groups: Sequence[RateGroup]) -> TensorSpec:
    for group in groups:
        if any(fnmatch(tensor.name, pattern) for pattern in group.params):
            decay = tensor.decay if group.weight_decay is None else group.weight_decay
            return replace(tensor, lr_scale=scale * group.lr, decay=decay, muon=group.muon)
    return replace(tensor, lr_scale=scale)


def parameter_groups(
    spec: ModelSpec, parameters: Mapping[str, Tensor], weight_decay: float
) -> list[dict[str, Any]]:
    """Return groups of ``parameters`` by name for an optimizer of torch, each with what its ``lr`` is multiplied by."""
    alike: dict[tuple[float, float], list[Tensor]] = {}
    for tensor in (tensor for unit in spec.units for tensor in unit.tensors if tensor.name in parameters):
        alike.setdefault((tensor.decay, tensor.lr_scale), []).append(parameters[tensor.name])
    return [
        {"params": members, "weight_decay": weight_decay * decay, "lr_scale": scale}
        for (decay, scale), members in alike.items()
    ]
