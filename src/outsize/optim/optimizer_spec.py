"""What an optimizer keeps per parameter, in planes and bytes. No torch.

A plane holds a number for every element of a unit, padding included, or one for every group of elements: a byte of
eight bits, an exponent of a block of `BLOCK_ELEMENTS`. All optimizer arithmetic is fp32 whatever is kept, and with fp32
compute the weights are their own masters. Beside 16-bit weights there are three ways to keep a master:

* separate: a plane of fp32 beside the weights, 6 bytes for both;
* split (bf16): the weight is the upper half of the master, rounded to nearest, and ``master_low`` what is left of its
  bits, 4 bytes for both. Where a master lies in the middle between two weights, what is left fits 16 bits for the
  upper of them only; ``master_ties`` says with a bit where it was the lower one;
* split24 (bf16): of what is left the upper 8 bits, rounded by chance, 3 bytes for both.

==========  =====================================================  ===============
moments     planes                                                 bytes
==========  =====================================================  ===============
fp32        exp_avg 4, exp_avg_sq 4                                8
bf16        exp_avg 2, exp_avg_sq 2, rounded by chance             4
int8        codes 1 + 1, and 1 + 1 for a block of 64 elements      2.03
==========  =====================================================  ===============

AdamW keeps both; Muon ``exp_avg`` of all, its momentum, and ``exp_avg_sq`` of what AdamW steps beside it. A class of
torch keeps what it keeps, in fp32, in planes of its own (`outsize.optim.torch_trial`).

Ties are kept where the moments are exact; elsewhere such a master of 32 bits moves by the last of them.

A home that commits every step keeps what a step changes twice, so that the state of the step before is whole until the
next one is; gradients are made anew in every step and lie there once, or not at all where a ring takes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Literal

from outsize.choices import Masters, MastersOrAuto, Moments
from outsize.model.sizes.model_spec import (
    GRANULE_ELEMENTS,
    PLANE_ELEMENTS,
    SECTOR_BYTES,
    ModelSpec,
    TensorSpec,
    UnitSpec,
)
from outsize.optim.optimizer_names import BESIDE_MUON, Factor, factored, muon_matrices, newton_schulz_flops
from outsize.units import align_up

WEIGHTS = "weights"
MASTER = "master"
MASTER_LOW = "master_low"
MASTER_TIES = "master_ties"
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
EXP_AVG_SCALES = "exp_avg_scales"
EXP_AVG_SQ_SCALES = "exp_avg_sq_scales"
GRADIENT = "gradient"
# Elements that a step on a device takes at a time: its temporaries are tens of MiB, its launches a thousandth of it.
UPDATE_TILE_ELEMENTS = 2**22
# What the name of a plane begins with that holds the state of a class of torch.
STATE = "state."

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int16": 2, "int8": 1, "uint8": 1}
# Elements of 8-bit moments that share the exponent which their codes count from: that of the largest of them.
BLOCK_ELEMENTS = 64

# What a step of whole parameters by a class of torch moves of an element beside one reading and one writing of each
# plane: some fourteen passes, op by op, as Adafactor does. A scratch for a split master is written, added to and read
# again; one for a gradient written and read.
_PASSES_BYTES, _JOINED_BYTES, _WIDENED_BYTES = 56, 16, 8
# The same of a matrix by Muon: the gradient is clipped and mixed with the momentum, and the direction that comes out of
# the products is read. What lies between is in their rate. For a device it is read and rounded to bf16 first.
_MUON_BYTES, _STAGED_BYTES = 22, 6

# What joining and splitting a master moves of an element in torch ops on a device, and clipping its gradient.
_HALVES_BYTES, _CLIPPED_BYTES = 36, 8

Gradients = Literal["fp32", "bf16", "none"]


@dataclass(frozen=True, slots=True)
class Plane:
    """What a plane is made of.

    Attributes:
        item: dtype of its items, a key of `ITEM_BYTES`.
        group: elements of the unit that one item stands for.
        factor: where the items are those of what not every element has, see `outsize.optim.optimizer_names`; None
            where they are the unit's elements'.
    """

    item: str
    group: int = 1
    factor: Factor | None = None

    @property
    def sector_items(self) -> int:
        """Items of a disk sector."""
        return SECTOR_BYTES // ITEM_BYTES[self.item]

    def items(self, numel: int) -> int:
        """Return the items of ``numel`` elements, whole sectors of them."""
        return align_up(-(-numel // self.group), self.sector_items)

    def num_bytes(self, numel: int) -> int:
        """Return the bytes of ``numel`` elements, whole sectors."""
        return self.items(numel) * ITEM_BYTES[self.item]

    def items_of(self, unit: UnitSpec, numel: int | None = None) -> int:
        """Return the items of ``numel`` elements of ``unit``, or of all; factors are there for whole units only."""
        if self.factor is not None:
            return self.items(factored(unit, self.factor).numel)
        return self.items(unit.numel if numel is None else numel)

    def tensors_of(self, unit: UnitSpec) -> tuple[TensorSpec, ...]:
        """Return the tensors of ``unit`` as they lie in the plane: those that have the factor, in that shape."""
        return unit.tensors if self.factor is None else factored(unit, self.factor).tensors

    def bytes_of(self, unit: UnitSpec, numel: int | None = None) -> int:
        """Return the bytes of ``numel`` elements of ``unit``, or of all, whole sectors."""
        return self.items_of(unit, numel) * ITEM_BYTES[self.item]

    def granule_items(self, granule_elements: int) -> int:
        """Return the items that a checksum covers: those of ``granule_elements`` elements, whole sectors."""
        return max(granule_elements // self.group, self.sector_items)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """How weights, masters, moments and gradients of a trained unit are kept at home.

    Attributes:
        dtype: of compute, and so of the weights.
        masters: how fp32 masters lie beside 16-bit weights.
        moments: how the two moments are kept.
        gradients: how a gradient waits at home for the optimizer; ``none``: it does not, it passes through a ring.
        num_moments: how many the optimizer keeps: 0, 1 (``exp_avg``) or 2.
        state_of: planes that a class of torch keeps instead, and their factors.
        temporaries: tensors in fp32, of the size of the largest parameter, that a step of such a class makes for
            itself; above 0 where it steps whole parameters, and so units.
        newton_schulz: iterations that make the momentum of a matrix orthogonal, of Muon: matrices then have no second
            moment, and units step whole; 0 for others.
        products_on_device: whether a device runs these iterations, to which a matrix goes up in bf16, and from which
            it comes back so.

    Raises:
        ValueError: an unknown dtype, split masters of other weights than bf16, or moments beside other state.
    """

    dtype: str
    masters: Masters = "separate"
    moments: Moments = "fp32"
    gradients: Gradients = "fp32"
    num_moments: int = 2
    state_of: tuple[tuple[str, Factor | None], ...] = ()
    temporaries: int = 0
    newton_schulz: int = 0
    products_on_device: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ("fp32", "bf16", "fp16"):
            raise ValueError(f"no state layout for dtype {self.dtype!r}; there is fp32, bf16, fp16")
        if self.splits and self.dtype != "bf16":
            raise ValueError(f"masters are split beside bf16 weights, not {self.dtype}")
        if self.state_of and self.num_moments:
            raise ValueError("the state of a class of torch stands in place of moments")

    @property
    @cache  # noqa: B019 - there are few layouts, and planners ask them millions of times
    def planes(self) -> Mapping[str, Plane]:
        """The planes of a trained unit, in the order in which they lie; others have ``weights`` only."""
        planes = {WEIGHTS: Plane(self.dtype)}
        if self.splits:
            planes[MASTER_LOW] = Plane("int16" if self.masters == "split" else "int8")
            if self.exact:
                planes[MASTER_TIES] = Plane("uint8", 8)
        elif self.dtype != "fp32":
            planes[MASTER] = Plane("fp32")
        moment = "uint8" if self.moments == "int8" else self.moments
        planes |= dict.fromkeys((EXP_AVG, EXP_AVG_SQ)[: self.num_moments], Plane(moment))
        if self.moments == "int8":
            scales = (EXP_AVG_SCALES, EXP_AVG_SQ_SCALES)[: self.num_moments]
            planes |= dict.fromkeys(scales, Plane("uint8", BLOCK_ELEMENTS))
        if self.newton_schulz:
            rest = planes.keys() & {EXP_AVG_SQ, EXP_AVG_SQ_SCALES}
            planes |= {name: replace(planes[name], factor=BESIDE_MUON) for name in rest}
        planes |= {name: Plane("fp32", factor=factor) for name, factor in self.state_of}
        if self.gradients != "none":
            planes[GRADIENT] = Plane(self.gradients)
        return MappingProxyType(planes)

    @property
    def state_planes(self) -> dict[str, Plane]:
        """Those that the optimizer keeps for itself."""
        masters = (WEIGHTS, MASTER, MASTER_LOW, MASTER_TIES, GRADIENT)
        return {name: plane for name, plane in self.planes.items() if name not in masters}

    @property
    def splits(self) -> bool:
        """Whether weights are the upper halves of masters."""
        return self.masters != "separate"

    @property
    def lossy(self) -> tuple[str, ...]:
        """What is kept in fewer bits than a plain fp32 run has, in words."""
        rounded = {f"moments in {self.moments}": self.num_moments > 0 and self.moments != "fp32"}
        rounded["masters in 24 bits"] = self.masters == "split24"
        return tuple(what for what, is_so in rounded.items() if is_so)

    @property
    def exact(self) -> bool:
        """Whether moments and masters keep every bit of a plain fp32 run."""
        return not self.lossy

    @property
    def plain(self) -> bool:
        """Whether every plane holds plain numbers that a step can take as they lie."""
        return not self.splits and self.exact and not self.whole

    @property
    def whole(self) -> bool:
        """Whether parameters step whole, and so units."""
        return self.temporaries > 0 or self.newton_schulz > 0

    @property
    def durable(self) -> "StateLayout":
        """The same without its gradients: what lasts from step to step."""
        return replace(self, gradients="fp32")

    @property
    def read_planes(self) -> tuple[str, ...]:
        """The planes that a step reads."""
        return tuple(plane for plane in self.planes if plane != WEIGHTS or MASTER not in self.planes)

    @property
    def write_planes(self) -> tuple[str, ...]:
        """The planes that a step changes and that must be kept."""
        return tuple(plane for plane in self.planes if plane != GRADIENT)

    @property
    def tile_planes(self) -> dict[str, Plane]:
        """The planes of a tile on its way through a step: those at home, and the gradient in any case."""
        return {**self.planes, GRADIENT: self.planes.get(GRADIENT, Plane("fp32"))}

    @property
    def quantum(self) -> int:
        """Elements of which a tile is a multiple, so that it is whole sectors in every plane; a power of two."""
        sectors = (plane.group * plane.sector_items for plane in self.planes.values())
        return max(PLANE_ELEMENTS, *sectors)

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of all planes for an element; factors, which are as good as nothing, are not counted."""
        return sum(_bytes_each(plane) for plane in self.planes.values())

    @property
    def step_bytes(self) -> float:
        """Bytes per parameter that a step reads and writes; an fp32 gradient where none is kept.

        Each plane once, but where parameters step whole: there a step passes over whole tensors, and what it leaves in
        one pass has left the caches before the next. Bits of ties are touched at one element in 65,536, and not
        counted. Of Muon, those of its matrices.
        """
        forms, moved = self.tile_planes, [*self.read_planes, *self.write_planes]
        moved += [GRADIENT] * (GRADIENT not in self.planes)
        once = sum(_bytes_each(forms[name]) for name in moved if name != MASTER_TIES)
        if not self.whole:
            return once
        joined, widened, _ = self._scratches
        passes = _PASSES_BYTES if self.temporaries else _MUON_BYTES + _STAGED_BYTES * self.products_on_device
        return once + passes + joined * _JOINED_BYTES + widened * _WIDENED_BYTES

    @property
    def update_bytes(self) -> float:
        """Bytes per parameter that a step in torch ops moves in the memory of a device."""
        moved = [*self.read_planes, *self.write_planes] + [GRADIENT] * (GRADIENT not in self.planes)
        once = sum(_bytes_each(self.tile_planes[name]) for name in moved if name != MASTER_TIES)
        return once + _CLIPPED_BYTES + _HALVES_BYTES * self.splits

    def step_bytes_of(self, unit: UnitSpec, numel: int) -> float:
        """Return the bytes that a step of ``numel`` elements of ``unit`` reads and writes, beside products of Muon."""
        matrices = sum(tensor.numel for tensor in muon_matrices(unit)) if self.newton_schulz else numel
        rest = replace(self, newton_schulz=0).step_bytes if matrices < numel else 0.0
        return self.step_bytes * matrices + rest * (numel - matrices)

    def step_flops_of(self, unit: UnitSpec) -> float:
        """Return the FLOPs of the products by which Muon steps ``unit``; 0 for other optimizers."""
        return newton_schulz_flops(unit, self.newton_schulz)

    def products_of(self, unit: UnitSpec) -> tuple[int, int]:
        """Return the matrices of ``unit`` that go up to a device for products, and their bytes; as many come down."""
        sizes = [tensor.numel for tensor in muon_matrices(unit)] if self.products_on_device else []
        return len(sizes), ITEM_BYTES["bf16"] * sum(sizes)

    def products_room(self, model: ModelSpec) -> int:
        """Return the bytes of each of the two rooms that products take on a device: the matrix, and a square of it."""
        if not self.products_on_device:
            return 0
        matrices = (tensor for unit in model.units for tensor in muon_matrices(unit))
        most = max((tensor.numel + min(tensor.shape) ** 2 for tensor in matrices), default=0)
        return align_up(ITEM_BYTES["bf16"] * most, SECTOR_BYTES)

    @property
    def num_scratches(self) -> int:
        """Tensors in fp32, of the size of the largest parameter, that a step of whole parameters needs beside planes.

        One for a split master that is joined, one for a gradient in bf16; of either kind an fp32 plane serves itself.
        And one for the products of Muon, which use the memory of the gradient as well.
        """
        return sum(self._scratches)

    @property
    def _scratches(self) -> tuple[bool, bool, bool]:
        narrow = self.gradients == "bf16"
        return self.whole and self.splits, self.whole and narrow, self.newton_schulz > 0

    def scratch_elements(self, model: ModelSpec) -> int:
        """Return the elements of each of `num_scratches` for ``model``."""
        of_unit = muon_matrices if self.newton_schulz else (lambda unit: unit.tensors)
        trained = (t.numel for unit in model.units for t in of_unit(unit) if t.trainable)
        return align_up(max(trained, default=0), PLANE_ELEMENTS)

    def scratch_bytes(self, model: ModelSpec) -> int:
        """Return the bytes of all scratches together, and of what a step makes for itself."""
        return 4 * (self.num_scratches + self.temporaries) * self.scratch_elements(model)

    def whole_tile(self, largest: int) -> int:
        """Return the elements of a tile that takes any unit whole, of which the largest has ``largest``."""
        step = GRANULE_ELEMENTS if largest > 8 * GRANULE_ELEMENTS else self.quantum
        return align_up(largest, max(step, self.quantum))

    def bytes_of(self, unit: UnitSpec, numel: int | None = None, names: tuple[str, ...] | None = None) -> int:
        """Return the bytes of ``numel`` elements of ``unit``, or of all, in the planes of those names, or in all."""
        planes = self.planes
        return sum(planes[name].bytes_of(unit, numel) for name in (planes if names is None else names))

    def tile_room(self, model: ModelSpec, tile_elements: int, *, with_state: bool = True) -> dict[str, int]:
        """Return the items of each plane of a tile buffer: for so many elements of any unit that trains.

        Where it is not ``with_state`` it holds a gradient, and no state.
        """
        planes = self.tile_planes if with_state else {GRADIENT: self.tile_planes[GRADIENT]}
        units = [unit for unit in model.units if unit.trainable]
        return {
            name: plane.items(tile_elements)
            if plane.factor is None
            else max((plane.items_of(unit) for unit in units), default=0)
            for name, plane in planes.items()
        }

    def tile_bytes(self, model: ModelSpec, tile_elements: int, *, with_state: bool = True) -> int:
        """Return the bytes of a tile buffer; arguments as those of `tile_room`."""
        room = self.tile_room(model, tile_elements, with_state=with_state)
        return sum(items * ITEM_BYTES[self.tile_planes[name].item] for name, items in room.items())


def _bytes_each(plane: Plane) -> float:
    """Bytes of a plane for an element of its unit; none where not every element has them."""
    return 0.0 if plane.factor is not None else ITEM_BYTES[plane.item] / plane.group


def masters_for(wanted: MastersOrAuto, dtype: str, moments: Moments, *, kernels: bool) -> Masters:
    """Return how masters lie: as ``wanted``, and else split beside bf16 weights.

    Exact ones are split only where ``kernels`` in C step them: there that is as fast as a separate master and takes two
    bytes less, and in torch ops it is slower by a factor of fifteen.
    """
    if wanted != "auto":
        return wanted
    return "split" if dtype == "bf16" and (kernels or moments != "fp32") else "separate"


State = StateLayout | str
"""A layout, or a compute dtype, which stands for its plain one."""


def layout_of(state: State) -> StateLayout:
    """Return the layout that ``state`` names.

    Raises:
        ValueError: unknown dtype.
    """
    return StateLayout(dtype=state) if isinstance(state, str) else state
