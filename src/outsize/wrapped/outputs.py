"""What the model returned for each microbatch, joined to what it would have returned for the batch.

Tensors are joined leaf by leaf:

* a number (the loss, an auxiliary loss): weighted as in `wrapped.batching` and added;
* a tensor whose first dimension is the rows of its microbatch, or a multiple of them (router logits, one per token):
  concatenated, in the order of the batch;
* anything else: kept where all microbatches returned the same, else None (a cache of keys and values, say).

With one microbatch everything is returned as it is. Of graphs only the edges are kept, not the tensors of microbatches.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from outsize.errors import ModelError

Roots = dict[int, tuple[list[Any], list[Tensor]]]


@dataclass(slots=True)
class _Leaf:
    """A differentiable leaf of the output: where its graphs begin, and how its gradient is dealt out to them.

    Attributes:
        edges: by microbatch; None where there is no history.
        lengths: of the first dimension by microbatch; None for numbers.
        divisors: of numbers.
    """

    edges: list[Any]
    lengths: tuple[int, ...] | None
    divisors: tuple[float, ...]

    def deal(self, gradient: Tensor) -> list[Tensor | None]:
        if self.lengths is not None:
            return list(torch.split(gradient, list(self.lengths))) if len(self.lengths) > 1 else [gradient]
        return [None if math.isinf(divisor) else gradient / divisor for divisor in self.divisors]


class Joined:
    """The output of a batch.

    Attributes:
        leaves: its flattened values, without history.
    """

    def __init__(self, outputs: list[Any], sizes: Sequence[int], divisors: tuple[float, ...]) -> None:
        self._namespace = outputs[0] if _is_namespace(outputs[0]) else None
        flat = [pytree.tree_flatten(vars(o) if _is_namespace(o) else o) for o in outputs]
        self._structure = flat[0][1]
        if any(structure != self._structure for _, structure in flat):
            raise ModelError(
                "the model returned outputs of another form for each microbatch; set microbatches=1"
            )
        self._tracked: dict[int, _Leaf] = {}
        self.leaves: list[Any] = []
        for position, leaves in enumerate(zip(*(leaves for leaves, _ in flat), strict=True)):
            self.leaves.append(self._join(position, leaves, tuple(sizes), divisors))

    @property
    def differentiable(self) -> list[int]:
        """Positions of the leaves that have a history."""
        return list(self._tracked)

    def build(self, replaced: dict[int, Tensor]) -> Any:
        """Return the output, with the leaves at some positions replaced."""
        leaves = [replaced.get(position, leaf) for position, leaf in enumerate(self.leaves)]
        built = pytree.tree_unflatten(leaves, self._structure)
        if self._namespace is None:
            return built
        output = copy.copy(self._namespace)
        vars(output).update(built)
        return output

    def forget_values(self) -> None:
        """Keep only what `roots` needs."""
        self.leaves.clear()

    def roots(self, gradients: Sequence[Tensor | None]) -> Roots:
        """Return for each microbatch the roots of its graph and their gradients, from gradients of `differentiable`."""
        roots: Roots = {}
        for leaf, gradient in zip(self._tracked.values(), gradients, strict=True):
            if gradient is None:
                continue
            for microbatch, (edge, part) in enumerate(zip(leaf.edges, leaf.deal(gradient), strict=True)):
                if edge is not None and part is not None:
                    edges, parts = roots.setdefault(microbatch, ([], []))
                    edges.append(edge)
                    parts.append(part)
        return roots

    def _join(
        self, position: int, leaves: tuple[Any, ...], sizes: tuple[int, ...], divisors: tuple[float, ...]
    ) -> Any:
        first = leaves[0]
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            return first if len(leaves) == 1 or all(_same(leaf, first) for leaf in leaves) else None
        lengths: tuple[int, ...] | None = None
        if len(leaves) == 1:
            value = first.detach()
            lengths = None if not first.dim() else (len(first),)
        elif not first.dim():
            shares = [
                leaf.detach() / d for leaf, d in zip(leaves, divisors, strict=True) if not math.isinf(d)
            ]
            value = _sum(shares) if first.is_floating_point() else first
        elif _proportional(leaves, sizes):
            lengths = tuple(len(leaf) for leaf in leaves)
            value = torch.cat([leaf.detach() for leaf in leaves])
        else:
            return (
                first
                if all(leaf.shape == first.shape and torch.equal(leaf, first) for leaf in leaves)
                else None
            )
        if any(leaf.requires_grad for leaf in leaves):
            edges = [torch.autograd.graph.get_gradient_edge(x) if x.requires_grad else None for x in leaves]
            self._tracked[position] = _Leaf(edges, lengths, divisors)
        return value


def _is_namespace(output: Any) -> bool:
    """Whether an output is an object whose attributes are the outputs."""
    return hasattr(output, "__dict__") and pytree.tree_is_leaf(output) and not isinstance(output, Tensor)


def _sum(shares: list[Tensor]) -> Tensor:
    total = shares[0]
    for share in shares[1:]:
        total = total + share
    return total


def _proportional(leaves: tuple[Tensor, ...], sizes: tuple[int, ...]) -> bool:
    """Whether the first dimension of each is the same multiple of the rows of its microbatch, the rest alike."""
    multiple, remainder = divmod(len(leaves[0]), sizes[0])
    return not remainder and all(
        len(leaf) == multiple * size and leaf.shape[1:] == leaves[0].shape[1:]
        for leaf, size in zip(leaves, sizes, strict=True)
    )


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, str | int | float | bool) and one == other)
