"""What PEFT does to one layer when it puts adapters into a model."""

from typing import Any, cast

from torch import Tensor, nn


def changed_weight(around: nn.Module, config: Any, path: str, layer: nn.Module) -> Tensor:
    """Return the weight that PEFT leaves a layer with when it puts an adapter around it.

    Args:
        around: PEFT's model, with an adapter of LoRA.
        config: of that adapter.
        path: of the layer in the model, which may decide its rank.
        layer: with its weight, which is changed.
    """
    parent = nn.Module()
    parent.add_module("layer", layer)
    tuner = cast(Any, around).base_model
    tuner._create_and_replace(config, "default", layer, "layer", parent, current_key=path)
    return cast(Tensor, layer.weight).detach()
