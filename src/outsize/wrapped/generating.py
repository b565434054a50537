"""`generate` of a wrapped model: transformers' own, with weights that come and go under it."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from outsize.errors import CheckpointError

if TYPE_CHECKING:
    from outsize.wrapped.runner import Runner


def generation(kind: type[nn.Module], runner_of: Callable[[nn.Module], "Runner"]) -> Callable[..., Any]:
    """Return the method ``generate`` for the wrapped class of ``kind``."""
    own = cast(Any, kind).generate

    @wraps(own)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        runner = runner_of(self)
        with torch.no_grad(), runner.inferring():
            args, kwargs = on_device((args, kwargs), runner.device)
            return own(self, *args, **kwargs)

    return generate


def take_generation_config(model: nn.Module, directory: Path) -> None:
    """Have a model generate as its checkpoint says: the marks that end a text, how tokens are chosen.

    Raises:
        CheckpointError: what it says cannot be read.
    """
    path = directory / "generation_config.json"
    if not hasattr(model, "generation_config") or not path.is_file():
        return
    from transformers import GenerationConfig

    try:
        cast(Any, model).generation_config = GenerationConfig.from_pretrained(str(directory))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; mend or remove it") from error


def on_device(inputs: Any, device: torch.device) -> Any:
    """Return inputs with their tensors where the model computes."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), inputs)
