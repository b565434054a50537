"""What of the documents of a data set is trained once they are cut to the length of a sequence."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outsize.data.tokens import TokenStore
from outsize.errors import DataError

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
        kept = lengths if seq_len is None else np.minimum(lengths, seq_len)
        yield lengths, targets_of(store, starts, kept)


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
        kept = np.minimum(np.repeat(lengths, counts) - before, seq_len)
        yield np.repeat(starts, counts) + before, kept, counts


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


def targets_of(store: TokenStore, starts: NDArray[np.int64], kept: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many targets there are from the second to the last token of each part of the store."""
    if not len(starts):
        return starts
    begin, end = int(starts[0]), int(starts[-1] + kept[-1])
    if store.read_trained(0, 0) is None:
        return np.maximum(kept - 1, 0)
    if end - begin > _TOKENS:  # books
        parts = (
            store.read_trained(start, count)
            for start, count in zip(starts.tolist(), kept.tolist(), strict=True)
        )
        return np.array([0 if part is None else part[1:].sum() for part in parts], np.int64)
    trained = store.read_trained(begin, end - begin)
    assert trained is not None
    sums = np.concatenate([[0], np.cumsum(trained, dtype=np.int64)])
    stops = starts - begin + kept
    found: NDArray[np.int64] = sums[stops] - sums[np.minimum(starts - begin + 1, stops)]
    return found


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
