"""Which models of transformers read padding as if it were text."""

import inspect
import sys
from typing import Any, cast

import torch
from torch import nn

# What models call whose layers carry a state over all tokens, to have padding change none of it.
_LEAVES_OUT = "apply_mask_to_padding_states"


def reads_padding(model: nn.Module) -> bool:
    """Return whether padding before a text may change what a model that goes on with the text makes of it.

    An encoder is given its mask, and its decoder begins with one token. Others have to be given the mask and places
    that do not count padding, and to carry no state besides; whichever cannot show that they do, are taken to read it.
    """
    if cast(Any, model).config.is_encoder_decoder:
        return False
    modules = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    loaded = [module for name in modules if (module := sys.modules.get(name)) is not None]
    if any(map(_has_cache, loaded)):
        return True
    if any(hasattr(module, _LEAVES_OUT) for module in loaded):
        return False
    return bool(getattr(model, "_is_stateful", False)) or not _is_given_places(cast(Any, model))


def _has_cache(module: Any) -> bool:
    """Return whether a module of a model has a cache of keys and values of its own, which may count padding."""
    from transformers import DynamicCache

    kinds = (value for value in vars(module).values() if inspect.isclass(value))
    return any(issubclass(kind, DynamicCache) and kind.__module__ == module.__name__ for kind in kinds)


def _is_given_places(model: Any) -> bool:
    """Return whether a forward takes positions, and what prepares its arguments hands them and the mask on."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    ids = torch.ones((1, 2), dtype=torch.long)
    try:
        made = model.prepare_inputs_for_generation(ids, attention_mask=ids, position_ids=ids, use_cache=False)
    except Exception:  # written for each model anew
        return False
    return made.get("attention_mask") is not None and made.get("position_ids") is not None
