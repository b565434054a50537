"""The safetensors file: eight bytes of length, a JSON header, then the bytes of every tensor, back to back.

Written out here, rather than left to the library, for three reasons: elements ``[start, stop)`` of a tensor
are read straight into memory that exists already, without mapping the file (mapped pages count into the
resident set, which is promised); the header is held against the size of the file before any work begins; and
a file is written tensor by tensor and synced, without a copy of the whole.
`tests/model/test_checkpoint_format.py` holds it against the library.
"""

import errno
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor

from outsize import files
from outsize.errors import CheckpointError
from outsize.units import align_up, format_bytes

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_STAGING_BYTES = 8 * 2**20
# A file is synced every so often while it is written: pages that wait for the disk stay few, and no sync takes long.
_SYNC_BYTES = 256 * 2**20

Moved = Callable[[], object]
"""Told that something was written: whoever watches knows a slow disk from one that does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a safetensors file.

    Attributes:
        name: its key in the file.
        path: the file.
        dtype: dtype of its elements there.
        shape: its shape there.
        offset: first byte in the file.
        decode: fills ``into`` with elements ``[start, stop)`` where they are not stored as they are, see
            `outsize.checkpoint.files.quantised`; dtype and shape are then what it makes.
    """

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    decode: Callable[[int, int, Tensor], None] | None = field(default=None, compare=False)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the file at ``path``, by name.

    Raises:
        CheckpointError: missing, not a safetensors file, or of another size than its header says.
    """
    try:
        file_bytes = path.stat().st_size
        with files.open_binary(path, "r") as file:
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, file_bytes - _LENGTH_BYTES):
                raise CheckpointError(_broken(path, f"it holds {file_bytes} bytes and no whole header"))
            entries = json.loads(file.read(header_bytes))
            if not isinstance(entries, dict):
                raise ValueError("not an object")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; download it again") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(_broken(path, f"its header is not JSON ({error})")) from error
    entries.pop("__metadata__", None)
    base = _LENGTH_BYTES + header_bytes
    stored = {name: _parse_entry(path, name, entry, base) for name, entry in entries.items()}
    expected_bytes = max((t.offset + t.numel * t.dtype.itemsize for t in stored.values()), default=base)
    if expected_bytes != file_bytes:
        raise CheckpointError(
            _broken(
                path,
                f"it holds {file_bytes} bytes ({format_bytes(file_bytes)}), its header says {expected_bytes}",
            )
        )
    return stored


def read_elements(stored: StoredTensor, start: int, stop: int, into: Tensor) -> None:
    """Read the flattened elements ``[start, stop)`` of ``stored`` into ``into``, cast to its dtype.

    ``into`` is a contiguous CPU tensor of ``stop - start`` elements. Where no cast is needed the bytes go
    straight to their place; else they pass through a buffer of at most 8 MiB.

    Raises:
        CheckpointError: the file ended early or could not be read.
    """
    flat = into.view(-1)
    if not (0 <= start <= stop <= stored.numel and flat.numel() == stop - start):
        raise ValueError(
            f"elements [{start}, {stop}) of {stored.numel} do not fit {flat.numel()}: {stored.name}"
        )
    if stored.decode is not None:
        stored.decode(start, stop, flat)
        return
    itemsize = stored.dtype.itemsize
    try:
        fd = files.system().open(stored.path, os.O_RDONLY)
        try:
            if flat.dtype == stored.dtype:
                _read_exactly(fd, stored.offset + start * itemsize, bytes_of(flat), stored.path)
                return
            chunk = max(1, min(_STAGING_BYTES // itemsize, stop - start))
            staging = torch.empty(chunk, dtype=stored.dtype)
            for first in range(start, stop, chunk):
                part = staging[: min(chunk, stop - first)]
                _read_exactly(fd, stored.offset + first * itemsize, bytes_of(part), stored.path)
                flat[first - start : first - start + len(part)].copy_(part)
        finally:
            files.system().close(fd)
    except OSError as error:
        raise CheckpointError(f"{stored.path} cannot be read: {error.strerror}") from error


def read_tensor(stored: StoredTensor) -> Tensor:
    """Return the whole of ``stored``, in its own dtype and shape."""
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    read_elements(stored, 0, stored.numel, tensor)
    return tensor


@dataclass(frozen=True, slots=True)
class FileSum:
    """What a file holds, to recognise it again.

    Attributes:
        num_bytes: its size.
        crc32: of all its bytes; finds every single flipped bit, and every burst of up to 32.
    """

    num_bytes: int
    crc32: int


class TensorWriter:
    """Writes a safetensors file whose bytes come a piece at a time; a context manager.

    Args:
        path: a new file.
        entries: name, dtype and shape of each tensor, in the order in which their bytes will come. All of one itemsize,
            or the larger ones first, so that every tensor is aligned for its dtype.
        moved: called after every piece that was written or synced.

    Raises:
        OSError: as the system says; the caller knows what to clean up.
    """

    def __init__(
        self,
        path: Path,
        entries: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
        moved: Moved = lambda: None,
    ) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, dtype, shape in entries:
            start, end = end, end + prod(shape) * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text = text.ljust(align_up(len(text), _LENGTH_BYTES))
        self._expected = _LENGTH_BYTES + len(text) + end
        self._num_bytes = self._num_synced = self._crc32 = 0
        self._moved = moved
        self._fd = files.system().open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            self.write(memoryview(len(text).to_bytes(_LENGTH_BYTES, "little") + text))
        except BaseException:
            files.system().close(self._fd)
            raise

    def write(self, data: memoryview) -> None:
        """Write the bytes that come next."""
        for start in range(0, len(data), _STAGING_BYTES):
            piece = data[start : start + _STAGING_BYTES]
            self._crc32 = zlib.crc32(piece, self._crc32)
            self._num_bytes = _write_all(self._fd, piece, self._num_bytes)
            self._moved()
            if self._num_bytes - self._num_synced >= _SYNC_BYTES:
                files.system().fdatasync(self._fd)
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
                self._num_synced = self._num_bytes
                self._moved()

    def sync(self) -> FileSum:
        """Wait until everything is on the disk, and let it go from the page cache.

        Raises:
            ValueError: fewer or more bytes came than the entries say.
        """
        if self._num_bytes != self._expected:
            raise ValueError(f"{self._num_bytes} bytes came, the header says {self._expected}")
        files.system().fsync(self._fd)
        self._moved()
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return FileSum(self._num_bytes, self._crc32)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        files.system().close(self._fd)


def write_file(path: Path, tensors: Mapping[str, Tensor], moved: Moved = lambda: None) -> FileSum:
    """Write ``tensors`` to a new file at ``path``, sync it, and return its size and checksum.

    ``moved`` is called after every piece.

    Raises:
        OSError: as the system says; the caller knows what to clean up.
    """
    # Largest itemsize first, as the library does, so that every tensor is aligned for its dtype.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    with TensorWriter(path, ((name, t.dtype, tuple(t.shape)) for name, t in ordered), moved) as file:
        for _, tensor in ordered:
            file.write(bytes_of(tensor.detach().cpu().contiguous()))
        return file.sync()


def sum_of_file(path: Path) -> FileSum:
    """Return size and checksum of a file as it lies there.

    Raises:
        OSError: it cannot be read.
    """
    size = crc32 = 0
    with files.open_binary(path, "r", buffered=False) as file:
        while piece := file.read(_STAGING_BYTES):
            size, crc32 = size + len(piece), zlib.crc32(piece, crc32)
    return FileSum(size, crc32)


def sum_the_rest(directory: Path, sums: dict[str, FileSum]) -> None:
    """Sync the files of ``directory`` that are not among ``sums`` yet, and add them.

    Raises:
        OSError: as the system says.
    """
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.name not in sums:
            files.sync(path)
            sums[path.name] = sum_of_file(path)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, as bytes."""
    return memoryview(cast(Any, tensor.detach().view(-1).view(torch.uint8).numpy()))


def _parse_entry(path: Path, name: str, entry: Any, base: int) -> StoredTensor:
    """Return one entry of a header whose tensors begin at byte ``base``."""
    try:
        start, stop = map(_natural, entry["data_offsets"])
        dtype, shape = DTYPES.get(entry["dtype"]), tuple(map(_natural, entry["shape"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(_broken(path, f"its entry for {name} is not valid")) from error
    if dtype is None:
        raise CheckpointError(
            f"{path}: {name} is stored as {entry['dtype']}, which cannot be trained; "
            "use the full-precision checkpoint of this model"
        )
    if stop - start != prod(shape) * dtype.itemsize:
        raise CheckpointError(_broken(path, f"{name} of shape {shape} is said to have {stop - start} bytes"))
    return StoredTensor(name=name, path=path, dtype=dtype, shape=shape, offset=base + start)


def _natural(number: Any) -> int:
    """Return a number of a header if it is one that counts something."""
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no size")
    return number


def _read_exactly(fd: int, offset: int, into: memoryview, path: Path) -> None:
    """Fill ``into`` from byte ``offset`` on; the system may hand out less than asked."""
    done = 0
    while done < len(into):
        count = files.system().pread(fd, into[done:], offset + done)
        if count == 0:
            raise CheckpointError(_broken(path, f"it ended at byte {offset + done}"))
        done += count


def _write_all(fd: int, data: memoryview, offset: int) -> int:
    """Write all of ``data`` at ``offset``, and return where it ends; the system may take less than it is given."""
    done = 0
    while done < len(data):
        count = files.system().pwrite(fd, data[done:], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the system takes no more bytes")
        done += count
    return offset + done


def _broken(path: Path, why: str) -> str:
    return f"{path} is truncated or not a safetensors file: {why}; download it again"
