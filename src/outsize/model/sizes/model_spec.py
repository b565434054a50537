"""Sizes of a model: units, tensors and bytes, and a ``config.json`` whose sizes are impossible refused. No torch.

A unit is flat: all its parameters lie in one contiguous range of *elements*, each starting on a multiple of
`ALIGN_ELEMENTS`. The same element offsets index every plane of the unit (weights in the compute dtype, fp32 master,
fp32 moments, fp32 gradient), so a plane is ``unit.numel × itemsize`` bytes and moves in one copy.

What never trains may lie apart, in *frozen parts*: planes of their own, in a dtype of their own, which exist once, have
no master, no moments and no gradient, and cross a link upwards only. So a unit of a model with adapters is a small part
that trains and a large one that does not.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from outsize.errors import ModelError
from outsize.units import align_up

# What every model has at least one of, where its config says how many.
_AT_LEAST_ONE = frozenset({"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"})
_AT_LEAST_ONE |= {"n_embd", "n_layer", "n_head", "d_model"}
_WIDTHS = frozenset(
    {"intermediate_size", "num_key_value_heads", "head_dim", "num_experts", "num_local_experts", "n_inner"}
)
_POSITIONS = frozenset({"max_position_embeddings", "n_positions", "n_ctx"})
_LAYERS = frozenset({"num_hidden_layers", "n_layer"})
# Modules of more layers, and rows and columns of larger matrices, are none that a machine could hold.
MOST_LAYERS, MOST_EXPERTS, MOST_WIDE, MOST_POSITIONS = 10_000, 100_000, 1 << 24, 1 << 31


def check_sizes(config: Any, where: object) -> None:
    """Check the sizes that a config tells, of the model and of its parts.

    Raises:
        ModelError: one is no whole number, or one that no model has; the file and the key are named.
    """
    for key, size in _sizes(config):
        name = key.rpartition(".")[2]
        least, most = int(name in _AT_LEAST_ONE), _most(name)
        if type(size) is not int or not least <= size <= most:
            shown = repr(size) if len(repr(size)) <= 40 else f"{repr(size)[:40]}..."
            raise ModelError(
                f"{where}: {key} is {shown}, and not a whole number from {least} to {most:,}; fetch the file again, or "
                "write the size that the weights have"
            )


def _most(name: str) -> int:
    if name in _LAYERS:
        return MOST_LAYERS
    if name in _POSITIONS:
        return MOST_POSITIONS
    return MOST_EXPERTS if name.endswith("experts") else MOST_WIDE


def _sizes(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield each size by its key, those of parts by ``part.key``; a size that is null is for its model to choose."""
    if not isinstance(config, Mapping):
        return
    for key, value in config.items():
        if key in _AT_LEAST_ONE | _WIDTHS | _POSITIONS:
            each = value if isinstance(value, list) and value else [value]  # one for each layer
            yield from ((key, size) for size in each if size is not None)
        elif isinstance(value, Mapping):
            for name, size in value.items():
                yield from ((f"{key}.{inner}", inner_value) for inner, inner_value in _sizes({name: size}))


# Ways of stretching rotary positions of which ``factor`` says by how much; of all others the config says the length.
_STRETCHED = ("linear", "dynamic", "yarn", "llama3", "longrope", "su", "ntk")
_ORIGINAL = "original_max_position_embeddings"


def num_positions(config: Mapping[str, Any]) -> int | None:
    """Return the tokens of the longest sequence that a model computes positions for; None where nothing limits them.

    Rotary positions that are stretched (``rope_scaling``, or ``rope_parameters`` of newer configs) reach ``factor``
    times as far as the model was trained first: ``original_max_position_embeddings``, or without it
    ``max_position_embeddings``. Some configs say the stretched length there and some leave it as it was; the larger of
    both holds.

    Args:
        config: of the model or of its text part, as JSON.
    """
    in_config = config.get("max_position_embeddings")
    if "relative_attention_num_buckets" not in config:  # T5 has positions beside it that it does not count
        in_config = in_config or config.get("n_positions")
    if not isinstance(in_config, int) or in_config <= 0:
        return None
    most = in_config
    for rope in _ropes(config):
        kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
        if kind not in _STRETCHED or not isinstance(factor, int | float) or factor <= 1:
            continue
        original = rope.get(_ORIGINAL) or config.get(_ORIGINAL) or in_config
        most = max(most, int(factor * original))
    return most


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What is said of rotary positions: of all layers, or of each kind of layer."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if isinstance(rope, Mapping):
            yield rope
            yield from (value for value in rope.values() if isinstance(value, Mapping))


UnitKind = Literal["embedding", "block", "head", "rest"]

# 128 elements are 256 bytes in bf16: the most that ATen tells cuBLASLt of a pointer's alignment (`_getAlignment` in
# aten/src/ATen/cuda/CUDABlas.cpp), as allocations of its own have it, so that the same kernel is chosen for a weight in
# a slot. It is also a multiple of every SIMD width: elementwise kernels see the same split into vectors and a tail for
# a parameter wherever it lies.
ALIGN_ELEMENTS = 128
# 2,048 elements are 4 KiB in bf16 and 8 KiB in fp32: every plane is a whole number of disk sectors.
PLANE_ELEMENTS = 2048
# 131,072 elements are 512 KiB in fp32: the checksum of a disk home covers so many at most. They are hashed while they
# are in the cache of the core that moved them. Smaller ones cost more calls, each with its turn at the interpreter's
# lock; of larger ones a checkpoint's buffer of 1 MiB would not take a master and its weight.
GRANULE_ELEMENTS = 131_072
# Direct I/O moves whole sectors.
SECTOR_BYTES = 4096

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, shape and place of a parameter inside its unit.

    Attributes:
        name: name in ``model.named_parameters()``.
        shape: its shape.
        offset: first element inside the unit's planes.
        trainable: whether it receives a gradient and steps.
        decay: factor of weight decay; 0 where it does not apply.
        lr_scale: factor of the learning rate.
        muon: whether Muon may step it, where it is a matrix of a block.
        numel: number of elements, which follows from the shape.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    trainable: bool = True
    decay: float = 1.0
    lr_scale: float = 1.0
    muon: bool = True
    numel: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", prod(self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenPart:
    """Parameters of a unit that never train, in a plane of their own.

    Attributes:
        plane: its name at home.
        dtype: of the weights on the device.
        tensors: by offset in the plane; none is trainable.
        numel: elements of the plane, padding included, a multiple of `PLANE_ELEMENTS`.
        codec: how the plane is written at home and on its way to the device; None where it is written as it is.
        encoded_bytes: what it takes there, with a codec; a multiple of 4096.
    """

    plane: str
    dtype: str
    tensors: tuple[TensorSpec, ...]
    numel: int
    codec: str | None = None
    encoded_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def home_bytes(self) -> int:
        """Bytes at home, and on the way to the device."""
        return self.encoded_bytes if self.codec is not None else self.num_bytes

    @property
    def home_elements(self) -> int:
        """Elements of the plane at home: bytes where it is encoded."""
        return self.encoded_bytes if self.codec is not None else self.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """The smallest part of a model moved as a whole.

    Attributes:
        index: position in the order of the forward; the resident rest comes last.
        name: module path, e.g. ``"model.layers.3"``; ``"rest"`` for what lies outside all units.
        kind: embedding, block, head or rest.
        tensors: its parameters, by offset; empty where they are tied and live in the rest.
        numel: elements of each plane, padding included, a multiple of `PLANE_ELEMENTS`.
        frozen: parts that never train and lie apart from ``tensors``.
    """

    index: int
    name: str
    kind: UnitKind
    tensors: tuple[TensorSpec, ...]
    numel: int
    frozen: tuple[FrozenPart, ...] = ()

    @property
    def trainable(self) -> bool:
        """Whether any of its parameters is trained."""
        return any(tensor.trainable for tensor in self.tensors)

    @property
    def all_tensors(self) -> tuple[TensorSpec, ...]:
        """Parameters of the unit: first of its planes, then of its frozen parts."""
        return (*self.tensors, *(tensor for part in self.frozen for tensor in part.tensors))

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of its weights on the device, what is not in a frozen part in compute dtype ``dtype``."""
        return self.numel * ITEMSIZE[dtype] + sum(part.num_bytes for part in self.frozen)

    def link_bytes(self, dtype: str) -> int:
        """Bytes of its weights at home and on their way to the device."""
        return self.numel * ITEMSIZE[dtype] + sum(part.home_bytes for part in self.frozen)

    def trained_bytes(self, dtype: str) -> int:
        """Bytes of the weights that steps change: of a unit that stays on the device no others are loaded again."""
        return self.numel * ITEMSIZE[dtype] if self.trainable else 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the fp32 gradient plane."""
        return self.numel * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as the planner sees it.

    Attributes:
        units: in the order of the forward; if there is a unit of kind ``rest`` it is the last one and never leaves
            the device during a step.
        dtype: compute dtype, ``fp32``, ``bf16`` or ``fp16``.
    """

    units: tuple[UnitSpec, ...]
    dtype: str

    @property
    def num_streamed(self) -> int:
        """Number of units that the forward visits (all but the rest)."""
        return sum(unit.kind != "rest" for unit in self.units)

    @property
    def dtypes(self) -> frozenset[str]:
        """The dtypes that weights have on the device."""
        parts = {part.dtype for unit in self.units for part in unit.frozen}
        return frozenset(parts | {self.dtype for unit in self.units if unit.tensors})

    @property
    def compute_dtype(self) -> str:
        """The dtype in which most weights compute: where little is trained beside much that is frozen, the latter's."""
        sizes = {self.dtype: sum(unit.numel for unit in self.units)}
        for part in (part for unit in self.units for part in unit.frozen):
            sizes[part.dtype] = sizes.get(part.dtype, 0) + part.numel
        return max(sizes, key=lambda dtype: sizes[dtype])

    @property
    def num_parameters(self) -> int:
        """Parameters without padding, each counted once."""
        return sum(tensor.numel for unit in self.units for tensor in unit.all_tensors)

    @property
    def num_trainable(self) -> int:
        """Trainable parameters."""
        return sum(t.numel for unit in self.units for t in unit.tensors if t.trainable)

    @property
    def training_state_bytes(self) -> int:
        """What resident fp32 training holds: weights, gradients and two moments, 16 bytes per trainable parameter."""
        return 16 * self.num_trainable + 4 * (self.num_parameters - self.num_trainable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one microbatch takes besides weights, as counted or measured.

    Attributes:
        tokens: of the microbatch.
        forward_flops: of each streamed unit's forward; a multiply-add counts two.
        recompute_flops: of as much of it as a backward needs.
        boundary_bytes: of the input of each streamed unit.
        forward_workspace_bytes: by unit kind, the most that its forward allocates beyond its input.
        backward_workspace_bytes: by unit kind, the most that its recompute and backward allocate.
        held_bytes: ids, labels, masks, position tables, held from the first unit to the last.
        saved_bytes: of what each streamed unit's forward makes and its backward needs; 0 for the last.
        gradient_flops: of each streamed unit's backward, without what it recomputes.
        experts_forward_bytes: the most that experts of a block allocate in a forward that keeps nothing; 0 for none.
        routed_flops: of its forward, those of tokens with the experts that they visit; empty for none.
        moved_elements: read and returned by its forward's products; empty where unknown. Those of experts and of
            adapters are ``routed_moved_elements`` and ``low_rank_elements``; empty for none.
        again_flops: that its backward computes again whatever is kept, see `model.tiled`; empty for none.
        attention_bytes: of what each streamed unit's attention returns; empty where it is unknown.
        attention_flops: of that attention.
        products_bytes: of what its attention and those of its matrix products return that its backward needs; likewise.
    """

    tokens: int
    forward_flops: tuple[float, ...]
    recompute_flops: tuple[float, ...]
    boundary_bytes: tuple[int, ...]
    forward_workspace_bytes: Mapping[str, int]
    backward_workspace_bytes: Mapping[str, int]
    held_bytes: int
    saved_bytes: tuple[int, ...]
    gradient_flops: tuple[float, ...]
    attention_bytes: tuple[int, ...] = ()
    attention_flops: tuple[float, ...] = ()
    products_bytes: tuple[int, ...] = ()
    again_flops: tuple[float, ...] = ()
    routed_flops: tuple[float, ...] = ()
    moved_elements: tuple[float, ...] = ()
    routed_moved_elements: tuple[float, ...] = ()
    low_rank_elements: tuple[float, ...] = ()
    experts_forward_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartKind:
    """What a frozen part is like: see `FrozenPart`.

    Attributes:
        plane: its name at home.
        dtype: of the weights on the device.
        codec: how it is written at home; None where it is written as it is.
        encoded_bytes: how many bytes the codec makes of a number of elements.
    """

    plane: str
    dtype: str
    codec: str | None = None
    encoded_bytes: Callable[[int], int] = lambda _: 0


def is_packed(unit: UnitSpec, plane: str) -> bool:
    """Whether a plane at home never changes and has no encoding yet, so that a packed home keeps it encoded."""
    parts = [part for part in unit.frozen if part.plane == plane]
    return parts[0].codec is None if parts else not unit.trainable


def granule_elements_for(tile_elements: int) -> int:
    """Return the largest granule, a power of two, that tiles of that size are made of; 0 is no tiles."""
    return min(tile_elements & -tile_elements or GRANULE_ELEMENTS, GRANULE_ELEMENTS)


def pack_unit(
    index: int,
    name: str,
    kind: UnitKind,
    parameters: Iterable[tuple[str, Sequence[int], bool, bool]],
    frozen: tuple[FrozenPart, ...] = (),
) -> UnitSpec:
    """Lay parameters ``(name, shape, trainable, decay)`` out in one flat range, in the order given."""
    tensors, numel = _lay_out(parameters)
    return UnitSpec(index=index, name=name, kind=kind, tensors=tensors, numel=numel, frozen=frozen)


def pack_part(kind: PartKind, parameters: Iterable[tuple[str, Sequence[int]]]) -> FrozenPart:
    """Lay parameters ``(name, shape)`` that never train out in a plane of their own, in the order given."""
    tensors, numel = _lay_out((member, shape, False, False) for member, shape in parameters)
    return FrozenPart(
        plane=kind.plane,
        dtype=kind.dtype,
        tensors=tensors,
        numel=numel,
        codec=kind.codec,
        encoded_bytes=align_up(kind.encoded_bytes(numel), SECTOR_BYTES),
    )


def _lay_out(
    parameters: Iterable[tuple[str, Sequence[int], bool, bool]],
) -> tuple[tuple[TensorSpec, ...], int]:
    tensors = []
    end = 0
    for tensor_name, shape, trainable, decays in parameters:
        tensor = TensorSpec(
            name=tensor_name, shape=tuple(shape), offset=end, trainable=trainable, decay=float(decays)
        )
        tensors.append(tensor)
        end = align_up(end + tensor.numel, ALIGN_ELEMENTS)
    return tuple(tensors), align_up(end, PLANE_ELEMENTS)
