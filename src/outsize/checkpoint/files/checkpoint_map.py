"""From the tensors a checkpoint stores to the parameters a model has.

Most are one and the same. Some have another name there, lack the prefix of the base model, or are made of
many: the fused experts of a mixture come from one tensor per expert and projection. transformers carries
those rules, per architecture, and applies them; here they are asked which stored tensors make which
parameter, and tried on the meta device, so that shapes are known before a byte is read.

One plane of a unit as a file: its tensors in the order of the plane, the padding between them left out.

The plane comes and goes in chunks, so that a file of any size takes the memory of a chunk. A chunk is a pair of the
element of the plane that it begins with and a flat CPU tensor.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from outsize.checkpoint.files.checkpoint_format import (
    FileSum,
    Moved,
    StoredTensor,
    TensorWriter,
    bytes_of,
    read_elements,
    read_header,
    read_tensor,
)
from outsize.errors import CheckpointError
from outsize.model.sizes.model_spec import TensorSpec, UnitSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Stored tensors that transformers turns into one or several parameters.

    Attributes:
        target: first of the parameters.
        sources: the pattern that each stored tensor matched, and the tensor, in the order of the checkpoint.
        num_rows: length of the first dimension where each row (an expert) is made from stored tensors of its
            own, so
            that rows can be converted one by one; 0 where all is needed at once.
        converter: the rule, a ``transformers`` ``WeightConverter``.
        model: the skeleton, whose config and shapes some rules ask for.
    """

    target: str
    sources: tuple[tuple[str, StoredTensor], ...]
    num_rows: int
    converter: Any
    model: nn.Module

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every parameter this makes; reads nothing.

        Raises:
            CheckpointError: the rule cannot be applied to tensors of these shapes.
        """
        meta = [torch.empty(stored.shape, dtype=stored.dtype, device="meta") for _, stored in self.sources]
        return {name: tuple(tensor.shape) for name, tensor in self._apply(meta, self.sources).items()}

    def convert(self, row: int | None = None) -> dict[str, Tensor]:
        """Read and convert; with ``row``, only that row, as a tensor of one row."""
        sources = self.sources
        if row is not None:
            patterns = dict.fromkeys(pattern for pattern, _ in sources)
            sources = tuple((p, [s for q, s in self.sources if q == p][row]) for p in patterns)
        return self._apply([read_tensor(stored) for _, stored in sources], sources)

    def _apply(self, tensors: list[Tensor], sources: Sequence[tuple[str, StoredTensor]]) -> dict[str, Tensor]:
        converter = deepcopy(self.converter)
        for pattern, stored in sources:
            converter.add_tensor(self.target, stored.name, pattern, tensors.pop(0))
        try:
            converted = converter.convert(self.target, model=self.model, config=cast(Any, self.model).config)
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            _, first = sources[0]
            raise CheckpointError(
                f"{first.path}: {len(sources)} tensors such as {first.name} {first.shape} cannot be made "
                f"into {self.target}: {error}; weights and config.json do not belong together"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """Where each entry of a model's state dict comes from.

    Attributes:
        plain: stored as it is, perhaps under another name.
        converted: made by a conversion.
        shapes: the shape that the checkpoint gives each of them.
        unexpected: stored tensors that the model has no use for.
    """

    plain: dict[str, StoredTensor]
    converted: dict[str, Conversion]
    shapes: dict[str, tuple[int, ...]]
    unexpected: tuple[str, ...]


def map_tensors(model: nn.Module, stored: Mapping[str, StoredTensor]) -> TensorMap:
    """Return which of the ``stored`` tensors make which entry of ``model``'s state dict.

    Raises:
        CheckpointError: tensors that belong together cannot be converted.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(cast(Any, model))
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, wanted = cast(Any, model).base_model_prefix, model.state_dict()

    plain: dict[str, StoredTensor] = {}
    groups: dict[str, list[tuple[str, StoredTensor]]] = {}
    unexpected = []
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
        # Stored in the model's own layout, which a rule took for another.
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], prefix, wanted)
        if name not in wanted:
            unexpected.append(key)
        elif pattern is None:
            plain.setdefault(name, stored[key])
        else:
            groups.setdefault(name, []).append((pattern, stored[key]))

    shapes = {name: tensor.shape for name, tensor in plain.items()}
    converted: dict[str, Conversion] = {}
    for target, sources in groups.items():
        converter = converter_of[sources[0][0]]
        conversion = Conversion(
            target=target,
            sources=tuple(sources),
            num_rows=_count_rows(converter, [pattern for pattern, _ in sources]),
            converter=converter,
            model=model,
        )
        for name, shape in conversion.shapes().items():
            converted[name], shapes[name] = conversion, shape
    return TensorMap(plain=plain, converted=converted, shapes=shapes, unexpected=tuple(unexpected))


def _count_rows(converter: Any, patterns: list[str]) -> int:
    """Return how many rows can be converted on their own, or 0.

    So it is where the first operation stacks tensors along dimension 0, as many of each kind, into one
    parameter, and the operations after it leave that dimension alone.
    """
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

    first, *rest = converter.operations
    counts = {patterns.count(pattern) for pattern in patterns}
    by_rows = (
        type(first) is MergeModulelist
        and first.dim == 0
        and all(
            (type(op) is Concatenate and op.dim > 0)
            or (type(op) is Transpose and min(op.dim0, op.dim1) > 0 and not op.check_dims)
            for op in rest
        )
        and len(converter.target_patterns) == 1
        and len(counts) == 1
    )
    return counts.pop() if by_rows else 0


Chunk = tuple[int, Tensor]


def write_plane(
    path: Path,
    unit: UnitSpec,
    dtype: torch.dtype,
    chunks: Iterable[Chunk],
    names: Mapping[str, str] | None = None,
    moved: Moved = lambda: None,
) -> FileSum:
    """Write a plane of ``unit`` to a new file, sync it, and return its size and checksum.

    Args:
        path: the file.
        unit: whose plane it is.
        dtype: of the plane.
        chunks: the whole plane, in order.
        names: what tensors are called in the file; None for their own names.
        moved: called after every piece that was written.

    Raises:
        OSError: as the system says.
    """
    entries = ((names[t.name] if names else t.name, dtype, t.shape) for t in unit.tensors)
    with TensorWriter(path, entries, moved) as file:
        for start, chunk in chunks:
            for _, _, piece in pieces(unit.tensors, start, chunk):
                file.write(bytes_of(piece))
        return file.sync()


def find_plane(path: Path, unit: UnitSpec, dtype: torch.dtype) -> dict[str, StoredTensor]:
    """Return the tensors of a plane of ``unit`` in the file at ``path``, by name.

    Raises:
        CheckpointError: the file is missing or truncated, or holds something else.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, so the run cannot be resumed exactly")
    stored = read_header(path)
    for tensor in unit.tensors:
        tensor_stored = stored.get(tensor.name)
        if (
            tensor_stored is None
            or tuple(tensor_stored.shape) != tensor.shape
            or tensor_stored.dtype != dtype
        ):
            raise CheckpointError(f"{path} does not hold {tensor.name} of shape {tensor.shape} in {dtype}")
    return stored


def read_plane(stored: Mapping[str, StoredTensor], unit: UnitSpec, start: int, into: Tensor) -> None:
    """Fill ``into`` with elements of a plane from ``start`` on; padding reads as zeros.

    Raises:
        CheckpointError: the file cannot be read.
    """
    into.zero_()
    for name, first, piece in pieces(unit.tensors, start, into):
        read_elements(stored[name], first, first + piece.numel(), piece)


def pieces(tensors: Iterable[TensorSpec], start: int, chunk: Tensor) -> Iterator[tuple[str, int, Tensor]]:
    """Yield what of each of a plane's ``tensors`` lies in a chunk: name, first element of the tensor, and the piece."""
    stop = start + chunk.numel()
    for tensor in tensors:
        low, high = max(tensor.offset, start), min(tensor.offset + tensor.numel, stop)
        if low < high:
            yield tensor.name, low - tensor.offset, chunk[low - start : high - start]
