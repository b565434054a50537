"""One plane of a unit as a file: its tensors in the order of the plane, the padding between them left out.

The plane comes and goes in chunks, so that a file of any size takes the memory of a chunk. A chunk is a pair of the
element of the plane that it begins with and a flat CPU tensor.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from outsize.checkpoint.files.checkpoint_format import (
    FileSum,
    Moved,
    StoredTensor,
    TensorWriter,
    bytes_of,
    read_elements,
    read_header,
)
from outsize.errors import CheckpointError
from outsize.model.sizes.model_spec import TensorSpec, UnitSpec

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
        found = stored.get(tensor.name)
        if found is None or tuple(found.shape) != tensor.shape or found.dtype != dtype:
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
