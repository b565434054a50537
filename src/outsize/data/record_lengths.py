"""How long the records of a data set are, for whoever chooses how they are laid out."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outsize.data.opening import Making, Progress
from outsize.data.reading.corpus_files import Corpus, find_sources
from outsize.data.reading.documents import DocumentReader
from outsize.data.survey import kept_documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def are_records(corpora: Sequence[Corpus]) -> bool:
    """Return whether every source holds conversations, or prompts with completions, and none plain text or tokens.

    Raises:
        DataError: a source cannot be read, or its format is not known.
    """
    return all(_format_of(corpus) not in ("text", "tokens") for corpus in corpora)


def record_lengths(
    corpora: Sequence[Corpus],
    tokenizer: "Callable[[], PreTrainedTokenizerBase]",
    *,
    cache_dir: Path,
    template: str | None = None,
    vocab_size: int | None = None,
    progress: Progress | None = None,
) -> NDArray[np.int64]:
    """Return the tokens of each record, int64 ``[records]``; they are kept in ``cache_dir``, where a run finds them.

    Args:
        corpora: sources of records, see `are_records`.
        tokenizer: loads the model's tokenizer.
        cache_dir: see `open_data`.
        template: of conversations, see `ChatTemplate`.
        vocab_size: rows of the model's embedding; None where that is not known.
        progress: see `open_data`.

    Raises:
        DataError, StorageError: see `open_data`.
    """
    making = Making(tokenizer(), cache_dir, template, vocab_size, progress, None)
    lengths = [np.empty(0, np.int64)]
    for corpus in corpora:
        store, _ = making.open(corpus)
        try:
            lengths += [block for block, _ in kept_documents(store, None)]
        finally:
            store.close()
    return np.concatenate(lengths)


def _format_of(corpus: Corpus) -> str:
    sources = find_sources(Path(corpus.path), corpus.glob)
    if corpus.format != "auto":
        return corpus.format
    return "tokens" if sources.container == "tokens" else DocumentReader(sources, None, corpus).detect()
