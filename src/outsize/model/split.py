"""Find the units of a model: its embedding, its repeated blocks, its head, and the rest.

No architecture is named here. The blocks are the layers of its lists (`model.unit_lists`); embedding and head are what
the model itself calls so (``get_input_embeddings``, ``get_output_embeddings``). A parameter that more than one unit
uses (tied embeddings) and every parameter outside all units belongs to the *rest*, which stays on the device. A unit
whose parameters are all tied keeps its place in the order and has no bytes of its own.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch

from torch import nn

from outsize.compat.torch_private import parameters_of
from outsize.errors import ModelError
from outsize.model.sizes.model_spec import ModelSpec, PartKind, UnitKind, UnitSpec, pack_part, pack_unit
from outsize.model.unit_lists import ALL_LISTS, LayerList, UnitChoice, layer_lists, own_parts

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
        return 1 - sum(n for n, unit in zip(sizes, units, strict=True) if unit.kind == "rest") / (
            sum(sizes) or 1
        )

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
    with_head: bool = True,
    resident: Container[str] = (),
    choice: UnitChoice = ALL_LISTS,
) -> Split:
    """Split ``model`` into units.

    Args:
        model: any module that holds a list of blocks; its parameters may be on meta.
        dtype: compute dtype of the planes, ``fp32``, ``bf16`` or ``fp16``.
        decays: whether weight decay applies to the parameter of that name.
        freeze: glob patterns of parameter names that are not trained.
        apart: in which frozen part of its unit the parameter of that name lies; None for none.
        with_head: whether the head is a unit; otherwise its parameters belong to the rest.
        resident: names of further parameters that belong to the rest.
        choice: which layers are units, and in what order.

    Raises:
        ModelError: there is nothing to stream, a freeze pattern matches nothing, or what trains is to lie apart.
    """
    owners = _owners(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    _check_patterns(freeze, names.values())
    modules = [found for found in _unit_modules(model, choice) if with_head or found[1] != "head"]
    claims = Counter(names[id(parameter)] for *_, module in modules for parameter in module.parameters())
    parameters = dict(model.named_parameters())

    def pack(index: int, name: str, kind: UnitKind, members: list[str]) -> UnitSpec:
        rows = [
            (
                member,
                tuple(parameters[member].shape),
                parameters[member].requires_grad and not any(fnmatch(member, pattern) for pattern in freeze),
                decays(member),
            )
            for member in members
        ]
        return _pack(index, name, kind, rows, apart)

    units = []
    for index, (name, kind, module) in enumerate(modules):
        own = [names[id(parameter)] for parameter in module.parameters()]
        alone = [m for m in own if claims[m] == 1 and _inside(owners[m], module) and m not in resident]
        units.append(pack(index, name, kind, alone))
    taken = {tensor.name for unit in units for tensor in unit.all_tensors}
    loose = [name for name in parameters if name not in taken]
    if loose:
        units.append(pack(len(units), "rest", "rest", loose))
    spec = ModelSpec(units=tuple(units), dtype=dtype)
    return Split(model=model, modules=tuple(module for *_, module in modules), spec=spec, owners=owners)


def _pack(
    index: int, name: str, kind: UnitKind, rows: Iterable[_Row], apart: Callable[[str], PartKind | None]
) -> UnitSpec:
    """Return a unit of the parameters in ``rows``, those that lie apart in frozen parts of their own."""
    parts: dict[str, tuple[PartKind, list[tuple[str, tuple[int, ...]]]]] = {}
    kept = []
    for row in rows:
        member, shape, trains, _ = row
        part = apart(member)
        if part is None:
            kept.append(row)
        elif trains:
            raise ModelError(
                f"{member} trains, and lies with what did not when the model was wrapped; call requires_grad_(True) "
                "before outsize.wrap, also on adapters that are switched to later"
            )
        else:
            parts.setdefault(part.plane, (part, []))[1].append((member, shape))
    return pack_unit(index, name, kind, kept, tuple(pack_part(*part) for part in parts.values()))


def _unit_modules(model: nn.Module, choice: UnitChoice) -> list[tuple[str, UnitKind, nn.Module]]:
    """Return name, kind and module of each unit, in the order in which the forward calls them as far as is known.

    Raises:
        ModelError: there is none that is called once.
    """
    parts = own_parts(model)
    for lists in (layer_lists(model), [] if parts is None else [parts]):
        units = dict(_units_of(model, lists))
        order = choice.arranged(list(units))
        if any(units[name][0] == "block" for name in order):
            return [(name, *units[name]) for name in order]
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
    own = {id(parameter) for parameter in embedding.parameters()}
    return any(
        module is not embedding and type(module) is type(embedding) and id(parameter) in own
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
    _check_patterns(patterns, named)
    return [p for n, p in named.items() if everything or any(fnmatch(n, pattern) for pattern in patterns)]


def _check_patterns(patterns: tuple[str, ...], names: Iterable[str]) -> None:
    known = list(names)
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in known):
            raise ModelError(
                f"freeze pattern {pattern!r} matches no parameter; names look like {known[0]!r} and {known[-1]!r}"
            )
