"""Tensors of the planes of a home, by unit and name: read, replaced, and shown as torch's.

Over a host home most are views. What a disk has, or a codec has written, is read into a copy, and shown as an `AtRest`.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.checkpoint.checkpoint_state import plane_of
from outsize.compat.torch_private import memory_key, num_holders
from outsize.errors import ConfigError
from outsize.model.sizes.model_spec import PLANE_ELEMENTS, FrozenPart, TensorSpec, UnitSpec
from outsize.optim.optimizer_spec import GRADIENT, MASTER, WEIGHTS, StateLayout
from outsize.runtime.forward.binding import TORCH_DTYPE
from outsize.runtime.ops.link_codecs import decode, encode
from outsize.session.fill import errors_of
from outsize.storage.home import Home
from outsize.storage.home_layout import ITEM_DTYPE
from outsize.storage.ledger import Arena
from outsize.units import align_up
from outsize.wrapped.at_home.at_rest import AtRest, Place
from outsize.wrapped.at_home.home_parameter import HandedOut

_log = logging.getLogger(__name__)
_SECTOR_BYTES = 4096


class HomeTensors:
    """The tensors in a home.

    Args:
        home: where they lie.
        state: how a trained unit lies in it.
        settle: returns when no step is under way.

    Attributes:
        errors: what codecs have done to frozen weights, by name: root mean square by that of the weights.
        handed_out: weights and optimizer state that a program may hold.
        factors: what gradients are yet to be multiplied by, at the latest in the next step, by name.
        is_left: whether the home is no more.
        links: tensors that the program has assigned, and may hold, by name and `WEIGHTS` or `GRADIENT`.
        num_writes: how often `write` has replaced weights, by unit.
    """

    def __init__(self, home: Home, state: StateLayout, settle: Callable[[], None]) -> None:
        self._home = home
        self._state = state
        self._half = MASTER in state.planes
        self._given_masters: set[int] = set()
        self._shown: weakref.WeakValueDictionary[object, Tensor] = weakref.WeakValueDictionary()
        self._where: dict[str, tuple[UnitSpec, TensorSpec, str]] = {}
        self._pointers: dict[str, int] = {}
        self.links: dict[tuple[str, str], Tensor] = {}
        self._places_of_others: dict[str, Place] = {}
        self.settle = settle
        self.handed_out = HandedOut()
        self.is_left = False
        self.errors: dict[str, float] = {}
        self.factors: dict[str, Tensor] = {}
        self.num_writes: Counter[int] = Counter()

    def values(self, units: tuple[UnitSpec, ...], plane: str = WEIGHTS) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of a plane by name: views over a host home, else copies, read unit by unit."""
        for unit in units:
            if plane == WEIGHTS or unit.trainable:
                yield from self.read(unit, plane).items()

    def read_one(self, unit: UnitSpec, tensor: TensorSpec, plane: str = WEIGHTS) -> Tensor:
        """Return one tensor of a plane: a view over a host home, else a copy.

        Args:
            unit: of the tensor.
            tensor: as `plane_of` has it, where items stand for several elements each.
            plane: of its unit or frozen part.
        """
        if (tensor.name, WEIGHTS) in self.links and plane == self._where[tensor.name][2]:
            return self.links[tensor.name, WEIGHTS]
        if self._is_view(unit, plane):
            return self._view(unit, tensor, plane)
        with Arena() as arena:
            flat, first = self._stretch(arena, unit, tensor, plane)
            return flat[tensor.offset - first :][: tensor.numel].view(tensor.shape).clone()

    def read(self, unit: UnitSpec, plane: str = WEIGHTS) -> dict[str, Tensor]:
        """Return the tensors of ``unit``, as in `values`; of the weights, those of its frozen parts as well."""
        values: dict[str, Tensor] = {}
        for name, tensors in self._members(unit, plane):
            if self._is_view(unit, name):
                values |= {tensor.name: self._view(unit, tensor, name) for tensor in tensors}
                continue
            with Arena() as arena:
                flat = self._plane(arena, unit, name)
                self._read(unit, name, flat, arena)
                values |= {t.name: flat[t.offset :][: t.numel].view(t.shape).clone() for t in tensors}
        if self.links and plane == WEIGHTS:
            values |= {name: self.links[name, WEIGHTS] for name in values if (name, WEIGHTS) in self.links}
        return values

    def write(self, unit: UnitSpec, tensors: Mapping[str, Tensor], plane: str = WEIGHTS) -> None:
        """Replace some tensors of a plane of ``unit``; masters follow weights, and keep what rounds to them.

        Masters themselves are compared with the weights before the next step, see `refresh_masters`.
        """
        if plane == MASTER:
            self._given_masters.add(unit.index)
        self.num_writes[unit.index] += plane == WEIGHTS
        for name in tensors if self.links else ():
            if (name, plane) in self.links:
                self.links[name, plane].copy_(tensors[name].detach())
        planes = list(self._members(unit, plane))
        if plane == WEIGHTS and self._half and unit.trainable:
            planes.append((MASTER, unit.tensors))
        for name, members in planes:
            given = [tensor for tensor in members if tensor.name in tensors]
            put = follow if (plane, name) == (WEIGHTS, MASTER) else Tensor.copy_
            if self._is_view(unit, name):
                for tensor in given:
                    put(self._view(unit, tensor, name), tensors[tensor.name].detach().view(tensor.shape))
            elif given and not self._moves_in_stretches(unit, name):
                with Arena() as arena:
                    flat = self._plane(arena, unit, name)
                    self._read(unit, name, flat, arena)
                    for t in given:
                        put(flat[t.offset : t.offset + t.numel], tensors[t.name].detach().reshape(-1))
                    self._write(unit, name, flat, arena)
                    if codec_part(unit, name) is not None:
                        self._note_errors(unit, name, flat, arena)
                        _log.warning(
                            "%s: what was written was rounded by the codec of its weights, by %.2g of their norm",
                            given[0].name,
                            self.errors[given[0].name],
                        )
            else:
                for t in given:
                    with Arena() as arena:
                        flat, first = self._stretch(arena, unit, t, name)
                        put(flat[t.offset - first :][: t.numel], tensors[t.name].detach().reshape(-1))
                        self._home.write(unit.index, name, first, flat)

    def _moves_in_stretches(self, unit: UnitSpec, plane: str) -> bool:
        """Whether part of a plane can be moved: an item of it stands for one element."""
        if any(part.plane == plane for part in unit.frozen):
            return codec_part(unit, plane) is None
        return self._state.planes[plane].group == 1

    def _stretch(self, arena: Arena, unit: UnitSpec, tensor: TensorSpec, plane: str) -> tuple[Tensor, int]:
        """Read the sectors that a tensor of a plane lies in; returns them, and which element is their first."""
        if not self._moves_in_stretches(unit, plane):
            flat = self._plane(arena, unit, plane)
            self._read(unit, plane, flat, arena)
            return flat, 0
        numel, dtype = self._form(unit, plane)
        granule = max(PLANE_ELEMENTS, _SECTOR_BYTES // dtype.itemsize)
        first = tensor.offset // granule * granule
        last = min(align_up(tensor.offset + tensor.numel, granule), numel)
        flat = arena.take((last - first) * dtype.itemsize, plane).view(dtype)[: last - first]
        self._home.read(unit.index, plane, first, flat)
        return flat, first

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

    def link(self, name: str, value: Tensor, plane: str = WEIGHTS) -> None:
        """Have what is at home under ``name`` lie in ``value`` as well, which the program has assigned and may hold.

        Not so where a codec writes it, or ``value`` has no bytes here.
        """
        self.unlink(name, plane)
        unit, _, place = self._where[name]
        if isinstance(value, AtRest):
            if plane == WEIGHTS:
                self._places_of_others[name] = value.place
        elif codec_part(unit, place) is None and value.device.type == "cpu" and value.layout is torch.strided:
            form = value.storage_offset(), value.shape, value.stride()
            self.links[name, plane] = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage(), *form)

    def unlink(self, name: str, plane: str = WEIGHTS) -> None:
        """Let go of what the program has assigned there before."""
        self.links.pop((name, plane), None)
        if plane == WEIGHTS:
            self._places_of_others.pop(name, None)

    def bring_links(self) -> list[tuple[str, str]]:
        """Bring home what a program has changed in tensors that it assigned; let go of those that it holds no longer.

        Returns:
            Parameters without bytes that were assigned what rests at home of another one, with the names of these.
        """
        for key in list(self.links):
            value = self.links[key]
            if not torch.equal(_bits(self._at_home(*key).to(value.dtype)), _bits(value)):
                self.write(self._where[key[0]][0], {key[0]: value.clone()}, key[1])
            if not self._is_linked(*key):
                self.unlink(*key)
        return [
            (name, other)
            for name, place in self._places_of_others.items()
            for other, (unit, tensor, plane) in self._where.items()
            if other != name and place.key == (id(self), other, plane)
        ]

    def show_links(self, plane: str) -> None:
        """Have what the program holds show what a pass has left at home."""
        for name, among in list(self.links):
            if among == plane:
                self.links[name, plane].copy_(self._at_home(name, plane))

    def _at_home(self, name: str, plane: str) -> Tensor:
        unit, tensor, place = self._where[name]
        if plane != WEIGHTS:
            place, seen = plane, plane_of(self._state, unit, plane)
            tensor = next(each for each in seen.tensors if each.name == name)
        value = self.links.pop((name, plane))
        try:
            return self.read_one(unit, tensor, place)
        finally:
            self.links[name, plane] = value

    def _is_linked(self, name: str, plane: str) -> bool:
        """Whether a program holds what lies at home under ``name`` as well."""
        key = memory_key(self.links[name, plane])
        usual = sum(
            1 + (among == WEIGHTS and other in self._pointers)
            for (other, among), value in self.links.items()
            if memory_key(value) == key
        )
        return num_holders(self.links[name, plane].untyped_storage()) > usual

    def _is_view(self, unit: UnitSpec, plane: str) -> bool:
        """Whether tensors of a plane are views of it: it lies in host memory as it is."""
        on_device = unit.index in self._home.on_device and plane in self._state.planes
        encoded = codec_part(unit, plane) is not None
        return not (on_device or encoded) and self._home.lend(unit.index, plane) is not None

    def _read(self, unit: UnitSpec, plane: str, flat: Tensor, arena: Arena) -> None:
        part = codec_part(unit, plane)
        if part is None:
            self._home.read(unit.index, plane, 0, flat)
            return
        encoded = arena.take(part.encoded_bytes, "encoded weights")
        self._home.read(unit.index, plane, 0, encoded)
        decode(part, encoded, flat)

    def _write(self, unit: UnitSpec, plane: str, flat: Tensor, arena: Arena) -> None:
        part = codec_part(unit, plane)
        if part is not None:
            encoded = arena.take(part.encoded_bytes, "encoded weights")
            encode(part, flat, encoded)
            flat = encoded
        self._home.write(unit.index, plane, 0, flat)

    def _form(self, unit: UnitSpec, plane: str) -> tuple[int, torch.dtype]:
        for part in unit.frozen:
            if part.plane == plane:
                return part.numel, TORCH_DTYPE[part.dtype]
        made = self._state.planes[plane]
        return made.items(unit.numel), ITEM_DTYPE[made.item]

    def _view(self, unit: UnitSpec, tensor: TensorSpec, plane: str) -> Tensor:
        flat = self._home.view(unit.index, plane)
        return flat[tensor.offset : tensor.offset + tensor.numel].view(tensor.shape)

    def at_rest(self, unit: UnitSpec, tensor: TensorSpec, plane: str) -> Tensor:
        """Return one tensor of a plane as it can be looked at and changed: a view over a host home, else `AtRest`."""
        if (tensor.name, plane) in self.links:
            return self.links[tensor.name, plane].detach()
        if self._is_view(unit, plane):
            return self.handed_out.tensor(f"{plane} of {tensor.name}", self._view(unit, tensor, plane))
        return AtRest(self.place(unit, tensor, plane))

    def place(self, unit: UnitSpec, tensor: TensorSpec, plane: str) -> Place:
        """Return where one tensor of a plane rests."""
        return _Place(weakref.ref(self), unit, tensor, plane, self._form(unit, plane)[1])

    def _note_errors(self, unit: UnitSpec, plane: str, exact: Tensor, arena: Arena) -> None:
        """Note what the codec of an encoded part has done to weights."""
        part = codec_part(unit, plane)
        assert part is not None
        decoded = self._plane(arena, unit, plane)
        self._read(unit, plane, decoded, arena)
        self.errors |= errors_of(part, exact, decoded)


def _bits(values: Tensor) -> Tensor:
    """Return the bytes of a tensor, of which NaN has the same as before."""
    return values.detach().reshape(-1).view(torch.uint8)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Place:
    """Where one tensor of a plane rests, see `Place`; weakly, as the collector does not see what tensors hold."""

    parameters: "weakref.ref[HomeTensors]"
    unit: UnitSpec
    tensor: TensorSpec
    plane: str
    dtype: torch.dtype
    _apart: Tensor | None = None

    @property
    def key(self) -> object:
        return id(self if self._apart is not None else self._alive()), self.tensor.name, self.plane

    def unlink(self) -> None:
        home = self._alive()
        if self._apart is None and self.plane != GRADIENT:
            is_weights = self.plane == home._where[self.tensor.name][2]
            home.unlink(self.tensor.name, WEIGHTS if is_weights else self.plane)

    def link(self, value: Tensor) -> None:
        home = self._alive()
        plane = WEIGHTS if self.plane == home._where[self.tensor.name][2] else self.plane
        if self._apart is None:
            home.link(self.tensor.name, value, plane)

    def part(self) -> None:
        """Rest apart from what is at home from now on: a gradient that was let go of, and that somebody holds."""
        self._apart = self.read()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def read(self) -> Tensor:
        if self._apart is not None:
            return self._apart.clone()
        home = self._alive()
        home.settle()
        value = home.read_one(self.unit, self.tensor, self.plane)
        if (self.tensor.name, WEIGHTS) in home.links:
            value = value.clone()
        if self.plane == GRADIENT and self.tensor.name in home.factors:
            value.mul_(home.factors[self.tensor.name])
        return value

    def write(self, value: Tensor) -> None:
        if self._apart is not None:
            self._apart.copy_(value)
            return
        home = self._alive()
        home.settle()
        if self.plane == GRADIENT:
            home.factors.pop(self.tensor.name, None)
        home.write(
            self.unit,
            {self.tensor.name: value},
            WEIGHTS if any(part.plane == self.plane for part in self.unit.frozen) else self.plane,
        )

    def scale(self, factor: Tensor) -> bool:
        if self._apart is not None:
            return False
        home = self._alive()
        if self.plane != GRADIENT or self.tensor.name in home.factors:
            return False
        home.factors[self.tensor.name] = factor.clone()
        return True

    def show(self) -> Tensor:
        home, value = self._alive(), self.read()
        shown = home._shown.setdefault(self.key, value)
        return shown if shown is value else shown.copy_(value)

    def _alive(self) -> HomeTensors:
        values = self.parameters()
        if values is None or values.is_left:
            raise ConfigError(
                "the wrapped model of this tensor is gone, and its home with it: keep tensor.clone() beyond that"
            )
        return values


def follow(master: Tensor, value: Tensor) -> Tensor:
    """Make ``master`` the value, but for elements that round to it already; returns it."""
    if value.dtype is torch.float32:
        return master.copy_(value)
    return master.copy_(torch.where(master.to(value.dtype) == value, master, value.float()))


def codec_part(unit: UnitSpec, plane: str) -> FrozenPart | None:
    """The frozen part that a codec writes to ``plane``, where it is one."""
    return next((part for part in unit.frozen if part.plane == plane and part.codec is not None), None)
