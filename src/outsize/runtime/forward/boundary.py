"""Where the autograd graph is cut: tensors enter the model's own code without history, their gradients come back here.

A unit runs apart from the code around it. What it returns goes on into that code as fresh tensors; `hand_out` makes
them, and when a backward pass reaches them their gradients are kept in a `Gradients` box instead of travelling on.
The box holds no activation: what the surrounding code does not need is free at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from outsize.compat import torch_private
from outsize.errors import ModelError

Forward = Callable[..., Any]
Roots = list[GradientEdge | None]


class Gate:
    """Whether gradients may arrive: only while their own microbatch goes backward."""

    __slots__ = ("is_open",)

    def __init__(self) -> None:
        self.is_open = True

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let gradients arrive while the context lasts."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False


class Gradients:
    """Gradients of the tensors that one unit handed out, by position; None where none has arrived.

    Args:
        outputs: the tensors, in any nesting.
        gate: of the microbatch; None where it stays open.
    """

    def __init__(self, outputs: Any, gate: Gate | None = None) -> None:
        self.values: list[Tensor | None] = [None] * len(torch_private.leaves_of(outputs))
        self.gate = gate or Gate()

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
        ctx.set_materialize_grads(False)
        return hidden[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None, None, None]:
        if gradient is None:  # it waits for the code that the tensor was handed to
            return None, None, None, None
        if not ctx.box.gate.is_open:
            raise ModelError(
                "a loss depends on a tensor that a layer left on itself, or in a list, and that the model's forward "
                "did not return, or that is of another microbatch; its gradient would not reach the layer. Have the "
                "layer and the model return it, or set microbatches=1"
            )
        ctx.box.add(ctx.position, gradient)
        return None, None, None, None


def box_of(tensor: Tensor | GradientEdge) -> tuple[Gradients, int] | None:
    """The box and the position in it where a gradient of ``tensor`` ends; None where other code comes before."""
    node = tensor.grad_fn if isinstance(tensor, Tensor) else tensor.node
    box = getattr(node, "box", None)
    return (box, node.position) if isinstance(box, Gradients) else None  # type: ignore[union-attr]


def is_differentiable(value: object) -> bool:
    """Whether ``value`` is a tensor that can carry a gradient."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def cut(outputs: Any) -> Any:
    """Return ``outputs``, any nesting of tensors and other values, without their history."""
    return torch_private.map_leaves(lambda leaf: leaf.detach() if is_differentiable(leaf) else leaf, outputs)


def hand_out(outputs: Any, box: Gradients) -> Any:
    """Return ``outputs`` cut from their history; their gradients end in ``box``.

    Autograd sums gradients of one tensor on the stream that is current now: that of the lane which reads the sum.
    """
    leaves, structure = torch_private.flatten(outputs)
    positions = [at for at, leaf in enumerate(leaves) if is_differentiable(leaf)]
    return torch_private.unflatten(cut_at(leaves, positions, box), structure)


def cut_at(leaves: Sequence[Any], positions: Iterable[int], box: Gradients) -> list[Any]:
    """Return ``leaves``, those at ``positions`` cut from their history; their gradients end in ``box``.

    There they arrive as they come. A leaf of a graph would give its gradient the strides that it has itself, and sums
    over a tensor that lies in another order are rounded otherwise.
    """
    cut_off = list(leaves)
    anchor = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        for position in positions:
            hidden = (cut_off[position].detach(),)
            cut_off[position] = _Boundary.apply(anchor, box, position, hidden)  # type: ignore[no-untyped-call]
    return cut_off


def roots_of(leaves: Sequence[Tensor]) -> Roots:
    """Where the graph of ``leaves`` begins, by position; unlike the tensors themselves it holds no memory of them."""
    return [get_gradient_edge(leaf) if leaf.requires_grad else None for leaf in leaves]
