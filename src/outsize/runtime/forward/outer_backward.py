"""The backward of a model's own code behind its last unit, as far as where that uses what was made before a unit."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from outsize.compat.torch_private import made_at
from outsize.runtime.forward.boundary import box_of
from outsize.runtime.forward.unit_visit import UnitVisit

Pair = tuple[GradientEdge, Tensor]


def leave_last(pairs: Iterable[Pair], visits: Iterable[UnitVisit]) -> None:
    """Go backward from what the model returned, through the code behind its last unit.

    A gradient of what was made before a unit (a hidden state, a long residual) waits for the backward of that unit: an
    uncut one adds to it what comes out of the unit, term by term, and goes through the code before the unit once.

    Args:
        pairs: where graphs begin, and gradients.
        visits: the units that wait for their backward, in the order of the forward.
    """
    visits, own = list(visits), list[Pair]()
    for edge, gradient in pairs:
        next(_known_after(edge.node, visits), own).append((edge, gradient))
    if not own:
        return
    starts = _starts_before([edge for edge, _ in own], max((visit.came_at for visit in visits), default=0))

    def wait(node: Node, gradients: tuple[Tensor | None, ...]) -> tuple[None, ...]:
        known = next(_known_after(node, visits))
        known += [
            (GradientEdge(node, at), gradient)
            for at, gradient in enumerate(gradients)
            if gradient is not None
        ]
        return (None,) * len(gradients)

    with ExitStack() as stack:
        for node in starts:
            stack.callback(node.register_prehook(partial(wait, node)).remove)
        edges, gradients = [edge for edge, _ in own], [gradient for _, gradient in own]
        torch.autograd.backward(edges, gradients, retain_graph=bool(starts))


def _known_after(node: Node, visits: Sequence[UnitVisit]) -> Iterator[list[Pair]]:
    """Yield what is known to the first unit that was called after ``node`` was made, and to those behind it."""
    number = made_at(node)
    return (visit.known for visit in visits if visit.came_at > number)


def _starts_before(edges: Sequence[GradientEdge], last: int) -> list[Node]:
    """Return where a graph goes on into nodes that were made before the last unit was called at ``last``."""
    waiting, seen, found = [edge.node for edge in edges], set[Node](), list[Node]()
    while waiting:
        node = waiting.pop()
        if node in seen or box_of(GradientEdge(node, 0)) is not None or not node.next_functions:
            continue
        seen.add(node)
        if made_at(node) < last:
            found.append(node)
        else:
            waiting += [one for one, _ in node.next_functions if one is not None]
    return found
