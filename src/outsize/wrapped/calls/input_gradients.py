"""Gradients of the tensors that a model is called with: vectors in the place of tokens, a prompt that trains.

The caller's graph ends at the call. Each microbatch gets leaves of its own for such tensors, and what arrives there is
put together for the node behind the outputs, which hands it on to the caller's graph.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outsize.compat import torch_private


def inputs_that_train(inputs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors in the inputs of a model whose gradients the caller wants."""
    return [leaf for leaf in torch_private.leaves_of(dict(inputs)) if _trains(leaf)]


class InputGradients:
    """The inputs of a call whose gradients the caller wants.

    Args:
        inputs: of the model.
        parts: the same cut into microbatches.

    Attributes:
        given: the tensors, as the caller has them.
        parts: the microbatches, with leaves in the place of these tensors.
    """

    def __init__(self, inputs: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> None:
        positions = [at for at, leaf in enumerate(torch_private.leaves_of(dict(inputs))) if _trains(leaf)]
        self.given = inputs_that_train(inputs)
        self.parts: list[dict[str, Any]] = []
        self._leaves: list[list[Tensor]] = [[] for _ in positions]
        for part in parts:
            leaves, structure = torch_private.flatten(dict(part))
            for made, at in zip(self._leaves, positions, strict=True):
                leaves[at] = leaves[at].detach().requires_grad_()
                made.append(leaves[at])
            self.parts.append(torch_private.unflatten(leaves, structure))
        self._across = [
            next((d for d in range(whole.dim()) if whole.shape[d] != made[0].shape[d]), None)
            for whole, made in zip(self.given, self._leaves, strict=True)
        ]

    def let_go(self) -> None:
        """Hold no longer what the caller has given."""
        self.given = []

    def gradients(self) -> list[Tensor | None]:
        """Return the gradient of each of them, where one has arrived."""
        return [_joined(made, across) for made, across in zip(self._leaves, self._across, strict=True)]


def _trains(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _joined(leaves: Sequence[Tensor], across: int | None) -> Tensor | None:
    """The gradient of a tensor from those of its parts: rows one behind the other, else the sum."""
    arrived = [leaf.grad for leaf in leaves if leaf.grad is not None]
    if not arrived:
        return None
    if across is not None:
        return torch.cat(
            [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves], across
        )
    total = arrived[0]
    for gradient in arrived[1:]:
        total = total + gradient
    return total
