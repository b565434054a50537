"""No cache of keys and values that nobody asked for: blocks append to it, and what they append stays on the device.

Forwards of transformers take ``use_cache`` as an argument, or make a cache because a config deep inside says so.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def without_cache(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Have no config of ``model`` ask for a cache while the context lasts, unless the caller's ``inputs`` do."""
    asks = inputs.get("use_cache") or inputs.get("past_key_values") is not None
    asking = [] if asks else [one for one in _configs_of(model) if vars(one).get("use_cache")]
    former = [one.use_cache for one in asking]
    for config in asking:
        config.use_cache = False
    try:
        yield
    finally:
        for config, value in zip(asking, former, strict=True):
            config.use_cache = value


def _configs_of(model: nn.Module) -> list[Any]:
    """Return the configs of a model of transformers: its own, and those of its parts, which may be copies."""
    found: dict[int, Any] = {}
    waiting = [config for module in model.modules() if (config := vars(module).get("config")) is not None]
    while waiting:
        config = waiting.pop()
        if id(config) not in found and hasattr(config, "__dict__"):
            found[id(config)] = config
            waiting += [
                one
                for one in vars(config).values()
                if hasattr(one, "use_cache") or hasattr(one, "to_diff_dict")
            ]
    return list(found.values())
