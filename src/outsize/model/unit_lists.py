"""Choose the modules that are streamed as units, and their order: layers of as many lists as the forward calls.

A list is a `torch.nn.ModuleList`, a ``Sequential`` or a ``ModuleDict`` that is not inside the layer of another one. The
largest are taken until what is left outside is small. Where the layers of a list are stages of a backbone (no two
alike, each made of lists itself, as in a U-Net), the layers of those lists are taken. A model without any list is cut
into the modules of its own.

The order is that of the definition until a forward has told another one (`UnitChoice.calls`).
"""

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from torch import nn

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Of all parameters: smaller lists stay outside, and so do all others once what is outside is less than the second.
LEAST_SHARE, SMALL_SHARE = 0.005, 0.02
# Of a stage's parameters, what lies in its lists.
STAGE_SHARE = 0.8

Named = tuple[str, nn.Module]


@dataclass(frozen=True, slots=True)
class UnitChoice:
    """Which layers are units, and in what order.

    Attributes:
        calls: of each forward that has called them in an order unknown before, the names of units called.
    """

    calls: tuple[tuple[str, ...], ...] = ()

    def after(self, calls: Sequence[str]) -> "UnitChoice":
        """Return the choice when one more forward has called units so."""
        return replace(self, calls=(*self.calls, tuple(calls)))

    @property
    def repeated(self) -> frozenset[str]:
        """Units that a forward has called more than once."""
        return frozenset(name for calls in self.calls for name, times in Counter(calls).items() if times > 1)

    def arranged(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return units in an order that all forwards have kept; without those that are called again, or by turns.

        Args:
            names: of units, in the order that holds where no forward tells another one.
        """
        left = set(names) - self.repeated
        before: dict[str, set[str]] = defaultdict(set)
        for calls in self.calls:
            met = [name for name in calls if name in left]
            for first, second in itertools.pairwise(met):
                before[second].add(first)
        place = {name: at for at, name in enumerate(names)}
        after, waits = defaultdict[str, list[str]](list), {name: len(before[name]) for name in left}
        for name, others in before.items():
            for other in others:
                after[other].append(name)
        ready = [place[name] for name in left if not waits[name]]
        heapq.heapify(ready)
        order: list[str] = []
        while ready:
            order.append(names[heapq.heappop(ready)])
            for name in after[order[-1]]:
                waits[name] -= 1
                if not waits[name]:
                    heapq.heappush(ready, place[name])
        return tuple(order)


ALL_LISTS: Final = UnitChoice()


@dataclass(frozen=True, slots=True)
class LayerList:
    """A list of layers.

    Attributes:
        name: of the list.
        layers: name and module of each.
    """

    name: str
    layers: tuple[Named, ...]
    size: int = field(compare=False)


def layer_lists(model: nn.Module) -> list[LayerList]:
    """Return the lists whose layers are streamed, in the order of their definition; none where there is none."""
    total = size_of(model)
    found = [
        LayerList(name, tuple(layers), sum(size_of(each) for _, each in layers))
        for name, layers in _lists_in("", model)
    ]
    chosen: list[LayerList] = []
    left = total
    for one in sorted(found, key=lambda one: -one.size):
        if chosen and (one.size < LEAST_SHARE * total or left < SMALL_SHARE * total):
            break
        chosen.append(one)
        left -= one.size
    return [one for one in found if one in chosen]


def own_parts(model: nn.Module) -> LayerList | None:
    """Return the modules that a model without lists is made of; None where it is one piece."""
    name, module, best = "", model, None
    while True:
        parts = [
            (_joined(name, own), child)
            for own, child in module.named_children()
            if size_of(child) and type(child).forward is not nn.Module.forward
        ]
        if parts:
            best = LayerList(name, tuple(parts), sum(size_of(one) for _, one in parts))
        if len(parts) != 1 or any(True for _ in module.parameters(recurse=False)):
            return best
        ((name, module),) = parts


def size_of(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def _lists_in(
    name: str, module: nn.Module, kinds: tuple[type[nn.Module], ...] = LISTS
) -> Iterator[tuple[str, list[Named]]]:
    if isinstance(module, kinds) and (layers := _layers_of(name, module)) is not None:
        stages = [list(_lists_in(*layer, (nn.ModuleList,))) for layer in layers]
        if not _are_stages(layers, stages):
            yield name, layers
            return
        for layer, inner in zip(layers, stages, strict=True):
            yield from inner if _covers(inner, layer[1]) else [(layer[0], [layer])]
        return
    for own, child in module.named_children():
        yield from _lists_in(_joined(name, own), child, kinds)


def _layers_of(name: str, module: nn.Module) -> list[Named] | None:
    """Return the layers of a list; None where it holds none, or has a list of layers as large as all others within."""
    layers = [(_joined(name, own), child) for own, child in module.named_children() if size_of(child)]
    if not layers:
        return None
    if not isinstance(module, nn.ModuleList):  # a backbone and its head, say
        inner = (size_of(each) for each in module.modules() if isinstance(each, nn.ModuleList))
        if max(inner, default=0) > size_of(module) / 2:
            return None
    return layers


def _are_stages(layers: Sequence[Named], inner: Sequence[list[tuple[str, list[Named]]]]) -> bool:
    forms = Counter(tuple(p.shape for p in module.parameters()) for _, module in layers)
    covered = (_covers(lists, module) for (_, module), lists in zip(layers, inner, strict=True))
    return len(layers) > 1 and max(forms.values()) == 1 and any(covered)


def _covers(lists: Iterable[tuple[str, list[Named]]], module: nn.Module) -> bool:
    """Whether lists hold most of a module, in more than one layer."""
    layers = [layer for _, layers in lists for _, layer in layers]
    return len(layers) > 1 and sum(map(size_of, layers)) >= STAGE_SHARE * size_of(module)


def _joined(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own
