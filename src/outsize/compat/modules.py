"""What a module of torch holds, by the dictionaries in which it holds it."""

from typing import Any

from torch import Tensor, nn


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters of ``module`` itself by name: what is put there is its parameter, without any check."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers of ``module`` itself by name; see `parameters_of`."""
    return module._buffers


def forward_hooks_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the forward hooks and the forward pre-hooks of ``module``."""
    return module._forward_hooks, module._forward_pre_hooks


def has_hooks_of_all() -> bool:
    """Return whether hooks run around the forward of every module."""
    from torch.nn.modules import module

    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)


def replace_forward_hooks(module: nn.Module, hooks: Any) -> Any:
    """Replace the forward hooks of ``module`` by ``hooks``; returns the former."""
    former, module._forward_hooks = module._forward_hooks, hooks
    return former


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Return whether hooks run on a gradient of ``parameter``, before it is added or behind."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def dtype_to_move_to(*args: Any, **kwargs: Any) -> Any:
    """Return the dtype that arguments of `torch.nn.Module.to` ask for; None where they ask for none."""
    import torch

    return torch._C._nn._parse_to(*args, **kwargs)[1]
