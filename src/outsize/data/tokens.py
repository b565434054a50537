"""Tokens on disk, read with plain reads.

Nothing is mapped into memory: pages of a mapping count as resident memory of the process, and a run promises
a budget of that. A read brings exactly the bytes of one sequence into a buffer of the caller.
"""

import os
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outsize.errors import DataError
from outsize.files import system


class TokenStore(Protocol):
    """A sequence of tokens, with a training mask and document bounds where there are any."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""

    @property
    def num_documents(self) -> int | None:
        """Number of documents; ``None`` where bounds are not known."""

    def read(self, start: int, count: int) -> NDArray[np.int32]:
        """Return ``count`` tokens from ``start``, int32 ``[count]``."""

    def read_trained(self, start: int, count: int) -> NDArray[np.bool_] | None:
        """Return which of these tokens are targets, ``[count]``; ``None`` where all are, and then everywhere."""

    def document_range(self, index: int) -> tuple[int, int]:
        """Return the first token of a document and the token after its last."""

    def close(self) -> None:
        """Give the files back."""


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
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(f"elements {start} to {start + count} of {len(self)}")
        out = np.empty(count, self._files[0].dtype)
        done = 0
        index = bisect_right(self._ends, start)
        while done < count:
            file_start = self._ends[index] - self._files[index].count
            within = start + done - file_start
            part = out[done : min(count, done + self._files[index].count - within)]
            self._fill(index, within, part)
            done += len(part)
            index += 1
        return out

    def close(self) -> None:
        """Close the files. May be called twice."""
        self._close()

    def _fill(self, index: int, within: int, out: NDArray[np.generic]) -> None:
        file = self._files[index]
        if not self._close.alive:
            raise DataError(f"{file.path}: read after the data set was closed")
        buffer = out.view(np.uint8).data
        position = file.offset_bytes + within * file.dtype.itemsize
        while len(buffer):
            try:
                num_read = system().pread(self._descriptors[index], buffer, position)
            except OSError as error:
                raise DataError(f"{file.path}: cannot read at byte {position}: {error.strerror}") from error
            if num_read == 0:
                raise DataError(
                    f"{file.path}: ends at byte {position}; it was changed or cut since it was opened"
                )
            buffer, position = buffer[num_read:], position + num_read


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        system().close(descriptor)
