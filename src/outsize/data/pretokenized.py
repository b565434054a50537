"""Tokens made elsewhere: ``.npy`` arrays and raw ``.bin`` files, read in place.

A ``.bin`` file carries no type. It is read as int32 if that gives token ids of the vocabulary in its first
block, else as uint16 if that does (the two cannot both be by accident: two 16-bit ids read as one 32-bit id
leave any vocabulary as soon as the second is not zero).
"""

from pathlib import Path
from typing import Any

import numpy as np

from outsize.data.reading.corpus_files import Sources
from outsize.data.tokens import ArrayFile, ArrayReader, TokenStore
from outsize.errors import DataError
from outsize.files import open_binary

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
