"""Which plane of which unit lies where in a home, and which ranges of it may be asked for."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.model.spec import PLANE_ELEMENTS, ModelSpec
from outsize.optim.spec import Plane

COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ITEM_DTYPE = {**COMPUTE_DTYPE, "int16": torch.int16, "uint8": torch.uint8}
# Bytes per element of each plane, or what it is made of.
Planes = Mapping[str, int] | Mapping[str, Plane]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Where one plane lies: first byte, number of elements and their dtype.

    Attributes:
        offset: first byte of its only side, or of side 0.
        numel: items; elements where each has one.
        dtype: of the items.
        num_sides: 2 where the plane is kept twice, one copy behind the other.
        group: elements of the unit that one item stands for.
        least: items of which a range is a multiple.
    """

    offset: int
    numel: int
    dtype: torch.dtype
    num_sides: int = 1
    group: int = 1
    least: int = PLANE_ELEMENTS

    @property
    def num_bytes(self) -> int:
        """Bytes of the plane, once; a multiple of 4096."""
        return self.numel * self.dtype.itemsize


class Layout:
    """Which plane of which unit lies where, one behind the other in unit order; frozen parts behind their unit's.

    Args:
        model: the units.
        planes: bytes per element of each plane, or what it is made of; units that are not trained have ``weights``
            only.
        base: first byte of the first plane.
        twice: planes of trained units that are kept twice.

    Raises:
        ValueError: ``weights`` is missing, or a plane's elements have a size that no dtype of the model has.
    """

    def __init__(
        self, model: ModelSpec, planes: Planes, *, base: int = 0, twice: Collection[str] = ()
    ) -> None:
        if "weights" not in planes:
            raise ValueError(f"planes {sorted(planes)} lack 'weights'")
        made = made_of(model.dtype, planes)
        self.extents: dict[tuple[int, str], Extent] = {}
        self.num_bytes = base
        for unit in model.units:
            for name, plane in made.items():
                if unit.numel and (name == "weights" or unit.trainable):
                    num_sides = 2 if unit.trainable and name in twice else 1
                    extent = Extent(
                        offset=self.num_bytes,
                        numel=plane.items(unit.numel),
                        dtype=ITEM_DTYPE[plane.item],
                        num_sides=num_sides,
                        group=plane.group,
                        least=max(plane.sector_items, PLANE_ELEMENTS if plane.group == 1 else 1),
                    )
                    self.extents[unit.index, name] = extent
                    self.num_bytes += num_sides * extent.num_bytes
            for part in unit.frozen:
                dtype = torch.uint8 if part.codec is not None else COMPUTE_DTYPE[part.dtype]
                extent = Extent(offset=self.num_bytes, numel=part.home_elements, dtype=dtype)
                self.extents[unit.index, part.plane] = extent
                self.num_bytes += extent.num_bytes

    def extent(self, unit: int, plane: str) -> Extent:
        """Return where a plane lies.

        Raises:
            ValueError: there is no such plane.
        """
        extent = self.extents.get((unit, plane))
        if extent is None:
            known = ", ".join(name for index, name in self.extents if index == unit)
            raise ValueError(f"unit {unit} has no plane {plane!r}; it has {known or 'none'}")
        return extent

    def locate(self, unit: int, plane: str, start: int, tensor: Tensor) -> Extent:
        """Return the plane's extent after checking that ``tensor`` is a range of it from element ``start`` on."""
        extent = self.extent(unit, plane)
        first = start // extent.group
        stop = first + tensor.numel()
        if tensor.dtype != extent.dtype:
            raise ValueError(f"plane {plane!r} of unit {unit} is {extent.dtype}, the tensor {tensor.dtype}")
        odd = start % extent.group or first % extent.least or stop % extent.least
        if odd or not 0 <= first <= stop <= extent.numel:
            what = "elements" if extent.group == 1 else f"items of {extent.group} elements"
            raise ValueError(
                f"{what} {first}..{stop} of plane {plane!r} of unit {unit}:"
                f" need multiples of {extent.least} within 0..{extent.numel}"
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
