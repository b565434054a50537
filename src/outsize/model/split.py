"""Split a model into units: embedding, layers of the lists its forward calls, head, and outer parameters.

No architecture is named. A list is a `torch.nn.ModuleList`, a ``Sequential`` or a ``ModuleDict`` that is not inside the
layer of another one; the largest are taken until little is left outside. Where the layers of a list are stages of a
backbone (no two alike, each made of lists itself, as in a U-Net), the layers of those lists are taken. A model without
any list is cut into its own modules. The order is that of the definition until a forward tells another one. Embedding
and head are what ``get_input_embeddings`` and ``get_output_embeddings`` return. A parameter that several units use
(tied embeddings) and every one outside all units belongs to the *rest*, which stays on the device.
"""

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Final

from torch import nn

from outsize.compat.torch_private import parameters_of
from outsize.errors import ModelError
from outsize.model.sizes.model_spec import ModelSpec, PartKind, UnitKind, UnitSpec, pack_part, pack_unit

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Of all parameters: smaller lists stay outside, and so do all others once what is outside is less than the second.
LEAST_SHARE, SMALL_SHARE = 0.005, 0.02
# Of a stage's parameters, what lies in its lists.
STAGE_SHARE = 0.8

Named = tuple[str, nn.Module]


@dataclass(frozen=True, slots=True)
class UnitChoice:
    """How a model is cut: which of its modules are units, and in what order.

    Attributes:
        calls: of each forward that has called them in an order unknown before, the names of units called.
        with_head: whether the head is a unit; None: it is until a forward takes its weight by itself.
        resident: names of parameters that belong to the rest wherever they are.
    """

    calls: tuple[tuple[str, ...], ...] = ()
    with_head: bool | None = None
    resident: frozenset[str] = frozenset()

    def after(self, calls: Sequence[str]) -> "UnitChoice":
        """Return the choice when one more forward has called units so."""
        return replace(self, calls=(*self.calls, tuple(calls)))

    @property
    def repeated(self) -> frozenset[str]:
        """Units that a forward has called more than once."""
        return frozenset(name for calls in self.calls for name, times in Counter(calls).items() if times > 1)

    def arranged(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return units in an order that all forwards have kept; without those that are called again, or by turns.

        ``names`` are in the order that holds where no forward tells another one.
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
    left = total = size_of(model)
    lists = [_layer_list(name, layers) for name, layers in _lists_in("", model)]
    chosen: list[LayerList] = []
    for one in sorted(lists, key=lambda one: -one.size):
        if chosen and (one.size < LEAST_SHARE * total or left < SMALL_SHARE * total):
            break
        chosen.append(one)
        left -= one.size
    return [one for one in lists if one in chosen]


def _layer_list(name: str, layers: Sequence[Named]) -> LayerList:
    return LayerList(name, tuple(layers), sum(size_of(layer) for _, layer in layers))


def own_parts(model: nn.Module) -> LayerList | None:
    """Return the modules that a model without lists is made of; None where it is one piece."""
    name, module, best = "", model, None
    while True:
        parts = [
            (_joined(name, key), child)
            for key, child in module.named_children()
            if size_of(child) and type(child).forward is not nn.Module.forward
        ]
        if parts:
            best = _layer_list(name, parts)
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
    for key, child in module.named_children():
        yield from _lists_in(_joined(name, key), child, kinds)


def _layers_of(name: str, module: nn.Module) -> list[Named] | None:
    """Return the layers of a list; None where it holds none, or has a list of layers as large as all others within."""
    layers = [(_joined(name, key), child) for key, child in module.named_children() if size_of(child)]
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
    layers = [layer for _, layers in lists for _, layer in layers]
    return len(layers) > 1 and sum(map(size_of, layers)) >= STAGE_SHARE * size_of(module)


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


# A parameter: name, shape, whether it trains, whether it decays.
_Row = tuple[str, tuple[int, ...], bool, bool]


@dataclass(frozen=True, slots=True)
class Split:
    """A model and its units.

    Attributes:
        model: the module that was split; its parameters may be on meta.
        modules: the module of each streamed unit, in the order of the forward.
        spec: the same units in numbers, the rest last.
        owners: for each parameter name, every ``(module, attribute)`` that holds it, tied ones included.
    """

    model: nn.Module
    modules: tuple[nn.Module, ...]
    spec: ModelSpec
    owners: dict[str, tuple[tuple[nn.Module, str], ...]]

    @property
    def streamed_share(self) -> float:
        """The share of the parameters that lies in units that are streamed."""
        units = self.spec.units
        sizes = [sum(tensor.numel for tensor in unit.all_tensors) for unit in units]
        rest = sum(size for size, unit in zip(sizes, units, strict=True) if unit.kind == "rest")
        return 1 - rest / (sum(sizes) or 1)

    @property
    def layers(self) -> dict[str, int]:
        """The lists that blocks are of, in the order of the forward, and how many of each."""
        return Counter(unit.name.rpartition(".")[0] for unit in self.spec.units if unit.kind == "block")

    def said(self) -> str:
        """Return in words what is streamed."""
        lists = ", ".join(f"{name or 'the model'} ({count})" for name, count in self.layers.items())
        return f"layers of {lists}: {self.streamed_share:.0%} of the parameters are streamed"

    def tied_names(self) -> tuple[tuple[str, ...], ...]:
        """Return all names of each parameter as they were when the model was split.

        In a run the model does not say it: what is tied is bound at one place after the other, and with several workers
        to a parameter of each place's own.
        """
        paths: dict[int, list[str]] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            paths.setdefault(id(module), []).append(f"{path}." if path else "")
        return tuple(
            tuple(path + attribute for module, attribute in places for path in paths[id(module)])
            for places in self.owners.values()
        )


def split(
    model: nn.Module,
    dtype: str = "fp32",
    *,
    decays: Callable[[str], bool] = lambda _: True,
    freeze: tuple[str, ...] = (),
    apart: Callable[[str], PartKind | None] = lambda _: None,
    choice: UnitChoice = ALL_LISTS,
) -> Split:
    """Split ``model`` into units.

    Args:
        model: any module that holds a list of blocks; its parameters may be on meta.
        dtype: compute dtype of the planes, ``fp32``, ``bf16`` or ``fp16``.
        decays: whether weight decay applies to the parameter of that name.
        freeze: glob patterns of parameter names that are not trained.
        apart: in which frozen part of its unit the parameter of that name lies; None for none.
        choice: which modules are units, and in what order.

    Raises:
        ModelError: there is nothing to stream, a freeze pattern matches nothing, or what trains is to lie apart.
    """
    owners = _owners(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    frozen = {names[id(parameter)] for parameter in frozen_by(model, freeze)}
    modules = _unit_modules(model, choice)
    claims = Counter(names[id(parameter)] for *_, module in modules for parameter in module.parameters())
    parameters = dict(model.named_parameters())

    def row(name: str) -> _Row:
        tensor = parameters[name]
        return name, tuple(tensor.shape), tensor.requires_grad and name not in frozen, decays(name)

    units = []
    for index, (name, kind, module) in enumerate(modules):
        inner = [names[id(parameter)] for parameter in module.parameters()]
        alone = [
            m for m in inner if claims[m] == 1 and _inside(owners[m], module) and m not in choice.resident
        ]
        units.append(_pack(index, name, kind, map(row, alone), apart))
    placed = {tensor.name for unit in units for tensor in unit.all_tensors}
    loose = [name for name in parameters if name not in placed]
    if loose:
        units.append(_pack(len(units), "rest", "rest", map(row, loose), apart))
    spec = ModelSpec(units=tuple(units), dtype=dtype)
    return Split(model=model, modules=tuple(module for *_, module in modules), spec=spec, owners=owners)


def _pack(
    index: int, name: str, kind: UnitKind, rows: Iterable[_Row], apart: Callable[[str], PartKind | None]
) -> UnitSpec:
    """Return a unit of the parameters in ``rows``, those that lie apart in frozen parts of their own."""
    parts: dict[str, tuple[PartKind, list[tuple[str, tuple[int, ...]]]]] = {}
    together = []
    for row in rows:
        member, shape, trains, _ = row
        part = apart(member)
        if part is None:
            together.append(row)
        elif trains:
            raise ModelError(
                f"{member} trains, and lies with what did not when the model was wrapped; call requires_grad_(True) "
                "before outsize.wrap, also on adapters that are switched to later"
            )
        else:
            parts.setdefault(part.plane, (part, []))[1].append((member, shape))
    return pack_unit(index, name, kind, together, tuple(pack_part(*part) for part in parts.values()))


def _unit_modules(model: nn.Module, choice: UnitChoice) -> list[tuple[str, UnitKind, nn.Module]]:
    """Return name, kind and module of each unit, in the order in which the forward calls them as far as is known."""
    parts = own_parts(model)
    for lists in (layer_lists(model), [] if parts is None else [parts]):
        units = dict(_units_of(model, lists))
        order = choice.arranged(list(units))
        if any(units[name][0] == "block" for name in order):
            without = "head" if choice.with_head is False else ""
            return [(name, *units[name]) for name in order if units[name][0] != without]
    if parts is None:
        raise ModelError(
            f"{type(model).__name__} holds no module with parameters, so there is nothing to stream"
        )
    raise ModelError(
        f"{type(model).__name__} calls each of its layers several times in a forward, or by turns, so there is nothing "
        "to stream: outsize streams layers that are called once"
    )


def _units_of(
    model: nn.Module, lists: Iterable[LayerList]
) -> Iterator[tuple[str, tuple[UnitKind, nn.Module]]]:
    path = {id(module): name for name, module in model.named_modules()}
    embedding, head = end_of(model, "get_input_embeddings"), end_of(model, "get_output_embeddings")
    ends = (embedding, head)
    blocks = {name: module for one in lists for name, module in one.layers if module not in ends}
    inside = {id(module) for block in blocks.values() for module in block.modules()}
    if embedding is not None and _has_twin(model, embedding):
        embedding = None
    if embedding is not None and id(embedding) in path and id(embedding) not in inside:
        yield path[id(embedding)], ("embedding", embedding)
    for name, block in blocks.items():
        yield name, ("block", block)
    if head is not None and head is not embedding and id(head) in path and id(head) not in inside:
        yield path[id(head)], ("head", head)


def _has_twin(model: nn.Module, embedding: nn.Module) -> bool:
    """Whether another embedding has the same weights: an encoder's and its decoder's, which belong to the rest."""
    ids = {id(parameter) for parameter in embedding.parameters()}
    return any(
        module is not embedding and type(module) is type(embedding) and id(parameter) in ids
        for module in model.modules()
        for parameter in parameters_of(module).values()
    )


def end_of(model: nn.Module, method: str) -> nn.Module | None:
    """Return what a model answers ``method``, its embedding or its head; None where it has none."""
    getter = getattr(model, method, None)
    if getter is None:
        return None
    try:
        answer = getter()
    except NotImplementedError:  # how transformers says that a model has none
        return None
    return answer if isinstance(answer, nn.Module) else None


def _owners(model: nn.Module) -> dict[str, tuple[tuple[nn.Module, str], ...]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in names:
                raise ModelError(
                    f"{type(module).__name__}.{attribute} is made anew each time that modules are listed, as LoRA of "
                    "nn.MultiheadAttention does in PEFT: leave such layers out of target_modules"
                )
            owners[names[id(parameter)]].append((module, attribute))
    return {name: tuple(places) for name, places in owners.items()}


def _inside(places: tuple[tuple[nn.Module, str], ...], unit: nn.Module) -> bool:
    members = {id(module) for module in unit.modules()}
    return all(id(module) in members for module, _ in places)


def frozen_by(model: nn.Module, patterns: tuple[str, ...], *, everything: bool = False) -> list[nn.Parameter]:
    """Return the parameters whose names fit one of ``patterns``, or all.

    Raises:
        ModelError: a pattern matches nothing.
    """
    named = dict(model.named_parameters())
    names = list(named)
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            raise ModelError(
                f"freeze pattern {pattern!r} matches no parameter; names look like {names[0]!r} and {names[-1]!r}"
            )
    return [p for n, p in named.items() if everything or any(fnmatch(n, pattern) for pattern in patterns)]
