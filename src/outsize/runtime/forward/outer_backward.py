"""The backward of a model's own code: each piece of it is entered once, with gradients summed as autograd sums them."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from outsize.compat.torch_private import made_at
from outsize.runtime.forward.boundary import box_of

# An edge, without what keeps it alive.
_Key = tuple[Any, int]
# In the place of a piece: gradients that wait for none.
_AT_ONCE = -1


@dataclass(slots=True)
class _Waiting:
    """The sum so far of the gradients of what ``edge`` made, and the device where that lies; None where it is."""

    edge: GradientEdge
    gradient: Tensor
    device: torch.device | None

    def placed(self) -> Tensor:
        return self.gradient if self.device is None else self.gradient.to(self.device)


class OuterBackward:
    """Gradients of what the model's own code made, until the piece that made it goes backward.

    A piece is what that code does on the way to one unit, or behind the last. What it makes (a time embedding, a hidden
    state, a bias) may be used by many units and by other pieces. An uncut backward adds up the gradients of all these
    uses, that of the last one first, before it goes on; so they wait here, and `enter` goes on with the sums.

    Args:
        leaves_wait: whether gradients of leaves that units are given wait for the first piece; else each goes on at
            once, for parameters whose sums are open only where they are used.
    """

    def __init__(self, *, leaves_wait: bool = True) -> None:
        self._leaves_wait = leaves_wait
        self._ends: dict[int, int] = {}
        self._waiting: dict[int, dict[_Key, _Waiting]] = {}

    def end_piece(self, unit: int, num_nodes: int) -> None:
        """Note that the code on the way to ``unit`` has ended, when its thread had made so many nodes of graphs."""
        self._ends[unit] = num_nodes

    def defer(self, edge: GradientEdge, gradient: Tensor, device: torch.device | None = None) -> None:
        """Add a gradient of what ``edge`` made, which is to lie on ``device``."""
        waiting, key = self._waiting.setdefault(self._piece_of(edge.node), {}), _key(edge)
        former = waiting.get(key)
        if former is None:
            waiting[key] = _Waiting(edge, gradient, device)
        else:
            former.gradient = former.gradient.to(gradient.device) + gradient

    def take(self, edge: GradientEdge) -> Tensor | None:
        """Return the sum so far of the gradients of what ``edge`` made, which the caller adds to; None for none."""
        waiting = self._waiting.get(self._piece_of(edge.node), {}).pop(_key(edge), None)
        return None if waiting is None else waiting.gradient

    def enter_last(self) -> None:
        """Go backward through the code behind the last unit."""
        self.enter(self._behind())

    def enter(self, unit: int) -> None:
        """Go backward through the code on the way to ``unit``, as far as what pieces before it made."""
        begun = [*self._waiting.pop(unit, {}).values(), *self._waiting.pop(_AT_ONCE, {}).values()]
        boxes = [box_of(one.edge) for one in begun]
        if all(box is not None for box in boxes):
            for (box, position), one in zip(boxes, begun, strict=True):  # type: ignore[misc]
                box.add(position, one.gradient)
            return
        start = max((end for other, end in self._ends.items() if other < unit), default=0)
        crossings = _made_before(start, [one.edge.node for one in begun])
        seeds = [one for node in crossings for one in self._take_all_of(node)]
        with ExitStack() as stack:
            for node in crossings:
                stack.callback(node.register_prehook(partial(self._hold_back, node)).remove)
            pairs = [*seeds, *begun]
            torch.autograd.backward([p.edge for p in pairs], [p.placed() for p in pairs], retain_graph=True)

    def clear(self) -> None:
        """Forget all that waits."""
        self._waiting.clear()

    def _hold_back(self, node: Node, gradients: tuple[Tensor | None, ...]) -> tuple[None, ...]:
        """What ``node``, of a piece before, was given waits for that piece."""
        for at, gradient in enumerate(gradients):
            if gradient is not None:
                self.defer(GradientEdge(node, at), gradient)
        return (None,) * len(gradients)

    def _take_all_of(self, node: Node) -> Iterable[_Waiting]:
        waiting = self._waiting.get(self._piece_of(node), {})
        return [waiting.pop(key) for key in list(waiting) if key[0] is node]

    def _piece_of(self, node: Node) -> int:
        if _is_leaf(node):
            return min(self._ends, default=0) if self._leaves_wait else _AT_ONCE
        number = made_at(node)
        return min((unit for unit, end in self._ends.items() if end > number), default=self._behind())

    def _behind(self) -> int:
        return max(self._ends, default=-1) + 1


def _key(edge: GradientEdge) -> _Key:
    return edge.node, edge.output_nr


def _is_leaf(node: Node) -> bool:
    return hasattr(node, "variable")


def _made_before(start: int, nodes: Sequence[Node]) -> list[Node]:
    """Return where the graph behind ``nodes`` goes on into nodes that were made before ``start``."""
    waiting, seen, found = list(nodes), set[Node](), list[Node]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for before, _ in node.next_functions:
            if before is None or before in seen or _is_leaf(before):
                continue
            if made_at(before) < start:
                seen.add(before)
                found.append(before)
            else:
                waiting.append(before)
    return found
