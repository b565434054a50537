"""Which plane of which unit lies where in a home, and which ranges of it may be asked for."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.model.spec import PLANE_ELEMENTS, ModelSpec

COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Where one plane lies: first byte, number of elements and their dtype.

    Attributes:
        offset: first byte of its only side, or of side 0.
        numel: elements that are held.
        dtype: of the elements.
        num_sides: 2 where the plane is kept twice, one copy behind the other.
        first: element of the unit that is the first one held; 0 unless the home holds a share.
    """

    offset: int
    numel: int
    dtype: torch.dtype
    num_sides: int = 1
    first: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the plane, once; a multiple of 4096."""
        return self.numel * self.dtype.itemsize


class Layout:
    """Which plane of which unit lies where, one behind the other in unit order; frozen parts behind their unit's.

    Args:
        model: the units.
        planes: bytes per element of each plane; units that are not trained have ``weights`` only.
        base: first byte of the first plane.
        twice: planes of trained units that are kept twice.
        own: elements of each unit whose optimizer state is held, by unit index, see `outsize.optim.shares`; None for
            all. Weights are held whole in any case.

    Raises:
        ValueError: ``weights`` is missing, or a plane's elements have a size that no dtype of the model has.
    """

    def __init__(
        self,
        model: ModelSpec,
        planes: Mapping[str, int],
        *,
        base: int = 0,
        twice: Collection[str] = (),
        own: Sequence[range] | None = None,
    ) -> None:
        if "weights" not in planes:
            raise ValueError(f"planes {sorted(planes)} lack 'weights'")
        dtypes = {plane: _dtype_of(model.dtype, plane, itemsize) for plane, itemsize in planes.items()}
        self.extents: dict[tuple[int, str], Extent] = {}
        self.num_bytes = base
        for unit in model.units:
            for plane, dtype in dtypes.items():
                whole = range(unit.numel)
                held = whole if own is None or plane == "weights" else own[unit.index]
                if len(held) and (plane == "weights" or unit.trainable):
                    num_sides = 2 if unit.trainable and plane in twice else 1
                    extent = Extent(
                        offset=self.num_bytes,
                        numel=len(held),
                        dtype=dtype,
                        num_sides=num_sides,
                        first=held.start,
                    )
                    self.extents[unit.index, plane] = extent
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
        """Return the plane's extent after checking that ``tensor`` is a range of it from ``start`` on."""
        extent = self.extent(unit, plane)
        stop = start + tensor.numel()
        if tensor.dtype != extent.dtype:
            raise ValueError(f"plane {plane!r} of unit {unit} is {extent.dtype}, the tensor {tensor.dtype}")
        end = extent.first + extent.numel
        if start % PLANE_ELEMENTS or stop % PLANE_ELEMENTS or not extent.first <= start <= stop <= end:
            raise ValueError(
                f"elements {start}..{stop} of plane {plane!r} of unit {unit}:"
                f" need multiples of {PLANE_ELEMENTS} within {extent.first}..{end}"
            )
        return extent


def _dtype_of(compute: str, plane: str, itemsize: int) -> torch.dtype:
    dtype = COMPUTE_DTYPE[compute] if plane == "weights" else torch.float32
    if dtype.itemsize != itemsize:
        raise ValueError(
            f"plane {plane!r} of a {compute} model has {dtype.itemsize} bytes per element, not {itemsize}"
        )
    return dtype
