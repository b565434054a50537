"""What models and tokenizers of transformers have no public name for."""

from typing import Any

import torch
from torch import nn


def attention_of(model: nn.Module) -> str:
    """Return the name of the attention that ``model`` computes with, such as ``sdpa``."""
    config: Any = model.config
    return str(config._attn_implementation)


def initialize(model: nn.Module, module: nn.Module) -> None:
    """Draw the parameters of ``module``, a part of ``model``, as a new model draws them."""
    made: Any = model
    made._init_weights(module)


def kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Return parts of names of what ``model`` keeps in fp32 where the rest is of ``dtype``."""
    made: Any = model
    return tuple(made._get_dtype_plan(dtype))


def output_collector() -> Any:
    """Return the context variable with the lists that layers put outputs in; None in versions that record otherwise."""
    try:
        from transformers.utils import output_capturing
    except ImportError:
        return None
    return getattr(output_capturing, "_active_collector", None)


def has_hub_kernels(module: nn.Module) -> bool:
    """Return whether transformers has put kernels of the hub into ``module``."""
    return bool(getattr(module, "_use_kernels", False))


def encodes_as_the_library(tokenizer: Any) -> bool:
    """Return whether the class of a fast ``tokenizer`` has no code of its own for a text that becomes tokens."""
    from transformers import PreTrainedTokenizerFast

    kind: Any = type(tokenizer)
    return bool(
        kind._encode_plus is PreTrainedTokenizerFast._encode_plus
        and kind.__call__ is PreTrainedTokenizerFast.__call__
    )
