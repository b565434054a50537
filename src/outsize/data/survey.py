"""What a data set holds, as people check it before a run, and how much of it is trained once it is cut to sequences."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self, get_type_hints

import numpy as np
from numpy.typing import NDArray

from outsize.data.tokens import TokenStore
from outsize.errors import DataError
from outsize.units import format_count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


EXAMPLE_TOKENS = 2048
_RUN_CHARS = 400


@dataclass(frozen=True, kw_only=True)
class Detected:
    """A data set as it was understood.

    Attributes:
        format: ``text``, ``messages``, ``sharegpt``, ``prompt_completion``, ``alpaca`` or ``tokens``.
        forced: the format was given, not detected.
        fields: fields of the first record; empty for text files.
        mask_source: how the trained part was found, e.g. ``"all tokens"`` or ``"generation tags"``.
        num_files: files read.
        num_skipped_files: files of the directory left out.
        num_documents: documents; ``None`` where their bounds are not known.
        num_empty: records without text, left out.
        num_bad: malformed records, left out.
        bad: what was wrong with the first of them.
        notes: what of the files and records was not used: other splits, fields that nothing reads.
        num_untrained: documents of which nothing is trained.
        num_tokens: tokens, special ones included.
        num_trained_tokens: tokens that are targets.
        max_token_id: the largest token id that occurs.
        template: the chat template that conversations were written with; None for the tokenizer's own, or without any.
        reply_end: what ends a reply of a conversation, as the template writes it; nothing where nothing does.
        example: the first document as the model sees it; ``>>...<<`` around what is trained where not all is.
    """

    format: str
    forced: bool
    fields: tuple[str, ...]
    mask_source: str
    num_files: int
    num_skipped_files: int
    num_documents: int | None
    num_empty: int
    num_bad: int = 0
    bad: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    num_untrained: int = 0
    num_tokens: int
    num_trained_tokens: int
    max_token_id: int
    template: str | None = None
    reply_end: str = ""
    example: str

    @property
    def trained_share(self) -> float:
        """Share of tokens that are targets, 0 to 1."""
        return self.num_trained_tokens / self.num_tokens if self.num_tokens else 0.0

    def describe(self) -> str:
        """Return the lines that a command prints."""
        how = "given" if self.forced else "detected"
        fields = f", fields {', '.join(self.fields)}" if self.fields else ""
        documents = "" if self.num_documents is None else f"{_plural(self.num_documents, 'document')}, "
        left_out = ", ".join(
            _plural(count, noun)
            for count, noun in (
                (self.num_skipped_files, "other file"),
                (self.num_empty, "empty record"),
                (self.num_bad, "malformed record"),
            )
            if count
        )
        count = self.num_untrained
        untrained = f"  {_plural(count, 'document')} with nothing to train\n" if count else ""
        plain = ": the tokenizer has no chat template" if self.mask_source == "fallback template" else ""
        notes = "".join(f"  {line}\n" for line in self.notes)
        bad = "".join(f"  left out: {line}\n" for line in self.bad)
        return (
            f"data: format {self.format} ({how}{fields}), {_plural(self.num_files, 'file')}"
            f"{f' (left out: {left_out})' if left_out else ''}\n"
            f"  {documents}{format_count(self.num_tokens)} tokens, {self.trained_share:.1%} trained "
            f"({self.mask_source}{plain})\n{untrained}{bad}{notes}"
        ).rstrip("\n")

    def shown(self) -> str:
        """Return the lines that show the first document."""
        return "\n".join(["  first document:", *(f"  | {line}" for line in self.example.splitlines())])

    def to_json(self) -> dict[str, Any]:
        """Return plain values; `from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return the record that `to_json` wrote.

        Raises:
            ValueError: a value is not of its kind.
            TypeError, KeyError: there are others, or fewer.
        """
        lists = {name: tuple(values[name]) for name in ("fields", "bad", "notes")}
        detected = cls(**{**values, **lists})
        for name, kind in get_type_hints(cls).items():
            value = getattr(detected, name)
            is_right = all(isinstance(v, str) for v in value) if name in lists else isinstance(value, kind)
            if not is_right or (isinstance(value, int) and name != "max_token_id" and value < 0):
                raise ValueError(f"{name} is {value!r}")
        return detected


def render_example(
    tokenizer: "PreTrainedTokenizerBase", ids: Iterable[int], trained: Iterable[bool] | None
) -> str:
    """Return tokens as text, special ones included, with ``>>...<<`` around the runs that are trained."""
    ids = list(ids)
    if trained is None:
        return _shortened(_decode(tokenizer, ids))
    runs: list[tuple[bool, list[int]]] = []
    for token, is_trained in zip(ids, trained, strict=True):
        if not runs or runs[-1][0] != bool(is_trained):
            runs.append((bool(is_trained), []))
        runs[-1][1].append(token)
    texts = [(is_trained, _shortened(_decode(tokenizer, run))) for is_trained, run in runs]
    return "".join(f">>{text}<<" if is_trained else text for is_trained, text in texts)


def _decode(tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def _shortened(text: str) -> str:
    if len(text) <= _RUN_CHARS:
        return text
    return f"{text[: _RUN_CHARS * 3 // 4]} [...] {text[-_RUN_CHARS // 4 :]}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


# Documents that are looked at together, and tokens of them that are read at once.
_DOCUMENTS = 4096
_TOKENS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class KeptTokens:
    """What is left of a data set in its sequences.

    Attributes:
        num_documents: documents; None where their bounds are not known.
        num_cut: documents that are longer than a sequence and lose their end.
        num_untrained: documents of which nothing is trained, since what would be is cut off or was never there.
        num_across: documents of which a part is in one sequence and the rest in the next, where records are packed as a
            stream.
        num_split: documents that are longer than a sequence and go on in others as new documents.
        longest: tokens of the longest document.
        num_tokens: tokens that are left.
        num_trained: of these, targets.
        num_padding: tokens of padding beside them.
        padding_saved: tokens of padding that there would be more if each document had a whole sequence of its own.
    """

    num_documents: int | None = None
    num_cut: int = 0
    num_untrained: int = 0
    num_across: int = 0
    num_split: int = 0
    longest: int = 0
    num_tokens: int
    num_trained: int
    num_padding: int = 0
    padding_saved: int = 0

    def lines(self, seq_len: int) -> list[str]:
        """Return what to tell people: nothing where no document loses its end or is split, and nothing is padded."""
        return [*self._padding(seq_len), *self._split(seq_len), *self._cut(seq_len)]

    def _padding(self, seq_len: int) -> list[str]:
        """Say what share of sequences is padding, and what share would be with a whole sequence for each document."""
        num_all = self.num_tokens + self.num_padding
        padding = f"{self.num_padding / max(1, num_all):.1%} of the sequences is padding"
        if not self.padding_saved:
            return [padding] if self.num_padding else []
        alone = (self.num_padding + self.padding_saved) / (num_all + self.padding_saved)
        return [f"{padding}; with {seq_len} tokens for each document it would be {alone:.1%}"]

    def _split(self, seq_len: int) -> list[str]:
        """Say how many documents are split: what a part is trained on does not see the parts before."""
        if self.num_across:
            return [
                f"{self.num_across:,} of {self.num_documents:,} documents are cut where a sequence of {seq_len} tokens "
                "ends, and go on in another (data.pack=stream; with documents they stay whole)"
            ]
        if not self.num_split:
            return []
        return [
            f"{self.num_split:,} of {self.num_documents:,} documents are longer than data.seq_len={seq_len} tokens "
            f"(the longest has {self.longest:,}) and go on in other sequences as new documents"
        ]

    def _cut(self, seq_len: int) -> list[str]:
        """Say how many documents lose their end, and what is left of them."""
        if not self.num_cut:
            return []
        share = self.num_trained / max(1, self.num_tokens)
        lines = [
            f"{self.num_cut:,} of {self.num_documents:,} documents are cut at data.seq_len={seq_len} tokens "
            f"(the longest has {self.longest:,}); of what is left {share:.1%} is trained"
        ]
        if self.num_untrained:
            lines.append(f"{self.num_untrained:,} documents have nothing left to train")
        return lines

    def check(self, seq_len: int) -> None:
        """Refuse sequences without a single target: a loss of nothing is zero, and so is its gradient.

        Raises:
            DataError: nothing is left to train.
        """
        if self.num_trained:
            return
        if self.num_cut:
            raise DataError(
                f"no token is trained: what would be is cut off. {self.num_cut:,} of {self.num_documents:,} documents "
                f"are longer than data.seq_len={seq_len} tokens; raise data.seq_len (the longest has "
                f"{self.longest:,}), or set data.pack to stream or documents"
            )
        raise DataError("no token is trained: the sequences hold no token that the loss would be a mean over")


def kept_documents(
    store: TokenStore, seq_len: int | None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield, for blocks of documents in order, their lengths and how many targets each keeps.

    The first token of a sequence is no target, since nothing comes before it.

    Args:
        store: with bounds of documents.
        seq_len: tokens at which a document is cut; None cuts none.
    """
    for starts, lengths in _documents(store):
        cut_lengths = lengths if seq_len is None else np.minimum(lengths, seq_len)
        yield lengths, targets_of(store, starts, cut_lengths)


def document_parts(
    store: TokenStore, seq_len: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Yield, for blocks of documents in order, what is there once they are split every ``seq_len`` tokens.

    Of the parts that is where each begins, and its length; of the documents, how many parts each has.
    """
    for starts, lengths in _documents(store):
        counts = -(-lengths // seq_len)
        numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        before = numbers * seq_len
        part_lengths = np.minimum(np.repeat(lengths, counts) - before, seq_len)
        yield np.repeat(starts, counts) + before, part_lengths, counts


def num_across(store: TokenStore, seq_len: int) -> int:
    """Return how many documents of a stream lie in more sequences than one."""
    blocks = _documents(store)
    return sum(
        int((starts // seq_len != (starts + lengths - 1) // seq_len).sum()) for starts, lengths in blocks
    )


def _documents(store: TokenStore) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield, for blocks of documents in order, where they begin, and their lengths."""
    assert store.num_documents is not None
    begin = 0
    for first in range(0, store.num_documents, _DOCUMENTS):
        ends = store.document_ends(first, min(_DOCUMENTS, store.num_documents - first))
        lengths = np.diff(ends, prepend=begin)
        yield ends - lengths, lengths
        begin = int(ends[-1])


def targets_of(store: TokenStore, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many targets there are from the second to the last token of each part of the store."""
    if not len(starts):
        return starts
    begin, end = int(starts[0]), int(starts[-1] + lengths[-1])
    if store.read_trained(0, 0) is None:
        return np.maximum(lengths - 1, 0)
    if end - begin > _TOKENS:  # books
        parts = (
            store.read_trained(start, count)
            for start, count in zip(starts.tolist(), lengths.tolist(), strict=True)
        )
        return np.array([0 if part is None else part[1:].sum() for part in parts], np.int64)
    trained = store.read_trained(begin, end - begin)
    assert trained is not None
    sums = np.concatenate([[0], np.cumsum(trained, dtype=np.int64)])
    stops = starts - begin + lengths
    targets: NDArray[np.int64] = sums[stops] - sums[np.minimum(starts - begin + 1, stops)]
    return targets


class Bucket(NamedTuple):
    """Documents of about one length.

    Attributes:
        most_tokens: tokens of the longest, a power of two.
        num_documents: that have more tokens than half of that, and not more than that.
        num_trained: tokens of them that are targets.
    """

    most_tokens: int
    num_documents: int
    num_trained: int


def histogram(documents: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> list[Bucket]:
    """Return how many documents there are of which length, the shortest first, from what `kept_documents` yields."""
    counts: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
    for lengths, trained in documents:
        powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
        for power in np.unique(powers).tolist():
            here = powers == power
            counts[power][0] += int(here.sum())
            counts[power][1] += int(trained[here].sum())
    return [Bucket(1 << power, *counts[power]) for power in sorted(counts)]


def survey_cut(store: TokenStore, seq_len: int) -> KeptTokens:
    """Return what is left of documents that are cut at ``seq_len`` tokens."""
    num_cut = num_untrained = longest = num_tokens = num_trained = 0
    for lengths, trained in kept_documents(store, seq_len):
        num_cut += int((lengths > seq_len).sum())
        num_untrained += int((trained == 0).sum())
        longest = max(longest, int(lengths.max()))
        num_tokens += int(np.minimum(lengths, seq_len).sum())
        num_trained += int(trained.sum())
    return KeptTokens(
        num_documents=store.num_documents,
        num_cut=num_cut,
        num_untrained=num_untrained,
        longest=longest,
        num_tokens=num_tokens,
        num_trained=num_trained,
        num_padding=(store.num_documents or 0) * seq_len - num_tokens,
    )
