"""Which plane of which unit lies where in a home, and a digest that tells layouts apart.

The digest is over names, shapes, offsets, dtypes and planes, and over nothing else: what may be set otherwise and moves
no byte (decay, learning rates, what Muon steps) is compared in words, see `outsize.session.run_state`. It begins with a
version, which a change of the text below raises; homes of all versions so far are known.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.model.sizes.model_spec import PLANE_ELEMENTS, FrozenPart, ModelSpec, TensorSpec, UnitSpec
from outsize.optim.optimizer_spec import GRADIENT, WEIGHTS, Plane, layout_of

COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ITEM_DTYPE = {**COMPUTE_DTYPE, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8}
# Bytes per element of each plane, or what it is made of.
Planes = Mapping[str, int] | Mapping[str, Plane]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneExtent:
    """Where one plane lies: first byte, number of elements and their dtype.

    Attributes:
        offset: first byte of its only side, or of side 0.
        numel: items that are held; elements where each has one.
        dtype: of the items.
        num_sides: 2 where the plane is kept twice, one copy behind the other.
        group: elements of the unit that one item stands for.
        least: items of which a range is a multiple.
        first: element of the unit that is the first one held; 0 unless the home holds a share.
    """

    offset: int
    numel: int
    dtype: torch.dtype
    num_sides: int = 1
    group: int = 1
    least: int = PLANE_ELEMENTS
    first: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the plane, once; a multiple of 4096."""
        return self.numel * self.dtype.itemsize

    def item_of(self, start: int) -> int:
        """Return which of the items that are held is that of element ``start`` of the unit."""
        return (start - self.first) // self.group


class HomeLayout:
    """Which plane of which unit lies where, one behind the other in unit order; frozen parts behind their unit's.

    Args:
        model: the units.
        planes: bytes per element of each plane, or what it is made of; units that are not trained have ``weights``
            only.
        base: first byte of the first plane.
        twice: planes of trained units that are kept twice.
        own: elements of each unit whose optimizer state is held, by unit index, see `outsize.optim.shares`; None for
            all.
        whole: planes of which all elements are held whatever ``own`` says; weights are among them.
        without_gradient: units whose gradient does not rest.

    Raises:
        ValueError: ``weights`` is missing, or a plane's elements have a size that no dtype of the model has.
    """

    def __init__(
        self,
        model: ModelSpec,
        planes: Planes,
        *,
        base: int = 0,
        twice: Collection[str] = (),
        shares: Sequence[range] | None = None,
        full_planes: Collection[str] = (WEIGHTS,),
        without_gradient: Collection[int] = (),
    ) -> None:
        if "weights" not in planes:
            raise ValueError(f"planes {sorted(planes)} lack 'weights'")
        forms = made_of(model.dtype, planes)
        self.extents: dict[tuple[int, str], PlaneExtent] = {}
        self.num_bytes = base
        for unit in model.units:
            for name, plane in forms.items():
                held = range(unit.numel) if shares is None or name in full_planes else shares[unit.index]
                rests = name != GRADIENT or unit.index not in without_gradient
                if len(held) and rests and (name == "weights" or unit.trainable):
                    num_sides = 2 if unit.trainable and name in twice else 1
                    extent = PlaneExtent(
                        offset=self.num_bytes,
                        numel=plane.items_of(unit, len(held)),
                        dtype=ITEM_DTYPE[plane.item],
                        num_sides=num_sides,
                        group=plane.group,
                        least=max(plane.sector_items, PLANE_ELEMENTS if plane.group == 1 else 1),
                        first=held.start,
                    )
                    self.extents[unit.index, name] = extent
                    self.num_bytes += num_sides * extent.num_bytes
            for part in unit.frozen:
                dtype = torch.uint8 if part.codec is not None else COMPUTE_DTYPE[part.dtype]
                extent = PlaneExtent(offset=self.num_bytes, numel=part.home_elements, dtype=dtype)
                self.extents[unit.index, part.plane] = extent
                self.num_bytes += extent.num_bytes

    def extent(self, unit: int, plane: str) -> PlaneExtent:
        """Return where a plane lies.

        Raises:
            ValueError: there is no such plane.
        """
        extent = self.extents.get((unit, plane))
        if extent is None:
            names = ", ".join(name for index, name in self.extents if index == unit)
            raise ValueError(f"unit {unit} has no plane {plane!r}; it has {names or 'none'}")
        return extent

    def locate(self, unit: int, plane: str, start: int, tensor: Tensor) -> PlaneExtent:
        """Return the plane's extent after checking that ``tensor`` is a range of it from element ``start`` on."""
        extent = self.extent(unit, plane)
        first = extent.item_of(start)
        stop = first + tensor.numel()
        if tensor.dtype != extent.dtype:
            raise ValueError(f"plane {plane!r} of unit {unit} is {extent.dtype}, the tensor {tensor.dtype}")
        odd = start % extent.group or first % extent.least or stop % extent.least
        if odd or not 0 <= first <= stop <= extent.numel:
            what = "elements" if extent.group == 1 else f"items of {extent.group} elements"
            begin = extent.first // extent.group
            raise ValueError(
                f"{what} {begin + first}..{begin + stop} of plane {plane!r} of unit {unit}:"
                f" need multiples of {extent.least} within {begin}..{begin + extent.numel}"
            )
        return extent


def made_of(compute: str, planes: Planes) -> dict[str, Plane]:
    """Return what planes are made of, those too that were given in bytes per element.

    Raises:
        ValueError: their elements have a size that no dtype of a model that computes in ``compute`` has.
    """
    return {name: _plane_of(compute, name, plane) for name, plane in planes.items()}


def _plane_of(compute: str, name: str, plane: int | Plane) -> Plane:
    """Return a plane that was given in bytes per element as what it is made of."""
    if isinstance(plane, Plane):
        return plane
    item = compute if name == "weights" else "fp32"
    if ITEM_DTYPE[item].itemsize != plane:
        raise ValueError(
            f"plane {name!r} of a {compute} model has {ITEM_DTYPE[item].itemsize} bytes per element, not {plane}"
        )
    return Plane(item)


_VERSION = 2
_HEX_DIGITS = 32


def made_for(model: ModelSpec, planes: Planes | None) -> Mapping[str, Plane]:
    """Return what the planes of a home are made of; None for those of a plain layout."""
    return layout_of(model.dtype).planes if planes is None else made_of(model.dtype, planes)


def layout_digest(
    model: ModelSpec,
    planes: Planes | None = None,
    shares: Sequence[range] | None = None,
    full_planes: Collection[str] = (WEIGHTS,),
) -> str:
    """Return a digest, a version and hexadecimal digits, of what decides where a home of ``model`` keeps what.

    Args:
        model: the units.
        planes: that it keeps; None for those of a plain layout.
        shares: elements of each unit whose optimizer state it holds; None for all.
        full_planes: planes of which it holds all elements whatever ``shares`` says.
    """
    forms = made_for(model, planes)
    text = json.dumps(
        {
            "dtype": model.dtype,
            "planes": [[name, plane.item, plane.group] for name, plane in forms.items()],
            "units": [_unit(unit, forms) for unit in model.units],
            "own": None if shares is None else [[held.start, held.stop] for held in shares],
            "whole gradients": shares is not None and GRADIENT in full_planes,
        }
    )
    return f"{_VERSION}:{_hex(text)}"


def is_laid_out(
    digest: str,
    model: ModelSpec,
    planes: Planes | None = None,
    shares: Sequence[range] | None = None,
    full_planes: Collection[str] = (WEIGHTS,),
) -> bool:
    """Whether ``digest``, of any version, is that of a home that is laid out so; arguments as of `layout_digest`."""
    of_version = layout_digest if ":" in digest else _first_version
    return digest == of_version(model, planes, shares, full_planes)


def _unit(unit: UnitSpec, forms: Mapping[str, Plane]) -> list[object]:
    held = [name for name in forms if name == WEIGHTS or unit.trainable]
    factors = {
        name: _tensors(forms[name].tensors_of(unit)) for name in held if forms[name].factor is not None
    }
    frozen = [
        [part.plane, part.dtype, part.codec, part.numel, part.encoded_bytes, _tensors(part.tensors)]
        for part in unit.frozen
    ]
    return [unit.name, unit.numel, held, _tensors(unit.tensors), factors, frozen]


def _tensors(tensors: Sequence[TensorSpec]) -> list[list[object]]:
    return [[tensor.name, list(tensor.shape), tensor.offset] for tensor in tensors]


def _first_version(
    model: ModelSpec, planes: Planes | None, shares: Sequence[range] | None, full_planes: Collection[str]
) -> str:
    """The digest of homes before there was a version: over the `repr` of what described a model then, word by word."""
    plain, forms = layout_of(model.dtype).planes, made_for(model, planes)
    other: list[object] = []
    if forms != plain:
        other += [(name, plane.item, plane.group) for name, plane in forms.items()]
    if shares is not None:
        other += [list(shares), "whole gradients"] if GRADIENT in full_planes else [list(shares)]
    units = ", ".join(_unit_then(unit) for unit in model.units)
    beside = "".join(f", {each!r}" for each in other)
    return _hex(f"({model.dtype!r}, [{units}]{beside})")


def _unit_then(unit: UnitSpec) -> str:
    text = f"{unit.name!r}, {unit.numel!r}, {unit.trainable!r}, {_tuple(map(_tensor_then, unit.tensors))}"
    return f"({text}, {_tuple(map(_part_then, unit.frozen))})" if unit.frozen else f"({text})"


def _tensor_then(tensor: TensorSpec) -> str:
    return (
        f"TensorSpec(name={tensor.name!r}, shape={tensor.shape!r}, offset={tensor.offset!r}, "
        f"trainable={tensor.trainable!r}, decay={tensor.decay!r}, lr_scale={tensor.lr_scale!r}, muon={tensor.muon!r})"
    )


def _part_then(part: FrozenPart) -> str:
    return (
        f"FrozenPart(plane={part.plane!r}, dtype={part.dtype!r}, tensors={_tuple(map(_tensor_then, part.tensors))}, "
        f"numel={part.numel!r}, codec={part.codec!r}, encoded_bytes={part.encoded_bytes!r})"
    )


def _tuple(texts: Iterable[str]) -> str:
    """The `repr` of a tuple whose members have these."""
    members = list(texts)
    return f"({members[0]},)" if len(members) == 1 else f"({', '.join(members)})"


def _hex(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_HEX_DIGITS]
