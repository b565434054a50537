"""Opening a data set: find, detect, tokenise or reuse, lay out."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, cast

from outsize.data.corpus_files import Sources, find_sources
from outsize.data.detected import EXAMPLE_TOKENS, Detected, render_example
from outsize.data.documents import DocumentReader
from outsize.data.encode import Encoded, Encoder, Tokenized, batches
from outsize.data.formats import DEFAULT_TEXT_FIELD, FORMATS, FormatName
from outsize.data.packed_dataset import OnePerDocument, Packed, PackedDataset, PackedLayout
from outsize.data.pretokenized import PretokenizedTokens
from outsize.data.token_cache import CachedTokens, fingerprint, new_entry, write_index
from outsize.data.tokens import TokenStore
from outsize.data.writer import TokenWriter
from outsize.errors import ConfigError, DataError
from outsize.runtime.device.allocator import trim

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int], None]
logger = logging.getLogger(__name__)

_EXAMPLE_IDS = 32


def open_data(
    path: str | Path,
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    seq_len: int,
    cache_dir: str | Path,
    seed: int = 0,
    format: str = "auto",
    pack: bool = True,
    text_field: str = DEFAULT_TEXT_FIELD,
    glob: str | None = None,
    eos: bool = True,
    max_positions: int | None = None,
    vocab_size: int | None = None,
    progress: Progress | None = None,
) -> PackedDataset:
    """Open a data set for causal language model training, tokenising it first unless that was done before.

    Args:
        path: a file or a directory: text, JSON lines, a JSON array, Parquet, ``.npy`` or ``.bin`` tokens; all
            but the last three plain, ``.gz`` or ``.zst``.
        tokenizer: the model's tokenizer; pre-tokenised data needs none.
        seq_len: tokens per sequence.
        cache_dir: where tokenised data is kept, one directory per data set, tokenizer and options.
        seed: of the order of sequences.
        format: one of `FORMATS`; ``auto`` looks at the first record.
        pack: fill sequences with consecutive documents; else one document per sequence, cut or padded.
        text_field: field of a record that holds its text.
        glob: which files of a directory, e.g. ``"**/*.py"``.
        eos: end documents with the EOS token.
        max_positions: longest sequence the model takes.
        vocab_size: rows of the model's embedding.
        progress: called with (bytes of the files read, bytes in all) while tokenising.

    Raises:
        ConfigError: a value that cannot be, e.g. ``seq_len`` above ``max_positions``.
        DataError: data that is empty, malformed, or does not fit the model; with file and line where there is
            one.
        StorageError: the cache cannot be written.
    """
    _check_limits(tokenizer, format, seq_len, max_positions, vocab_size)
    sources = find_sources(Path(path), glob)
    forced = None if format == "auto" else cast(FormatName, format)
    store: TokenStore
    if forced == "tokens" or (forced is None and sources.container == "tokens"):
        tokens = PretokenizedTokens(sources, vocab_size or _size_of(tokenizer))
        store, detected = tokens, _detect_tokens(tokens, sources, tokenizer, forced=forced is not None)
    elif sources.container == "tokens":
        raise ConfigError(f"{path}: {sources.files[0].path.name} holds tokens, not format {format!r}")
    elif tokenizer is None:
        raise ConfigError(f"{path} is not pre-tokenised, so it needs a tokenizer")
    else:
        reader = DocumentReader(sources, forced, text_field)
        store = _open_cached(reader, tokenizer, Path(cache_dir), requested=format, eos=eos, progress=progress)
        detected = store.detected
    with ExitStack() as unless_used:
        unless_used.callback(store.close)
        _check_ids(detected, vocab_size)
        layout: PackedLayout = (
            Packed(store, seq_len) if pack else OnePerDocument(store, seq_len, _pad_id(tokenizer))
        )
        unless_used.pop_all()
        return PackedDataset(store, layout, detected, seq_len=seq_len, seed=seed)


def _check_limits(
    tokenizer: "PreTrainedTokenizerBase | None",
    format: str,
    seq_len: int,
    max_positions: int | None,
    vocab_size: int | None,
) -> None:
    if format not in FORMATS:
        raise ConfigError(f"unknown data format {format!r}; known are {', '.join(FORMATS)}")
    if seq_len < 2:
        raise ConfigError(
            f"seq_len must be at least 2 (the first token of a sequence is no target), got {seq_len}"
        )
    if max_positions is not None and seq_len > max_positions:
        raise ConfigError(
            f"seq_len {seq_len} is longer than the {max_positions} positions of the model; lower seq_len"
        )
    if vocab_size is not None and tokenizer is not None and len(tokenizer) > vocab_size:
        raise DataError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {vocab_size} rows; "
            "use the tokenizer of the model, or a model with a larger embedding"
        )


def _check_ids(detected: Detected, vocab_size: int | None) -> None:
    """Check the ids themselves: a tokenizer may number its tokens with gaps."""
    if vocab_size is not None and detected.max_token_id >= vocab_size:
        raise DataError(
            f"token id {detected.max_token_id} is outside the {vocab_size} rows of the model's embedding"
        )


def _size_of(tokenizer: "PreTrainedTokenizerBase | None") -> int:
    if tokenizer is None:
        raise ConfigError(
            "pre-tokenised data needs vocab_size or a tokenizer, to tell its type and check its ids"
        )
    return len(tokenizer)


def _open_cached(
    reader: DocumentReader,
    tokenizer: "PreTrainedTokenizerBase",
    cache_dir: Path,
    *,
    requested: str,
    eos: bool,
    progress: Progress | None,
) -> CachedTokens:
    masked = reader.detect() != "text"
    encoder = Encoder(tokenizer, eos=eos, masked=masked)
    if _mask_source(reader.detect(), encoder) == "fallback template":
        logger.warning("the tokenizer has no chat template; conversations are written with a plain one")
    options: dict[str, object] = {"format": requested, "text_field": reader.text_field, "eos": eos}
    entry = cache_dir / fingerprint(reader.sources, encoder.fingerprint(), options)
    if (entry / "index.json").exists():
        logger.info("reusing tokenised data in %s", entry)
        return CachedTokens(entry)
    with new_entry(entry) as directory, ExitStack() as files:
        writer = TokenWriter(directory, masked=masked, files=files)
        for encoded_batch in _encoded_ahead(encoder, reader):
            for encoded in encoded_batch:
                writer.append(encoded)
            if progress is not None:
                progress(reader.bytes_read, reader.sources.num_bytes)
        writer.sync()
        write_index(directory, _detect(reader, writer, encoder, tokenizer, forced=requested != "auto"))
    trim()  # glibc keeps 10 to 20 MiB of what the threads of the tokenizer freed
    return CachedTokens(entry)


def _encoded_ahead(encoder: Encoder, reader: DocumentReader) -> Iterator[list[Encoded]]:
    """Yield the batches of a data set as tokens, in order.

    1. a thread hands a batch to the tokenizer, whose own threads then have it, and every core;
    2. meanwhile this one makes arrays of the batch before, lets it be written, and reads the next one;
    3. which is handed over as soon as the tokenizer is done.

    Two batches are in the making at a time; an error of one is raised where it would be yielded.
    """
    with ThreadPoolExecutor(1, "outsize-encode") as ahead:
        pending: Future[Tokenized] | None = None
        for batch in batches(reader.documents()):
            following = ahead.submit(encoder.tokenize, batch)
            if pending is not None:
                yield encoder.finish(pending.result())
            pending = following
        if pending is not None:
            yield encoder.finish(pending.result())


def _detect(
    reader: DocumentReader,
    writer: TokenWriter,
    encoder: Encoder,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    forced: bool,
) -> Detected:
    where = reader.sources.files[0].path
    if not writer.num_tokens:
        raise DataError(f"{where}: the data set is empty ({len(reader.sources.files)} files, no text)")
    if not writer.num_trained:
        raise DataError(f"{where}: no token is trained: no completion or assistant message holds text")
    ids, trained = writer.first_document()
    return Detected(
        format=reader.detect(),
        forced=forced,
        fields=reader.fields,
        mask_source=_mask_source(reader.detect(), encoder),
        num_files=reader.num_files,
        num_skipped_files=reader.num_skipped_files,
        num_documents=writer.num_documents,
        num_empty=reader.num_empty,
        num_tokens=writer.num_tokens,
        num_trained_tokens=writer.num_trained,
        max_token_id=writer.max_token_id,
        example=render_example(tokenizer, ids.tolist(), None if trained is None else trained.tolist()),
    )


def _mask_source(format_name: FormatName, encoder: Encoder) -> str:
    if format_name in ("messages", "sharegpt"):
        return encoder.chat.mask_source
    return "all tokens" if format_name == "text" else "after the prompt"


def _detect_tokens(
    tokens: PretokenizedTokens, sources: Sources, tokenizer: "PreTrainedTokenizerBase | None", *, forced: bool
) -> Detected:
    first = tokens.read(0, min(EXAMPLE_TOKENS, tokens.num_tokens)).tolist()
    if tokenizer is not None:
        example = render_example(tokenizer, first, None)
    else:
        example = " ".join(map(str, first[:_EXAMPLE_IDS]))
    return Detected(
        format="tokens",
        forced=forced,
        fields=(tokens.dtype.name,),
        mask_source="all tokens",
        num_files=len(sources.files),
        num_skipped_files=sources.num_skipped,
        num_documents=None,
        num_empty=0,
        num_tokens=tokens.num_tokens,
        num_trained_tokens=tokens.num_tokens,
        max_token_id=tokens.max_token_id,
        example=example,
    )


def _pad_id(tokenizer: "PreTrainedTokenizerBase | None") -> int:
    """Return the id that fills padded rows; any will do, it is masked and no target."""
    for token_id in () if tokenizer is None else (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0
