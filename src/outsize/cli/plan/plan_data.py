"""Count the tokens of the data that ``outsize plan`` is asked about."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outsize.config import DataConfig, SourceConfig
from outsize.errors import DataError

# Of text that is counted: so much of it, and bytes of a token where no tokenizer lies beside the model, as of English.
SAMPLE_BYTES, BYTES_PER_TOKEN = 4 * 2**20, 4
# Tokens that a chat template adds to a message, about.
MARKS_PER_MESSAGE = 5


@dataclass(frozen=True, slots=True)
class DataTokens:
    """How much there is to train on.

    Attributes:
        tokens: of one epoch, about.
        note: what the count rests on, for people.
    """

    tokens: float
    note: str


def count_data(path: Path, model_path: Path, data: DataConfig | None = None) -> DataTokens:
    """Count the tokens of data: in all of a few megabytes, and by their density in more.

    Args:
        path: of the data.
        model_path: of the model, beside which its tokenizer lies.
        data: how a run reads them; None for as they are.

    Raises:
        DataError: it cannot be read.
    """
    from tokenizers import Tokenizer

    from outsize.data.reading.corpus_files import Corpus, find_sources
    from outsize.data.reading.documents import DocumentReader

    reads: dict[str, Any] = {} if data is None else {n: getattr(data, n) for n in SourceConfig.model_fields}
    sources = find_sources(path, reads.get("glob"))
    if sources.container == "tokens":
        return DataTokens(sum(_num_tokens(file.path) for file in sources.files), "as they are")
    reader = DocumentReader(sources, None, Corpus(**reads | {"path": path}))
    place = (model_path if model_path.is_dir() else model_path.parent) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(place)) if place.is_file() else None
    tokens = num_bytes = 0.0
    reader.detect()
    for document in reader.documents():
        messages = document.messages or ()
        text = document.text or " ".join(str(message.get("content") or "") for message in messages)
        size = len(text.encode())
        tokens += size / BYTES_PER_TOKEN if tokenizer is None else len(tokenizer.encode(text).ids)
        tokens += MARKS_PER_MESSAGE * len(messages)
        num_bytes += size
        if num_bytes >= SAMPLE_BYTES:
            tokens *= sources.num_bytes / max(1, reader.bytes_read)
            break
    by = f"{BYTES_PER_TOKEN} bytes are taken for a token" if tokenizer is None else "by its tokenizer"
    return DataTokens(tokens, f"{by}, a chat template for {MARKS_PER_MESSAGE} a message")


def _num_tokens(path: Path) -> int:
    """Return how many tokens a file of them holds."""
    import numpy as np

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
