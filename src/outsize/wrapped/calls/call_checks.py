"""What a call of a wrapped model may not ask for, checked before anything is computed."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from outsize.errors import ConfigError

# What models of transformers are asked for with all that goes from unit to unit.
HIDDEN = "output_hidden_states"


def check_call(model: nn.Module, inputs: Mapping[str, Any], *, cached: bool, keeps: bool) -> None:
    """Check that a call is given values, and that a backward can follow where one may.

    Raises:
        ConfigError: neither is so.
    """
    _check_inputs(inputs)
    if keeps:
        _check_trains(cached=cached)


def _check_trains(*, cached: bool) -> None:
    """Check that a backward can follow a call.

    Raises:
        ConfigError: it would fill a cache again.
    """
    if cached:
        raise ConfigError(
            "a cache of keys and values would be filled again in the recompute of a backward: use torch.no_grad() "
            "with use_cache or past_key_values"
        )


def _check_inputs(inputs: Mapping[str, Any]) -> None:
    """Check that a call is given values.

    Raises:
        ConfigError: a tensor is on meta.
    """
    empty = [name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_meta]
    if empty:
        raise ConfigError(f"{empty[0]} is on meta, a shape without values; call the model with values")


def check_returns(model: nn.Module, inputs: Mapping[str, Any], *, into_inputs: bool) -> None:
    """Check that a call on several workers asks for nothing that they move.

    Raises:
        ConfigError: it asks for hidden states, or for gradients of its inputs.
    """
    if into_inputs:
        raise ConfigError(
            "gradients of inputs (a tensor with requires_grad, such as inputs_embeds) are not had from several "
            "workers; use one device, or detach() the input"
        )
    asked = inputs.get(HIDDEN)
    config = getattr(model, "config", None)
    if getattr(config, HIDDEN, False) if asked is None else asked:
        raise ConfigError(
            "output_hidden_states: what units hand on moves from worker to worker, and is gone when the model returns; "
            "use one device"
        )
