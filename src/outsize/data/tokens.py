"""Read tokens from disk: arrays that this package wrote, and ``.npy`` and ``.bin`` files made elsewhere.

Nothing is mapped into memory: pages of a mapping count as resident memory of the process, and a run promises
a budget of that. A read brings exactly the bytes of one sequence into a buffer of the caller.

A ``.bin`` file carries no type. It is read as int32 if that gives token ids of the vocabulary in its first
block, else as uint16 if that does (the two cannot both be by accident: two 16-bit ids read as one 32-bit id
leave any vocabulary as soon as the second is not zero).
"""

import os
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outsize.data.reading.corpus_files import Sources
from outsize.errors import DataError
from outsize.files import open_binary, system

# Rows are widened while they are in a cache: more of them are read first than this only where one alone is larger.
_ROWS_BYTES = 2**17


@dataclass(frozen=True)
class ArrayFile:
    """A one-dimensional array inside a file.

    Attributes:
        path: the file.
        dtype: of its elements.
        count: number of elements.
        offset_bytes: where the first one stands.
    """

    path: Path
    dtype: np.dtype[np.generic]
    count: int
    offset_bytes: int = 0


class ArrayReader:
    """Reads ranges of an array that may continue over several files. Safe to use from several threads."""

    def __init__(self, files: Sequence[ArrayFile]) -> None:
        """Open the files.

        Raises:
            DataError: one cannot be opened.
        """
        self._files = tuple(files)
        self._ends = list(accumulate(file.count for file in files))
        # Of each file: where element 0 of the array would stand in it, bytes of an element, and its end.
        self._bytes = [
            (
                file.offset_bytes - (end - file.count) * file.dtype.itemsize,
                file.dtype.itemsize,
                file.offset_bytes + file.count * file.dtype.itemsize,
            )
            for file, end in zip(files, self._ends, strict=True)
        ]
        self._descriptors: list[int] = []
        # With the reader, if nobody calls close.
        self._close = weakref.finalize(self, _close_all, self._descriptors)
        for file in files:
            try:
                self._descriptors.append(system().open(file.path, os.O_RDONLY))
            except OSError as error:
                self.close()
                raise DataError(f"{file.path}: cannot open: {error.strerror}") from error

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, count: int) -> NDArray[np.generic]:
        """Return elements ``start .. start + count``, in the dtype of the files.

        Raises:
            DataError: a file is shorter than it was, cannot be read, or has been closed.
            IndexError: the range leaves the array.
        """
        self._check(start, start + count)
        out = np.empty(count, self._files[0].dtype)
        if count:
            self._fill(start, out.view(np.uint8).data)
        return out

    def read_rows(self, starts: Sequence[int], *targets: NDArray[np.int64]) -> None:
        """Set row i of each of ``targets``, ``[len(starts), count]``, to the elements from ``starts[i]`` on.

        What it costs beside the bytes is one call of the system for each row: batches are made of hundreds of them,
        and whatever else Python did for each would be time in which nobody else runs Python.

        Raises:
            DataError: as of `read`.
            IndexError: a row leaves the array.
        """
        num_rows, count = targets[0].shape
        self._check(min(starts), max(starts) + count)
        dtype = self._files[0].dtype
        row_bytes = count * dtype.itemsize
        rows = np.empty((min(num_rows, max(1, _ROWS_BYTES // row_bytes)), count), dtype)
        room = rows.reshape(-1).view(np.uint8).data
        views = [room[first : first + row_bytes] for first in range(0, len(room), row_bytes)]
        for first in range(0, num_rows, len(rows)):
            group = starts[first : first + len(rows)]
            for start, view in zip(group, views, strict=False):
                self._fill(start, view)
            for target in targets:
                target[first : first + len(group)] = rows[: len(group)]

    def close(self) -> None:
        """Close the files. May be called twice."""
        self._close()

    def _check(self, start: int, stop: int) -> None:
        """Raise where elements ``start`` to ``stop`` cannot be read."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"elements {start} to {stop} of {len(self)}")
        if not self._close.alive:
            raise DataError(f"{self._files[0].path}: read after the data set was closed")

    def _fill(self, start: int, room: memoryview) -> None:
        """Fill ``room``, whole elements, with those from ``start`` on, from as many files as they lie in."""
        index = bisect_right(self._ends, start)
        while True:
            origin, itemsize, end = self._bytes[index]
            position = origin + start * itemsize
            if position + len(room) <= end:
                self._fill_from(index, position, room)
                return
            num_bytes = end - position
            self._fill_from(index, position, room[:num_bytes])
            room = room[num_bytes:]
            index, start = index + 1, self._ends[index]

    def _fill_from(self, index: int, position: int, room: memoryview) -> None:
        """Fill ``room`` from a byte of one file."""
        path = self._files[index].path
        while True:
            try:
                num_read = system().pread(self._descriptors[index], room, position)
            except OSError as error:
                raise DataError(f"{path}: cannot read at byte {position}: {error.strerror}") from error
            if num_read == len(room):
                return
            if num_read == 0:
                raise DataError(f"{path}: ends at byte {position}; it was changed or cut since it was opened")
            room, position = room[num_read:], position + num_read


class TokenStore:
    """A sequence of tokens, with a training mask and document bounds where there are any.

    Attributes:
        num_documents: number of documents; ``None`` where bounds are not known.

    Args:
        tokens: integers of any kind.
        trained: which of them are targets; ``None`` where all are.
    """

    num_documents: int | None = None

    def __init__(self, tokens: ArrayReader, trained: ArrayReader | None = None) -> None:
        self._tokens = tokens
        self._trained = trained

    @property
    def num_tokens(self) -> int:
        """Number of tokens, in all."""
        return len(self._tokens)

    def reach(self, num_tokens: int) -> int | None:
        """Wait for ``num_tokens`` tokens, or for the last one.

        Returns:
            How many tokens there are in all; None where more are to come.
        """
        return self.num_tokens

    def read(self, start: int, count: int) -> NDArray[np.int32]:
        """Return ``count`` tokens from ``start``, int32 ``[count]``."""
        return self._up_to(start + count).read(start, count).astype(np.int32, copy=False)

    def read_rows(self, starts: Sequence[int], *targets: NDArray[np.int64]) -> None:
        """Set row i of each of ``targets``, int64 ``[len(starts), count]``, to the tokens from ``starts[i]`` on."""
        self._up_to(max(starts) + targets[0].shape[1]).read_rows(starts, *targets)

    def read_trained(self, start: int, count: int) -> NDArray[np.bool_] | None:
        """Return which of these tokens are targets, ``[count]``; ``None`` where all are, and then everywhere."""
        self._up_to(start + count)
        return None if self._trained is None else self._trained.read(start, count).astype(np.bool_)

    def document_ends(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the token after the last one of each of ``count`` documents from ``first`` on.

        Raises:
            DataError: `num_documents` is not known.
        """
        raise DataError("the data has no document bounds; set data.pack to stream")

    def close(self) -> None:
        """Close the files. May be called twice."""
        self._tokens.close()
        if self._trained is not None:
            self._trained.close()

    def _up_to(self, num_tokens: int) -> ArrayReader:
        """Wait for ``num_tokens`` tokens and return a reader of them."""
        return self._tokens


def token_readers(directory: Path, count: int) -> tuple[ArrayReader, ArrayReader | None]:
    """Return what reads ``tokens.bin`` and ``trained.bin`` of an entry of the cache; None where all are targets."""
    trained = directory / "trained.bin"
    tokens = ArrayReader([ArrayFile(directory / "tokens.bin", np.dtype("<i4"), count)])
    try:
        return tokens, ArrayReader([ArrayFile(trained, np.dtype("u1"), count)]) if trained.exists() else None
    except BaseException:
        tokens.close()
        raise


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):  # nothing was written to it; the next one is closed all the same
            system().close(descriptor)


_BLOCK_TOKENS = 1 << 20
_BIN_DTYPES = (np.dtype("<i4"), np.dtype("<u2"))
_NPY_DTYPES = (np.dtype("<i4"), np.dtype("<u2"), np.dtype("<u4"), np.dtype("<i8"))


class PretokenizedTokens(TokenStore):
    """Token files of one dtype, one after the other, without mask and document bounds.

    Args:
        sources: ``.npy`` (one-dimensional int32, uint16, uint32 or int64) or raw ``.bin`` (int32 or uint16).
        vocab_size: token ids have to be below.

    Raises:
        DataError: a file is damaged, of another type, empty, or holds an id outside the vocabulary. All ids
            are checked once, here.
    """

    def __init__(self, sources: Sources, vocab_size: int) -> None:
        files = [_array_file(f.path, f.size_bytes, vocab_size) for f in sources.files]
        dtypes = {file.dtype.str for file in files}
        if len(dtypes) > 1:
            raise DataError(
                f"{sources.files[0].path.parent}: token files of different types: {', '.join(sorted(dtypes))}"
            )
        super().__init__(ArrayReader([file for file in files if file.count]))
        self.dtype = files[0].dtype
        try:
            if not len(self._tokens):
                raise DataError(f"{sources.files[0].path}: the data set is empty")
            self.max_token_id = self._check_ids(vocab_size)
        except BaseException:
            self.close()
            raise

    def _check_ids(self, vocab_size: int) -> int:
        highest = -1
        for start in range(0, self.num_tokens, _BLOCK_TOKENS):
            block: Any = self._tokens.read(start, min(_BLOCK_TOKENS, self.num_tokens - start))
            lowest, highest = int(block.min()), max(highest, int(block.max()))
            if lowest < 0 or highest >= vocab_size:
                bad = lowest if lowest < 0 else highest
                raise DataError(
                    f"token id {bad} near token {start} is outside the vocabulary of {vocab_size}; "
                    "the data was made with another tokenizer"
                )
        return highest


def _array_file(path: Path, size_bytes: int, vocab_size: int) -> ArrayFile:
    if path.suffix == ".npy":
        return _npy_file(path, size_bytes)
    if path.suffix != ".bin":
        raise DataError(f"{path}: pre-tokenised data is .npy or .bin")
    for dtype in _BIN_DTYPES:
        count, rest = divmod(size_bytes, dtype.itemsize)
        if rest:
            continue
        block: Any = np.fromfile(path, dtype, count=_BLOCK_TOKENS)
        if not count or (block.min() >= 0 and block.max() < vocab_size):
            return ArrayFile(path, dtype, count)
    raise DataError(
        f"{path}: neither int32 nor uint16 token ids below {vocab_size}; "
        "it was made with another tokenizer, or is no token file"
    )


def _npy_file(path: Path, size_bytes: int) -> ArrayFile:
    try:
        with open_binary(path, "r") as file:
            version = np.lib.format.read_magic(file)
            read_header = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, _, dtype = read_header(file)
            offset = file.tell()
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: not a .npy file: {error}") from error
    if len(shape) != 1 or dtype not in _NPY_DTYPES:
        raise DataError(
            f"{path}: expected one dimension of int32, uint16, uint32 or int64, found {dtype} {shape}"
        )
    if offset + shape[0] * dtype.itemsize > size_bytes:
        raise DataError(
            f"{path}: cut short: {size_bytes} bytes, {offset + shape[0] * dtype.itemsize} expected"
        )
    return ArrayFile(path, dtype, shape[0], offset)
