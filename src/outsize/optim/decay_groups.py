"""Which parameters weight decay applies to: the rule of the Hugging Face ``Trainer``."""

import re

from torch import nn

# The rule of transformers 5: no decay inside a LayerNorm module, nor where a lower-cased name matches one of
# these.
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decay_parameter_names(model: nn.Module) -> frozenset[str]:
    """Return the names, as in ``model.named_parameters()``, of the parameters that decay.

    Biases and the weights of normalisation layers do not. A tied parameter is listed under all of its names.
    """
    return frozenset(name for name in _outside_layer_norms(model, "") if not _NO_DECAY.search(name.lower()))


def _outside_layer_norms(module: nn.Module, prefix: str) -> list[str]:
    names = [prefix + name for name in module._parameters]
    for name, child in module.named_children():
        if not isinstance(child, nn.LayerNorm):
            names += _outside_layer_norms(child, f"{prefix}{name}.")
    return names
