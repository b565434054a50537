"""Opening a data set: find, detect, tokenise or reuse, lay out."""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from outsize.choices import DataFormat, Packing
from outsize.data.chat.chat_forms import reply_end
from outsize.data.encode import Encoded, Encoder, Tokenized, batches
from outsize.data.layouts import DocumentPacks, HeldPart, Mixed, WindowedDataset
from outsize.data.packed_dataset import OnePerDocument, Packed, PackedDataset, PackedLayout
from outsize.data.reading.corpus_files import DEFAULT_TEXT_FIELD, Corpus, Sources, find_sources
from outsize.data.reading.documents import DocumentReader
from outsize.data.reading.formats import FORMATS
from outsize.data.survey import EXAMPLE_TOKENS, Detected, render_example
from outsize.data.token_cache import (
    CachedTokens,
    GrowingTokens,
    TokenWriter,
    Told,
    fingerprint,
    new_entry,
    whole_entry,
    write_index,
)
from outsize.data.tokens import PretokenizedTokens, TokenStore
from outsize.errors import ConfigError, DataError
from outsize.runtime.device.heap import trim

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int], None]
logger = logging.getLogger(__name__)

_EXAMPLE_IDS = 32


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """What a model takes.

    Attributes:
        max_positions: tokens of the longest sequence; None where nothing limits them.
        vocab_size: rows of the embedding; None where that is not known.
    """

    max_positions: int | None = None
    vocab_size: int | None = None


def open_data(
    source: str | Path | Corpus | Sequence[Corpus],
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    seq_len: int,
    cache_dir: str | Path,
    seed: int = 0,
    pack: Packing = "stream",
    template: str | None = None,
    limits: ModelLimits = ModelLimits(),
    progress: Progress | None = None,
    window: int | None = None,
) -> PackedDataset:
    """Open a data set for causal language model training, tokenising it first unless that was done before.

    Args:
        source: a file or a directory (text, JSON lines, a JSON array, CSV, TSV, Parquet, ``.npy`` or ``.bin`` tokens;
            all but the last three plain or compressed), or one or several of them and how they are read.
        tokenizer: the model's tokenizer; pre-tokenised data needs none.
        seq_len: tokens per sequence.
        cache_dir: where tokenised data is kept, one directory per source, tokenizer and options.
        seed: of the order of sequences.
        pack: how documents become sequences: ``stream``, end to end; ``documents``, several whole ones kept apart; or
            ``none``, one per sequence, cut or padded.
        template: of conversations, see `ChatTemplate`.
        limits: what the model takes.
        progress: called with (bytes of a source's files read, bytes in all) while tokenising.
        window: draw the order within windows of so many sequences, and return when the first is tokenised; None draws
            it over all of them. Of one source that is packed as a stream.

    Raises:
        ConfigError: a value that cannot be, e.g. ``seq_len`` above ``max_positions``.
        DataError: data that is empty, malformed, or does not fit the model; with file and line where there is one.
        StorageError: the cache cannot be written.
    """
    source = Corpus(path=source) if isinstance(source, str | Path) else source
    corpora = [source] if isinstance(source, Corpus) else source
    _check_limits(corpora, seq_len, limits)
    if window and (pack != "stream" or len(corpora) > 1 or corpora[0].split or corpora[0].weight != 1):
        raise ConfigError("data.window: only one source, all of it, with data.pack: stream has windows")
    first = None if window is None else window * seq_len
    making = Making(tokenizer, Path(cache_dir), template, limits.vocab_size, progress, first)
    with ExitStack() as unless_used:
        layouts, detections = list[PackedLayout](), list[Detected]()
        for corpus in corpora:
            store, detected = making.open(corpus)
            unless_used.callback(store.close)
            _check_ids(detected.max_token_id, limits.vocab_size, tokenizer)
            pad_id = _pad_id(tokenizer, limits.vocab_size)
            layout = _laid_out(store, pack, seq_len, detected.num_trained_tokens, pad_id)
            layouts.append(_part_of(layout, corpus, seed))
            detections.append(detected)
        is_plain = len(layouts) == 1 and corpora[0].weight == 1
        combined = layouts[0] if is_plain else Mixed(layouts, [corpus.weight for corpus in corpora], seed)
        unless_used.pop_all()
        if window is None:
            return PackedDataset(combined, detections, seq_len=seq_len, seed=seed)
        assert isinstance(combined, Packed)
        num_bytes = find_sources(Path(corpora[0].path), corpora[0].glob).num_bytes
        return WindowedDataset(combined, detections[0], seed=seed, window=window, num_bytes=num_bytes)


def _laid_out(
    store: TokenStore, pack: Packing, seq_len: int, num_trained: int | None, pad_id: int
) -> PackedLayout:
    """Return the sequences that documents become."""
    if pack == "stream":
        return Packed(store, seq_len, num_trained)
    layout = DocumentPacks if pack == "documents" else OnePerDocument
    return layout(store, seq_len, pad_id)


def _part_of(layout: PackedLayout, corpus: Corpus, seed: int) -> PackedLayout:
    """Return what of a source's sequences is meant: all, those that are held out, or the rest."""
    if not corpus.split:
        return layout
    count = max(1, round(corpus.split * layout.num_sequences))
    if count >= layout.num_sequences:
        raise DataError(
            f"{corpus.path}: of {layout.num_sequences} sequences eval.split={corpus.split:g} would hold out all; use "
            "more data, a smaller data.seq_len, or eval.data"
        )
    if corpus.held:
        return HeldPart(layout, 0, count, seed)
    return HeldPart(layout, count, layout.num_sequences - count, seed)


@dataclass(frozen=True)
class Making:
    """Opens the stores of sources that are tokenised alike; attributes are arguments of `open_data`."""

    tokenizer: "PreTrainedTokenizerBase | None"
    cache_dir: Path
    template: str | None
    vocab_size: int | None
    progress: Progress | None
    first_tokens: int | None

    def open(self, corpus: Corpus) -> tuple[TokenStore, Detected]:
        """Return the tokens of a source, and what was found in the source."""
        sources = find_sources(Path(corpus.path), corpus.glob, measured=corpus.measured)
        forced = None if corpus.format == "auto" else cast(DataFormat, corpus.format)
        if forced == "tokens" or (forced is None and sources.container == "tokens"):
            tokens = PretokenizedTokens(sources, self.vocab_size or _size_of(self.tokenizer))
            return tokens, _detect_tokens(tokens, sources, self.tokenizer, forced=forced is not None)
        if sources.container == "tokens":
            raise ConfigError(
                f"{corpus.path}: {sources.files[0].path.name} holds tokens, not format {corpus.format!r}"
            )
        if self.tokenizer is None:
            raise ConfigError(f"{corpus.path} is not pre-tokenised, so it needs a tokenizer")
        store = self._cached(DocumentReader(sources, forced, corpus), self.tokenizer)
        try:
            store.reach(self.first_tokens or 0)
            return store, store.detected
        except BaseException:  # a thread may be writing
            store.close()
            raise

    def _cached(
        self, reader: DocumentReader, tokenizer: "PreTrainedTokenizerBase"
    ) -> CachedTokens | GrowingTokens:
        encoder = Encoder(
            tokenizer,
            eos=True,
            masked=reader.detect() != "text",
            template=self.template,
            forgive=reader.forgive,
        )
        options = {**reader.corpus.options(), "eos": True}
        entry = self.cache_dir / fingerprint(reader.sources, encoder.fingerprint(), options)
        cached = whole_entry(entry)
        if cached is not None:
            logger.info("reusing tokenised data in %s", entry)
            return cached
        if self.first_tokens is not None:
            return GrowingTokens(lambda listener: self._write(entry, reader, encoder, tokenizer, listener))
        self._write(entry, reader, encoder, tokenizer, lambda *_: None)
        return CachedTokens(entry)

    def _write(
        self,
        entry: Path,
        reader: DocumentReader,
        encoder: Encoder,
        tokenizer: "PreTrainedTokenizerBase",
        listener: Told,
    ) -> Detected:
        """Tokenise all documents into ``entry``, and return what was found."""
        with new_entry(entry) as directory, ExitStack() as opened:
            writer = TokenWriter(directory, masked=reader.detect() != "text", opened=opened)

            def detect() -> Detected:
                return _detect(reader, writer, encoder, tokenizer)

            num_documents = 0
            for encoded_batch in _encoded_ahead(encoder, reader):
                for encoded in encoded_batch:
                    writer.append(encoded)
                    where = f"{reader.corpus.path}, document {num_documents + 1}: "
                    _check_ids(writer.max_token_id, self.vocab_size, tokenizer, where)
                    num_documents += encoded.closes
                if self.progress is not None:
                    self.progress(reader.bytes_read, reader.sources.num_bytes)
                writer.check_room(reader.bytes_read, reader.sources.num_bytes)
                listener(directory, writer, detect)
            writer.sync()
            detected = detect()
            write_index(directory, detected)
        trim()  # glibc keeps 10 to 20 MiB of what the threads of the tokenizer freed
        return detected


def _check_limits(corpora: Sequence[Corpus], seq_len: int, limits: ModelLimits) -> None:
    unknown = next((corpus.format for corpus in corpora if corpus.format not in ("auto", *FORMATS)), None)
    if unknown is not None:
        raise ConfigError(f"unknown data format {unknown!r}; known are auto, {', '.join(FORMATS)}")
    if seq_len < 2:
        raise ConfigError(
            f"seq_len must be at least 2 (the first token of a sequence is no target), got {seq_len}"
        )
    if limits.max_positions is not None and seq_len > limits.max_positions:
        raise ConfigError(
            f"seq_len {seq_len} is longer than the {limits.max_positions} positions of the model; lower seq_len"
        )


def _check_ids(
    max_token_id: int, vocab_size: int | None, tokenizer: "PreTrainedTokenizerBase | None", where: str = ""
) -> None:
    """Check the ids themselves: a tokenizer may number its tokens with gaps, and know some that have no row."""
    if vocab_size is None or max_token_id < vocab_size:
        return
    name = "" if tokenizer is None else f" ({tokenizer.convert_ids_to_tokens(max_token_id)!r})"
    advice = (
        "" if tokenizer is None else "; use the tokenizer of the model, or a model with a larger embedding"
    )
    raise DataError(
        f"{where}token id {max_token_id}{name} is outside the {vocab_size} rows of the model's embedding{advice}"
    )


def _size_of(tokenizer: "PreTrainedTokenizerBase | None") -> int:
    if tokenizer is None:
        raise ConfigError(
            "pre-tokenised data needs vocab_size or a tokenizer, to tell its type and check its ids"
        )
    return len(tokenizer)


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
) -> Detected:
    where, bad = reader.sources.files[0].path, reader.bad
    if not writer.num_tokens:
        left_out = f", {bad.count} malformed records, such as {bad.messages[0]}" if bad.count else ""
        raise DataError(
            f"{where}: the data set is empty ({len(reader.sources.files)} files, no text{left_out}); name one with "
            "text in it"
        )
    if not writer.num_trained:
        raise DataError(f"{where}: no token is trained: no completion or assistant message holds text")
    ids, trained = writer.first_document()
    mask_source = encoder.chat.mask_source if reader.num_conversations else "after the prompt"
    if reader.detect() == "text" or reader.corpus.train_on == "all":
        mask_source = "all tokens"
    return Detected(
        format=reader.detect(),
        forced=reader.corpus.format != "auto",
        fields=reader.fields,
        mask_source=mask_source,
        num_files=reader.num_files,
        num_skipped_files=reader.num_skipped_files,
        num_documents=writer.num_documents,
        num_empty=reader.num_empty,
        num_bad=bad.count,
        bad=tuple(bad.messages),
        notes=(*reader.notes(), *_without_effect(reader, encoder)),
        num_untrained=writer.num_untrained,
        num_tokens=writer.num_tokens,
        num_trained_tokens=writer.num_trained,
        max_token_id=writer.max_token_id,
        template=encoder.chat.written,
        reply_end=reply_end(encoder.chat.render) if reader.num_conversations else "",
        example=render_example(tokenizer, ids.tolist(), None if trained is None else trained.tolist()),
    )


def _without_effect(reader: DocumentReader, encoder: Encoder) -> Iterator[str]:
    """Yield a line for each setting that is for records of another kind than there are."""
    corpus, is_text = reader.corpus, reader.detect() == "text"
    if reader.sources.container in ("text", None):
        return  # which the configuration says by itself
    if is_text and corpus.train_on != "replies":
        yield "data.train_on has no effect: the records are texts, of which every token is trained"
    if not is_text and corpus.format == "auto" and corpus.text_field != DEFAULT_TEXT_FIELD:
        yield f"data.text_field has no effect: no record has the field {corpus.text_field!r}"
    for key, is_given in (("roles", corpus.roles), ("template", encoder.has_named_template)):
        if is_given and not reader.num_conversations:
            yield f"data.{key} has no effect: no record is a conversation"


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
        notes=() if sources.note is None else (sources.note,),
        num_tokens=tokens.num_tokens,
        num_trained_tokens=tokens.num_tokens,
        max_token_id=tokens.max_token_id,
        example=example,
    )


def _pad_id(tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int | None) -> int:
    """Return the id that fills padded rows; any will do, it is masked and no target."""
    for token_id in () if tokenizer is None else (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None and (vocab_size is None or token_id < vocab_size):
            return int(token_id)
    return 0
