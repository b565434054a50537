"""Experts as parts of their own: only those that a batch has chosen are fetched, and the hot ones stay.

transformers holds the experts of a layer as rows of a few tensors, [experts, ...]. Which rows a batch needs is known
when the module that holds them is called with the choice of its router. So it is called on a table of those rows, in
their order, and on a choice that counts in it: the same sums over the same numbers as with all of them there. Rows come
on demand, with nothing to hide them behind; what they save is the rest of the layer.

Rows stay by access counters that decay, as far as there is room, and the one with the least goes first.
"""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from outsize.compat.torch_private import parameters_of
from outsize.inference.kv_cache import no_grad_parameter, ordinary
from outsize.inference.source import Source
from outsize.model.sizes.model_spec import ModelSpec, TensorSpec, UnitSpec, pack_unit
from outsize.model.split import Split
from outsize.planner.search.forward_plan import LEAST_SPARSITY

# What the argument is called that holds the choice, [tokens, k].
CHOICES = ("top_k_index", "router_indices")
# Calls of one layer after which an access counts half.
HALF_LIFE = 50


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """A module that holds experts.

    Attributes:
        unit: its unit.
        module: the module.
        choice: name of the argument that says which rows are needed.
        tensors: attribute → where the tensor lies in the unit at home.
    """

    unit: int
    module: nn.Module
    choice: str
    tensors: dict[str, TensorSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStatistics:
    """How experts came up that are fetched one by one.

    Attributes:
        num_experts: of all layers.
        num_uses: of an expert in a call of its layer, by however many tokens.
        num_hits: of them, those that found it on the device.
        bytes_moved: of those that did not.
        num_hot: experts that are on the device now.
        hot_bytes: of them.
    """

    num_experts: int
    num_uses: int
    num_hits: int
    bytes_moved: int
    num_hot: int
    hot_bytes: int

    def since(self, earlier: "ExpertStatistics | None") -> "ExpertStatistics":
        """Return what came after earlier statistics."""
        if earlier is None:
            return self
        counts = ("num_uses", "num_hits", "bytes_moved")
        return replace(self, **{name: getattr(self, name) - getattr(earlier, name) for name in counts})


def find_experts(split: Split) -> list[Experts]:
    """Return the modules whose experts are worth fetching one by one."""
    config = getattr(split.model, "config", None)
    chosen = int(getattr(config, "num_experts_per_tok", None) or 0)
    places = {
        (id(module), attribute): name for name, owners in split.owners.items() for module, attribute in owners
    }
    layers = []
    for unit, root in zip(split.spec.units, split.modules, strict=False):
        tensor_of = {tensor.name: tensor for tensor in unit.tensors}
        for module in root.modules() if chosen and not unit.frozen else ():
            count, parameters = getattr(module, "num_experts", None), dict(module.named_parameters())
            choice = next(
                (name for name in CHOICES if name in inspect.signature(module.forward).parameters), ""
            )
            if (
                choice
                and isinstance(count, int)
                and count >= LEAST_SPARSITY * chosen
                and parameters
                and all("." not in name and len(value) == count for name, value in parameters.items())
                and all(places[id(module), name] in tensor_of for name in parameters)
            ):
                tensors = {name: tensor_of[places[id(module), name]] for name in parameters}
                layers.append(Experts(unit.index, module, choice, tensors))
    return layers


def without(split: Split, experts: list[Experts]) -> Split:
    """Return the split whose units do not hold these experts."""
    apart = {tensor.name for one in experts for tensor in one.tensors.values()}

    def thin(unit: UnitSpec) -> UnitSpec:
        left = [t for t in unit.tensors if t.name not in apart]
        if len(left) == len(unit.tensors):
            return unit
        return pack_unit(
            unit.index, unit.name, unit.kind, [(t.name, t.shape, t.trainable, t.decay > 0) for t in left]
        )

    spec = ModelSpec(units=tuple(map(thin, split.spec.units)), dtype=split.spec.dtype)
    return replace(split, spec=spec)


class ExpertCache:
    """Fetches rows of experts, and keeps some.

    Attributes:
        room_bytes: for rows that stay between calls.
        held_bytes: of them.
    """

    def __init__(self, experts: list[Experts], source: Source) -> None:
        self._experts = experts
        self._source = source
        self._rows: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._count: dict[tuple[int, int], float] = {}
        self._last: dict[tuple[int, int], int] = {}
        self._calls = self._uses = self._hits = self._bytes_moved = 0
        self._decay = 0.5 ** (1.0 / (HALF_LIFE * max(len(experts), 1)))
        self.room_bytes = self.held_bytes = 0
        for one in experts:
            for tensor in one.tensors.values():
                source.table(one.unit, tensor)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Have the modules compute on fetched rows while the context lasts."""
        reals = [one.module.forward for one in self._experts]
        had_own = ["forward" in vars(one.module) for one in self._experts]
        for number, (one, real) in enumerate(zip(self._experts, reals, strict=True)):
            one.module.forward = self._boundary(number, one, real)
        try:
            yield
        finally:
            for one, real, had_forward in zip(self._experts, reals, had_own, strict=True):
                if had_forward:
                    one.module.forward = real
                else:
                    del one.module.forward

    def statistics(self) -> ExpertStatistics | None:
        """Return counts since the model was opened; None where no expert is fetched."""
        if not self._experts:
            return None
        return ExpertStatistics(
            num_experts=sum(cast(Any, one.module).num_experts for one in self._experts),
            num_uses=self._uses,
            num_hits=self._hits,
            bytes_moved=self._bytes_moved,
            num_hot=len(self._rows),
            hot_bytes=self.held_bytes,
        )

    def shrink(self, room_bytes: int) -> None:
        """Keep no more than ``room_bytes`` from now on."""
        self.room_bytes = room_bytes
        self._drop()

    def _boundary(self, number: int, experts: Experts, real: Any) -> Any:
        signature = inspect.signature(real)

        def forward(*args: Any, **kwargs: Any) -> Any:
            called = signature.bind(*args, **kwargs)
            needed, places = torch.unique(called.arguments[experts.choice], return_inverse=True)
            called.arguments[experts.choice] = places
            rows = self._fetch(number, experts, needed.tolist())
            module: Any = experts.module
            parameters, count = dict(parameters_of(module)), module.num_experts
            try:
                for name in experts.tensors:
                    parameters_of(module)[name] = no_grad_parameter(torch.cat([row[name] for row in rows]))
                module.num_experts = len(rows)
                return real(*called.args, **called.kwargs)
            finally:
                parameters_of(module).update(parameters)
                module.num_experts = count
                del rows
                self._drop()

        return forward

    def _fetch(self, number: int, experts: Experts, needed: list[int]) -> list[dict[str, Tensor]]:
        self._calls += 1
        fetched = []
        self._uses += len(needed)
        for expert in needed:
            key = (number, expert)
            self._hits += key in self._rows
            if key not in self._rows:
                with ordinary():
                    self._rows[key] = {
                        name: self._source.rows(experts.unit, tensor, torch.tensor([expert]))
                        for name, tensor in experts.tensors.items()
                    }
                num_bytes = sum(row.nbytes for row in self._rows[key].values())
                self.held_bytes += num_bytes
                self._bytes_moved += num_bytes
            self._count[key] = self._worth(key) + 1.0
            self._last[key] = self._calls
            fetched.append(self._rows[key])
        return fetched

    def _worth(self, key: tuple[int, int]) -> float:
        return self._count.get(key, 0.0) * float(self._decay ** (self._calls - self._last.get(key, 0)))

    def _drop(self) -> None:
        if self.held_bytes <= self.room_bytes:
            return
        for key in sorted(self._rows, key=self._worth):
            self.held_bytes -= sum(row.nbytes for row in self._rows.pop(key).values())
            if self.held_bytes <= self.room_bytes:
                return
