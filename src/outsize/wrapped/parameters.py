"""The parameters that a wrapped model shows: what rests at home, under the names and in the modules of the model.

Over a host home a parameter is a view of its unit's weights, and its ``.grad`` a view of the gradient plane, so any
optimizer of `torch.optim` steps where the bytes are. Over a disk home parameters have a shape and no bytes; their
``.grad`` is a mark that a gradient is at home (`wrapped.disk_gradients`). Frozen weights that a codec has written
have a shape
and no bytes over either home: reading decodes them. So have those that ``transport.weights`` keeps encoded.

In both, ``parameter.grad is None`` means: there is no gradient, the next backward begins anew.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from outsize.checkpoint.checkpoint_state import plane_of
from outsize.errors import ConfigError
from outsize.model.sizes.model_spec import PLANE_ELEMENTS, FrozenPart, TensorSpec, UnitSpec
from outsize.model.split import Split
from outsize.optim.optimizer_spec import GRADIENT, MASTER, WEIGHTS, StateLayout
from outsize.runtime.forward.binding import TORCH_DTYPE
from outsize.runtime.ops.decoding import decode, encode
from outsize.session.frozen_encoding import errors_of
from outsize.storage.arena import Arena
from outsize.storage.home import DiskHome, HostHome
from outsize.storage.home_layout import ITEM_DTYPE
from outsize.units import align_up
from outsize.wrapped.disk_gradients import mark

Fill = Callable[[TensorSpec, Tensor], None]


class HomeParameters:
    """Parameters of a model, moved into a home.

    Args:
        split: the model's units.
        home: where the weights go.
        fill: copies the weights of a tensor into a flat fp32 or compute-dtype tensor.
        state: how a trained unit lies in it.
        at_once: whether nothing of the model is let go of before all of it is there; else each unit is.

    Attributes:
        named: the parameters by name.
        in_memory: whether all of them show their bytes.
        errors: what codecs have done to frozen weights, by name: root mean square by that of the weights.
        factors: what gradients on disk are multiplied by in the next step, by name.
        num_writes: how often `write` has replaced weights, by unit.
    """

    def __init__(
        self,
        split: Split,
        home: HostHome | DiskHome,
        fill: Fill,
        state: StateLayout,
        *,
        at_once: bool = False,
    ) -> None:
        self._home = home
        self._state = state
        self._spec = split.spec
        planes = ((unit, plane) for unit in split.spec.units for plane, _ in self._members(unit, WEIGHTS))
        self.in_memory = all(self._is_view(unit, plane) for unit, plane in planes)
        self._half = MASTER in state.planes
        self._versions: dict[str, int] = {}
        self._given_masters: set[int] = set()
        self.named: dict[str, nn.Parameter] = {}
        self.errors: dict[str, float] = {}
        self.factors: dict[str, Tensor] = {}
        self.num_writes: Counter[int] = Counter()
        units = split.spec.units
        for group in (units,) if at_once else ((unit,) for unit in units):
            for unit in group:
                self._bring(unit, fill)
            for unit in group:
                self._adopt(unit, split)

    def positions_with_gradient(self, unit: UnitSpec) -> frozenset[int]:
        """Positions of the tensors of ``unit`` that have a gradient now; one that the user put there goes home."""
        found = set()
        for position, tensor in enumerate(unit.tensors):
            gradient = self.named[tensor.name].grad
            if gradient is None:
                continue
            found.add(position)
            if isinstance(self._home, HostHome):
                own = self._view(unit, tensor, GRADIENT)
                if gradient.data_ptr() != own.data_ptr():
                    own.copy_(gradient)
                    self._show(unit, tensor)
        return frozenset(found)

    def show_gradients(self, unit: UnitSpec, positions: frozenset[int]) -> None:
        """Let the parameters at ``positions`` have a ``.grad``."""
        for position in positions:
            if self.named[unit.tensors[position].name].grad is None:
                self._show(unit, unit.tensors[position])

    def round_gradients(self, among: Iterable[nn.Parameter]) -> None:
        """Round gradients of half-precision weights ``among`` these to the dtype of those, until the next pass."""
        if not (self._half and isinstance(self._home, HostHome)):
            return
        asked = {id(parameter) for parameter in among}
        for parameter in self.named.values():
            gradient = parameter.grad
            if id(parameter) in asked and gradient is not None and gradient.dtype != parameter.dtype:
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype
                parameter.grad = gradient.to(parameter.dtype)

    def version(self, unit: UnitSpec) -> int:
        """Return a number that grows whenever anybody but the engine changes the weights of ``unit``."""
        in_place = sum(self.named[tensor.name]._version for tensor in unit.all_tensors)
        return self.num_writes[unit.index] + in_place

    @property
    def version_of_all(self) -> int:
        """Return a number that grows whenever anybody but the engine changes a weight."""
        return sum(self.num_writes.values()) + sum(parameter._version for parameter in self.named.values())

    def refresh_masters(self, unit: UnitSpec) -> None:
        """Where half-precision weights are not their masters rounded, make them the masters: they are what counts."""
        given = unit.index in self._given_masters
        self._given_masters.discard(unit.index)
        if not self._half:
            return
        if not isinstance(self._home, HostHome):
            if given:
                self.write(unit, self.read(unit))
            return
        for tensor in unit.tensors:
            parameter = self.named[tensor.name]
            if tensor.trainable and (given or parameter._version != self._versions[tensor.name]):
                _follow(self._view(unit, tensor, MASTER), parameter.detach())
                self._versions[tensor.name] = parameter._version

    def values(self, units: tuple[UnitSpec, ...], plane: str = WEIGHTS) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of a plane by name: views over a host home, else copies, read unit by unit."""
        for unit in units:
            if plane == WEIGHTS or unit.trainable:
                yield from self.read(unit, plane).items()

    def read(self, unit: UnitSpec, plane: str = WEIGHTS) -> dict[str, Tensor]:
        """Return the tensors of ``unit``, as in `values`; of the weights, those of its frozen parts as well."""
        found: dict[str, Tensor] = {}
        for name, tensors in self._members(unit, plane):
            if self._is_view(unit, name):
                found |= {tensor.name: self._view(unit, tensor, name) for tensor in tensors}
                continue
            with Arena() as arena:
                flat = self._plane(arena, unit, name)
                self._read(unit, name, flat, arena)
                found |= {t.name: flat[t.offset :][: t.numel].view(t.shape).clone() for t in tensors}
        return found

    def write(self, unit: UnitSpec, tensors: Mapping[str, Tensor], plane: str = WEIGHTS) -> None:
        """Replace some tensors of a plane of ``unit``; masters follow weights, and keep what rounds to them.

        Masters themselves are compared with the weights before the next step, see `refresh_masters`.
        """
        if plane == MASTER:
            self._given_masters.add(unit.index)
        self.num_writes[unit.index] += plane == WEIGHTS
        planes = list(self._members(unit, plane))
        if plane == WEIGHTS and self._half and unit.trainable:
            planes.append((MASTER, unit.tensors))
        for name, members in planes:
            given = [tensor for tensor in members if tensor.name in tensors]
            put = _follow if (plane, name) == (WEIGHTS, MASTER) else Tensor.copy_
            if self._is_view(unit, name):
                for tensor in given:
                    put(self._view(unit, tensor, name), tensors[tensor.name].detach().view(tensor.shape))
            elif given:
                with Arena() as arena:
                    flat = self._plane(arena, unit, name)
                    self._read(unit, name, flat, arena)
                    for t in given:
                        put(flat[t.offset : t.offset + t.numel], tensors[t.name].detach().reshape(-1))
                    self._write(unit, name, flat, arena)

    def _members(self, unit: UnitSpec, plane: str) -> Iterator[tuple[str, tuple[TensorSpec, ...]]]:
        """Yield the tensors that ``plane`` means and where they lie; weights lie in the frozen parts as well.

        Of a plane whose items stand for several elements each, tensors have the shape of their items.
        """
        if unit.tensors:
            yield plane, plane_of(self._state, unit, plane).tensors
        if plane == WEIGHTS:
            yield from ((part.plane, part.tensors) for part in unit.frozen)

    def _plane(self, arena: Arena, unit: UnitSpec, plane: str) -> Tensor:
        numel, dtype = self._form(unit, plane)
        return arena.take(numel * dtype.itemsize, plane).view(dtype)

    def _is_view(self, unit: UnitSpec, plane: str) -> bool:
        """Whether tensors of a plane are views of it: it lies in memory as it is."""
        if not isinstance(self._home, HostHome) or _encoded(unit, plane) is not None:
            return False
        return self._home.packed(unit.index, plane) is None

    def _read(self, unit: UnitSpec, plane: str, flat: Tensor, arena: Arena) -> None:
        """Read a whole plane, decoded."""
        part = _encoded(unit, plane)
        if part is None:
            self._home.read(unit.index, plane, 0, flat)
            return
        encoded = arena.take(part.encoded_bytes, "encoded weights")
        self._home.read(unit.index, plane, 0, encoded)
        decode(part, encoded, flat)

    def _write(self, unit: UnitSpec, plane: str, flat: Tensor, arena: Arena) -> None:
        """Write a whole plane, encoded."""
        part = _encoded(unit, plane)
        if part is not None:
            encoded = arena.take(part.encoded_bytes, "encoded weights")
            encode(part, flat, encoded)
            flat = encoded
        self._home.write(unit.index, plane, 0, flat)

    def _form(self, unit: UnitSpec, plane: str) -> tuple[int, torch.dtype]:
        """Items of a plane, and their dtype."""
        for part in unit.frozen:
            if part.plane == plane:
                return part.numel, TORCH_DTYPE[part.dtype]
        made = self._state.planes[plane]
        return made.items(unit.numel), ITEM_DTYPE[made.item]

    def _view(self, unit: UnitSpec, tensor: TensorSpec, plane: str) -> Tensor:
        assert isinstance(self._home, HostHome)
        flat = self._home.view(unit.index, plane)
        return flat[tensor.offset : tensor.offset + tensor.numel].view(tensor.shape)

    def _show(self, unit: UnitSpec, tensor: TensorSpec) -> None:
        parameter = self.named[tensor.name]
        if isinstance(self._home, HostHome):
            if self._half:
                parameter.grad = None
                parameter.grad_dtype = torch.float32
            parameter.grad = self._view(unit, tensor, GRADIENT)
        else:
            # Weakly: the collector does not see what a gradient holds.
            own = weakref.ref(self)
            read = partial(_read_gradient_of, own, unit, tensor)
            scale = partial(_note_factor_of, own, tensor.name)
            parameter.grad = mark(tensor.shape, parameter.dtype, read, scale)

    def _read_gradient(self, unit: UnitSpec, tensor: TensorSpec) -> Tensor:
        """Read the gradient of one tensor from disk: the sectors that it lies in."""
        first = tensor.offset // PLANE_ELEMENTS * PLANE_ELEMENTS
        last = align_up(tensor.offset + tensor.numel, PLANE_ELEMENTS)
        with Arena() as arena:
            flat = arena.take((last - first) * 4, GRADIENT).view(torch.float32)
            self._home.read(unit.index, GRADIENT, first, flat)
            return flat[tensor.offset - first :][: tensor.numel].clone()

    def _note_factor(self, name: str, factor: Tensor) -> None:
        former = self.factors.get(name)
        self.factors[name] = factor if former is None else former * factor

    def _bring(self, unit: UnitSpec, fill: Fill) -> None:
        """Copy the weights of ``unit`` home."""
        for plane, tensors in self._members(unit, WEIGHTS):
            with Arena() as arena:
                flat = self._plane(arena, unit, plane)
                with_master = plane == WEIGHTS and self._half and unit.trainable
                master = self._plane(arena, unit, MASTER) if with_master else None
                for t in tensors:
                    stretch = slice(t.offset, t.offset + t.numel)
                    if master is None:
                        fill(t, flat[stretch])
                    else:
                        fill(t, master[stretch])
                        flat[stretch].copy_(master[stretch])
                self._write(unit, plane, flat, arena)
                if master is not None:
                    self._home.write(unit.index, MASTER, 0, master)
                part = _encoded(unit, plane)
                if part is not None:
                    decoded = self._plane(arena, unit, plane)
                    self._read(unit, plane, decoded, arena)
                    self.errors |= errors_of(part, flat, decoded)

    def _adopt(self, unit: UnitSpec, split: Split) -> None:
        """Show the weights of ``unit`` as they lie at home, and let go of where they were."""
        for plane, tensors in self._members(unit, WEIGHTS):
            for tensor in tensors:
                places = split.owners[tensor.name]
                module, attribute = places[0]
                former = module._parameters[attribute]
                assert former is not None
                parameter = self._parameter(unit, tensor, plane, former)
                for module, attribute in places:
                    module._parameters[attribute] = parameter
                self.named[tensor.name] = parameter
                self._versions[tensor.name] = parameter._version

    def _parameter(
        self, unit: UnitSpec, tensor: TensorSpec, plane: str, former: nn.Parameter
    ) -> nn.Parameter:
        """The parameter of a tensor at home: the same object, if its bytes can be exchanged under it."""
        former.grad = None
        if self._is_view(unit, plane):
            view = _alone(self._view(unit, tensor, plane))
        else:
            view = torch.empty(tensor.shape, dtype=self._form(unit, plane)[1], device="meta")
        if former.device == view.device:
            former.data = view
            return former
        return nn.Parameter(view, requires_grad=former.requires_grad)


def _alive(parameters: "weakref.ref[HomeParameters]") -> HomeParameters:
    found = parameters()
    if found is None:
        raise ConfigError("the model of this gradient is gone, and its home with it")
    return found


def _read_gradient_of(
    parameters: "weakref.ref[HomeParameters]", unit: UnitSpec, tensor: TensorSpec
) -> Tensor:
    return _alive(parameters)._read_gradient(unit, tensor)


def _note_factor_of(parameters: "weakref.ref[HomeParameters]", name: str, factor: Tensor) -> None:
    _alive(parameters)._note_factor(name, factor)


def _alone(view: Tensor) -> Tensor:
    """Return the same bytes as a storage that holds nothing else, as whoever saves tensors expects of parameters."""
    return torch.from_numpy(view.reshape(-1).view(torch.uint8).numpy()).view(view.dtype).view(view.shape)


def _follow(master: Tensor, value: Tensor) -> Tensor:
    """Make ``master`` the value, but for elements that round to it already; returns it."""
    if value.dtype is torch.float32:
        return master.copy_(value)
    return master.copy_(torch.where(master.to(value.dtype) == value, master, value.float()))


def _encoded(unit: UnitSpec, plane: str) -> FrozenPart | None:
    """The frozen part that a codec writes to ``plane``, where it is one."""
    return next((part for part in unit.frozen if part.plane == plane and part.codec is not None), None)
