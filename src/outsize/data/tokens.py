"""Tokens on disk, read with plain reads.

Nothing is mapped into memory: pages of a mapping count as resident memory of the process, and a run promises
a budget of that. A read brings exactly the bytes of one sequence into a buffer of the caller.
"""

import os
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outsize.errors import DataError
from outsize.files import system

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
        self._close = weakref.finalize(
            self, _close_all, self._descriptors
        )  # with the reader, if nobody calls close
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
    with ExitStack() as stack:  # one that says an error leaves no other open
        for descriptor in descriptors:
            stack.callback(system().close, descriptor)
