"""MLPs that take the tokens of a microbatch in parts, so that of what lies inside one only a part is alive at a time.

What a block makes inside its MLP is the most of what its backward needs: for Qwen3-32B 7 of 15 GiB at 31,744 tokens.
An MLP looks at each token by itself, so parts of them may go through one after the other. That is known as tiled MLP
(Arctic Long Sequence Training, arXiv:2506.13996). Here nothing is computed more often than by a recompute of the whole
block, which ends where its backward's needs end (`runtime.forward.short_recompute`): that is before such an MLP.

The story of one block and microbatch:

1. `_Keep` hands the MLP's input on, and is what autograd saves it for.
2. `_Parts` puts one part after the other through the MLP, without a graph, so nothing in there is saved. In a recompute
   these operations come after the last tensor that is saved, so they are left out; but where a norm follows them.
3. Backward, each part goes through the MLP again, now with a graph, and right back: its gradients of weights are added
   up part by part, as those of microbatches are.

Sums over parts round differently from one sum, so the number of parts is part of what a run computes, as the number of
microbatches is; streamed and resident runs of as many parts are equal bit for bit.
"""

import inspect
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from outsize.errors import ModelError
from outsize.model.split import Split

# What decoders of transformers call it.
_NAME = "mlp"


def take_in_parts(split: Split, num_parts: int) -> None:
    """Have the MLP of every block of ``split`` take its tokens in ``num_parts`` parts; 1 leaves all as it is.

    Raises:
        ModelError: a block has no MLP of its own, or one that takes more than tokens, draws random numbers, or routes
            tokens to experts.
    """
    if num_parts == 1:
        return
    mlps = list(_mlps(split))
    for mlp in mlps:
        own = type(mlp)
        mlp.__class__ = type(f"{own.__name__}InParts", (_InParts, own), {"num_parts": num_parts})


def can_take_in_parts(split: Split) -> bool:
    """Return whether `take_in_parts` takes the MLPs of ``split``."""
    try:
        list(_mlps(split))
    except ModelError:
        return False
    return True


def parts_of(split: Split) -> int:
    """Return in how many parts the MLPs of ``split`` take their tokens."""
    blocks = (
        module for module, unit in zip(split.modules, split.spec.units, strict=False) if unit.kind == "block"
    )
    return next(
        (mlp.num_parts for block in blocks if isinstance(mlp := getattr(block, _NAME, None), _InParts)), 1
    )


def _mlps(split: Split) -> Iterator[nn.Module]:
    for module, unit in zip(split.modules, split.spec.units, strict=False):
        if unit.kind != "block":
            continue
        mlp = getattr(module, _NAME, None)
        reason = "has no module called mlp" if not isinstance(mlp, nn.Module) else _reason_against(mlp)
        if reason:
            raise ModelError(f"train.mlp_parts: {unit.name} {reason}; leave it at 1 for this model")
        yield cast(nn.Module, mlp)


def _reason_against(mlp: nn.Module) -> str | None:
    try:
        inspect.signature(mlp.forward).bind(None)
    except TypeError:
        return "has an MLP that takes more than the tokens"
    for child in mlp.modules():
        if isinstance(child, nn.Dropout) and child.p > 0:
            return "has dropout in its MLP, which would draw other numbers in each part"
        if isinstance(child, nn.ModuleList) or any(p.ndim > 2 for p in child.parameters(recurse=False)):
            return "has a mixture of experts for an MLP, which looks at all tokens together"
    return None


class _InParts(nn.Module):
    """Stands before a module's own class, whose forward it calls."""

    num_parts: int

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what the module makes of ``hidden`` [..., tokens, width], of one part of the tokens at a time."""
        if not torch.is_grad_enabled():
            return self.joined(hidden)
        # Weights may train where the input needs no gradient: something has to make autograd come here.
        anchor = torch.empty(0, device=hidden.device, requires_grad=True)
        kept = _Keep.apply(hidden, anchor)  # type: ignore[no-untyped-call]
        return cast(Tensor, _Parts.apply(kept, self))  # type: ignore[no-untyped-call]

    def joined(self, hidden: Tensor) -> Tensor:
        """Return the same without a graph of its own."""
        return torch.cat([self.own(part) for part in self.cut(hidden)], dim=-2)

    def cut(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of a tensor [..., tokens, width]."""
        return tensor.chunk(self.num_parts, dim=-2)

    def own(self, part: Tensor) -> Tensor:
        """Run the module's own forward; on contiguous memory, as it is called otherwise."""
        return cast(Tensor, super().forward(part.contiguous()))


class _Keep(Function):
    """Hands a tensor on, saved."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Parts(Function):
    """Runs a module part by part, and again, part by part, on the way back."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, module: _InParts) -> Tensor:
        ctx.module = module
        return module.joined(kept)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (hidden,) = ctx.next_functions[0][0].saved_tensors  # of `_Keep`, whose turn is next
        module: _InParts = ctx.module
        made = torch.empty_like(hidden)
        for part, its_gradient, into in zip(*map(module.cut, (hidden, gradient, made)), strict=True):
            leaf = part.detach().requires_grad_()
            with torch.enable_grad():
                out = module.own(leaf)
            torch.autograd.backward(out, its_gradient)
            into.copy_(cast(Tensor, leaf.grad))
        return made, None
