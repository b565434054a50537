"""Groups of parameters with learning rates and weight decay of their own."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

from torch import Tensor, nn

from outsize.compat.torch_private import parameters_of
from outsize.errors import ModelError
from outsize.model.sizes.model_spec import ModelSpec, TensorSpec, UnitSpec

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
