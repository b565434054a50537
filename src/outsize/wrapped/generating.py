"""`generate` of a wrapped model: transformers' own, with weights that come and go under it."""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from outsize.wrapped.runner import Runner


def generation(kind: type[nn.Module], runner_of: Callable[[nn.Module], "Runner"]) -> Callable[..., Any]:
    """Return the method ``generate`` for the wrapped class of ``kind``.

    Args:
        kind: a class that has one.
        runner_of: what streams a wrapped model.
    """
    own = cast(Any, kind).generate

    @wraps(own)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        runner = runner_of(self)
        with torch.no_grad(), runner.inferring():
            args, kwargs = on_device((args, kwargs), runner.device)
            return own(self, *args, **kwargs)

    return generate


def on_device(inputs: Any, device: torch.device) -> Any:
    """Return inputs with their tensors where the model computes."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), inputs)
