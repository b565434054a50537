"""Where the autograd graph is cut: tensors enter the model's own code without history, their gradients come back here.

A unit runs apart from the code around it. What it returns goes on into that code as fresh tensors; `hand_out` makes
them, and when a backward pass reaches them their gradients are kept in a `Gradients` box instead of travelling on.
The box holds no activation: what the surrounding code does not need is free at once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Gradients:
    """Gradients of the tensors that one unit handed out, by position; None where none has arrived."""

    def __init__(self, count: int) -> None:
        self.values: list[Tensor | None] = [None] * count

    def add(self, position: int, gradient: Tensor) -> None:
        """Add what one backward pass brings; a tensor used by several units collects several."""
        held = self.values[position]
        self.values[position] = gradient if held is None else held + gradient


class _Boundary(torch.autograd.Function):
    """Gives a tensor to surrounding code; its gradient ends in a box.

    The tensor comes inside a tuple, where autograd does not see it, so the result is a fresh tensor rather than a view,
    and surrounding code may change it in place as it may in an uncut graph.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, box: Gradients, position: int, hidden: tuple[Tensor]) -> Tensor:
        ctx.box, ctx.position = box, position
        return hidden[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.box.add(ctx.position, gradient)
        return None, None, None, None


def box_of(tensor: Tensor) -> tuple[Gradients, int] | None:
    """The box and the position in it where a gradient of ``tensor`` ends; None where other code comes before."""
    node = tensor.grad_fn
    box = getattr(node, "box", None)
    return (box, node.position) if isinstance(box, Gradients) else None  # type: ignore[union-attr]


def is_differentiable(value: object) -> bool:
    """Whether ``value`` is a tensor that can carry a gradient."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def hand_out(outputs: Any, *, tracked: bool, box: Gradients | None = None) -> tuple[Any, Gradients]:
    """Return ``outputs`` cut from their history, and the box that will hold their gradients.

    Args:
        outputs: any nesting of tensors and other values, as a unit returned it.
        tracked: whether gradients are wanted at all; a frozen prefix of the model hands out plain tensors.
        box: of an earlier call for the same outputs, where they come a second time; None makes one.
    """
    leaves, structure = pytree.tree_flatten(outputs)
    tensors = [leaf.detach() if is_differentiable(leaf) else leaf for leaf in leaves]
    box = Gradients(len(leaves)) if box is None else box
    if tracked:
        anchor = torch.zeros((), requires_grad=True)
        with torch.enable_grad():
            for position, tensor in enumerate(tensors):
                if is_differentiable(tensor):
                    tensors[position] = _Boundary.apply(anchor, box, position, (tensor,))  # type: ignore[no-untyped-call]
    return pytree.tree_unflatten(tensors, structure), box
