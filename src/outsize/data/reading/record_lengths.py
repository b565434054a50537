"""Count the tokens of records, about, and choose the sequences that they lie in where nobody says.

So much is known without the model: what a run chooses of it, and what a plan of the run assumes, are the same.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outsize.data.reading.corpus_files import Corpus, find_sources
from outsize.data.reading.documents import DocumentReader
from outsize.errors import DataError

# Of text that is counted: so much of it, and bytes of a token where no tokenizer lies beside the model, as of English.
SAMPLE_BYTES, BYTES_PER_TOKEN = 4 * 2**20, 4
# Tokens that a chat template adds to a message, about.
MARKS_PER_MESSAGE = 5


class DataTokens(NamedTuple):
    """How many tokens an epoch of data has, about, what the count rests on, for people, and those of some records."""

    tokens: float
    note: str
    lengths: tuple[int, ...] = ()
    num_records: float = 0.0


def count_data(path: Path, model_path: Path, reads: Mapping[str, Any] | None = None) -> DataTokens:
    """Count the tokens of data: in all of a few megabytes, and by their density in more.

    Args:
        path: of the data.
        model_path: of the model, beside which its tokenizer lies.
        reads: fields of `Corpus` that say how a run reads them; None for as they are.

    Raises:
        DataError: it cannot be read.
    """
    from tokenizers import Tokenizer

    reads = {**(reads or {}), "path": path}
    sources = find_sources(path, reads.get("glob"))
    if sources.container == "tokens":
        return DataTokens(sum(_num_tokens(file.path) for file in sources.files), "as they are")
    reader = DocumentReader(sources, None, Corpus(**reads))
    place = (model_path if model_path.is_dir() else model_path.parent) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(place)) if place.is_file() else None
    num_bytes, share, lengths = 0, 1.0, list[float]()
    is_text = reader.detect() == "text"
    for document in reader.documents():
        messages = document.messages or ()
        text = document.text or " ".join(str(message.get("content") or "") for message in messages)
        size = len(text.encode())
        tokens = size / BYTES_PER_TOKEN if tokenizer is None else len(tokenizer.encode(text).ids)
        lengths.append(tokens + MARKS_PER_MESSAGE * len(messages))
        num_bytes += size
        if num_bytes >= SAMPLE_BYTES:
            share = sources.num_bytes / max(1, reader.bytes_read)
            break
    by = f"{BYTES_PER_TOKEN} bytes are taken for a token" if tokenizer is None else "by its tokenizer"
    note = f"{by}, and a chat template to add {MARKS_PER_MESSAGE} to a message"
    of_records = () if is_text else tuple(map(ceil, lengths))
    return DataTokens(share * sum(lengths), note, of_records, share * len(of_records))


def _num_tokens(path: Path) -> int:
    """Return how many tokens a file of them holds."""
    if path.suffix != ".npy":
        raise DataError(f"{path}: a raw file of tokens does not say how many it holds; write --tokens")
    try:
        array = np.load(path, mmap_mode="r")
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: not a .npy file of numbers") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"{path}: tokens are whole numbers in one dimension, and this is {array.dtype} {array.shape}"
        )
    return int(array.size)


# Sequences are as long as the longest record up to so many tokens; of longer ones so many records are whole.
WHOLE_UP_TO, WHOLE_SHARE = 2048, 0.99
# Lengths are multiples of this, for the kernels' sake.
_MULTIPLE = 64
# Records of a step, and the steps that an epoch has at least where there are fewer of them.
MOST_RECORDS, LEAST_STEPS = 16, 50


def length_for(
    lengths: Sequence[int] | NDArray[np.int64], limit: int, tokens: int | None = None, microbatches: int = 1
) -> int:
    """Return the tokens of a sequence that records of ``lengths`` fit in, at most ``limit``, which divide a step's."""
    longest = int(max(lengths))
    if longest > WHOLE_UP_TO:
        longest = max(WHOLE_UP_TO, int(np.quantile(lengths, WHOLE_SHARE, method="higher")))
    wanted = min(limit, max(2, -(-longest // _MULTIPLE) * _MULTIPLE))
    if tokens is None:
        return wanted
    parts = [size for size in range(2, max(2, min(limit, tokens // microbatches)) + 1) if tokens % size == 0]
    return min((size for size in parts if size >= wanted), default=max(parts, default=wanted))


def sequences_for(num_records: float, share: float) -> int:
    """Return the sequences of a step, where a record takes that share of one."""
    return max(1, round(min(MOST_RECORDS, max(1.0, num_records / LEAST_STEPS)) * share))
