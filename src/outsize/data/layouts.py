"""Layouts of sequences: whole documents packed together, and mixtures of sources.

A document goes where it leaves the least room, the longest documents first (best fit decreasing), so that little is
padding. What of a sequence stays empty is a document of its own as far as positions tell, and no target.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray

from outsize.data.batch import IGNORED, Batch, SeededPermutation
from outsize.data.packed_dataset import DocumentLayout, PackedLayout
from outsize.data.survey import KeptTokens, document_parts, targets_of
from outsize.data.tokens import TokenStore


class DocumentPacks(DocumentLayout):
    """Whole documents, several to a sequence; one that is longer than a sequence goes on in others, as a new document.

    Where they lie takes 12 bytes of host memory per document. Arguments and errors are those of `DocumentLayout`.
    """

    def __init__(self, store: TokenStore, seq_len: int, pad_id: int) -> None:
        super().__init__(store, seq_len, pad_id)
        starts, lengths, _ = map(np.concatenate, zip(*document_parts(store, seq_len), strict=True))
        sequences = best_fit(lengths, seq_len)
        order = np.argsort(sequences, kind="stable")
        self._starts, self._lengths = starts[order], lengths[order].astype(np.int32)
        self._ends = np.cumsum(np.bincount(sequences))
        self.num_sequences = len(self._ends)

    def batch(self, indices: NDArray[np.int64], _: NDArray[np.int64] | None = None) -> Batch:
        """Return the sequences of these numbers, the same in every epoch."""
        ids, labels = self._empty(len(indices))
        positions = np.empty_like(ids)
        for row, index in enumerate(indices.tolist()):
            end = 0
            for part in range(self._ends[index - 1] if index else 0, self._ends[index]):
                begin, end = end, end + int(self._lengths[part])
                self._put(ids[row, begin:end], labels[row, begin:end], int(self._starts[part]))
                labels[row, begin] = IGNORED  # or the document before would be trained to go on with this one
                positions[row, begin:end] = np.arange(end - begin)
            positions[row, end:] = np.arange(self._seq_len - end)
        return Batch(
            torch.from_numpy(ids), torch.from_numpy(labels), position_ids=torch.from_numpy(positions)
        )

    def kept(self) -> KeptTokens:
        """Return what of the data is in sequences: all of it."""
        num_tokens, room = int(self._lengths.sum()), self.num_sequences * self._seq_len
        documents, targets = map(np.concatenate, zip(*self.documents(), strict=True))
        return KeptTokens(
            num_documents=self._store.num_documents,
            num_split=int((documents > self._seq_len).sum()),
            longest=int(documents.max()),
            num_tokens=num_tokens,
            num_trained=int(targets.sum()),
            num_padding=room - num_tokens,
            padding_saved=len(self._lengths) * self._seq_len - room,
        )

    def documents(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield lengths of documents and their targets; where a document goes on its first token is none."""
        for starts, lengths, counts in document_parts(self._store, self._seq_len):
            owners = np.repeat(np.arange(len(counts)), counts)
            targets = targets_of(self._store, starts, lengths)
            sizes, trained = (np.bincount(owners, each, len(counts)) for each in (lengths, targets))
            yield sizes.astype(np.int64), trained.astype(np.int64)


def best_fit(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return for each item the number of the bin that it goes to, best fit decreasing.

    Items of equal length are placed together: what the packing costs grows with the number of lengths that there are,
    and hardly with that of items.

    Args:
        lengths: of the items, at least 1 and at most ``capacity``.
        capacity: of each bin.
    """
    bins = np.empty(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    ends = np.flatnonzero(np.diff(lengths[by_length], append=0)) + 1  # where another length begins
    opened = _OpenBins()
    for equal in np.split(by_length, ends[:-1]):
        items, length = equal, int(lengths[equal[0]])
        while len(items):
            room, numbers = opened.take(length) or opened.fresh(capacity, len(items), length)
            each = room // length
            chosen = np.repeat(numbers, each)[: len(items)]
            bins[items[: len(chosen)]] = chosen
            items = items[len(chosen) :]
            full, rest = divmod(len(chosen), each)
            opened.put(room - each * length, numbers[:full])
            opened.put(room - rest * length, numbers[full : full + 1])
            opened.put(room, numbers[full + 1 :])
    return bins


class _OpenBins:
    """Numbers of the bins that have room left, by how much."""

    def __init__(self) -> None:
        self._rooms: list[int] = []  # sorted
        self._numbers: dict[int, list[NDArray[np.int64]]] = {}
        self._count = 0

    def take(self, length: int) -> tuple[int, NDArray[np.int64]] | None:
        """Return the least room for ``length`` and all bins that have that, which are open no more; None for none."""
        index = bisect_left(self._rooms, length)
        if index == len(self._rooms):
            return None
        room = self._rooms.pop(index)
        return room, np.concatenate(self._numbers.pop(room))

    def fresh(self, capacity: int, count: int, length: int) -> tuple[int, NDArray[np.int64]]:
        """Return ``capacity``, and as many empty bins as ``count`` items of ``length`` need."""
        first = self._count
        self._count += -(-count // (capacity // length))
        return capacity, np.arange(first, self._count)

    def put(self, room: int, numbers: NDArray[np.int64]) -> None:
        """Register bins by their free space."""
        if not room or not len(numbers):
            return
        if room not in self._numbers:
            insort(self._rooms, room)
        self._numbers.setdefault(room, []).append(numbers)


class Mixed:
    """Sequences of several sources, those of the first before those of the second.

    A source of N sequences and weight w gives round(w N) of them to an epoch. The source counts them on from epoch to
    epoch, so that of half a source the next epoch takes the other half.

    Args:
        layouts: the sources; closed with this.
        weights: of each, above 0.
        seed: of which part of a source an epoch takes.
    """

    def __init__(self, layouts: Sequence[PackedLayout], weights: Sequence[float], seed: int) -> None:
        self._layouts = layouts
        self.shares = [
            max(1, round(w * layout.num_sequences)) for w, layout in zip(weights, layouts, strict=True)
        ]
        self._ends = np.array(list(accumulate(self.shares)), np.int64)
        self._orders = [
            None
            if share % layout.num_sequences == 0
            else SeededPermutation(layout.num_sequences, seed, -1 - i)
            for i, (share, layout) in enumerate(zip(self.shares, layouts, strict=True))
        ]
        self.num_sequences = int(self._ends[-1])

    def batch(self, indices: NDArray[np.int64], epochs: NDArray[np.int64]) -> Batch:
        """Return the sequences of these numbers, each as the epoch of the run has it."""
        parts = [
            (rows, layout.batch(numbers, epochs[rows])) for rows, layout, numbers in self._of(indices, epochs)
        ]
        return parts[0][1] if len(parts) == 1 else _joined(parts)

    def lengths(self, indices: NDArray[np.int64], epochs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens these sequences have without padding on their right."""
        lengths = np.empty_like(indices)
        for rows, layout, numbers in self._of(indices, epochs):
            lengths[rows] = layout.lengths(numbers, epochs[rows])
        return lengths

    def _of(
        self, indices: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], PackedLayout, NDArray[np.int64]]]:
        """Yield, for each source, the rows that come from it, and which of its sequences they are."""
        owners = np.searchsorted(self._ends, indices, side="right")
        for owner in np.unique(owners).tolist():
            rows = np.flatnonzero(owners == owner)
            share, layout, order = self.shares[owner], self._layouts[owner], self._orders[owner]
            counted = epochs[rows] * share + indices[rows] - (self._ends[owner] - share)
            numbers = counted % layout.num_sequences
            yield rows, layout, numbers if order is None else order(numbers)

    def kept(self) -> KeptTokens:
        """Return what of the data is in sequences, the weights aside."""
        parts = [layout.kept() for layout in self._layouts]
        counts = [part.num_documents for part in parts]
        return KeptTokens(
            num_documents=None if None in counts else sum(count or 0 for count in counts),
            num_cut=sum(part.num_cut for part in parts),
            num_untrained=sum(part.num_untrained for part in parts),
            num_split=sum(part.num_split for part in parts),
            longest=max(part.longest for part in parts),
            num_tokens=sum(part.num_tokens for part in parts),
            num_trained=sum(part.num_trained for part in parts),
            num_padding=sum(part.num_padding for part in parts),
            padding_saved=sum(part.padding_saved for part in parts),
        )

    def documents(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield lengths of documents of all sources, and the targets that they keep, the weights aside."""
        return chain.from_iterable(layout.documents() for layout in self._layouts)

    def close(self) -> None:
        """Give the files back."""
        for layout in self._layouts:
            layout.close()


def _joined(parts: Sequence[tuple[NDArray[np.int64], Batch]]) -> Batch:
    """Return one batch of rows that several batches hold."""
    order = torch.from_numpy(np.argsort(np.concatenate([rows for rows, _ in parts])))
    names = parts[0][1].inputs  # of every one, as sources are all laid out alike
    return Batch.made_of(
        {name: torch.cat([batch.inputs[name] for _, batch in parts])[order] for name in names}
    )


class HeldPart:
    """A part of a source's sequences, drawn once from a seed: what is held out, or all the rest.

    Args:
        layout: the source; closed with this.
        first: number, in the order drawn, of the first sequence of the part.
        count: sequences of the part.
        seed: of the order.
    """

    def __init__(self, layout: PackedLayout, first: int, count: int, seed: int) -> None:
        self._layout = layout
        self._first = first
        self._order = SeededPermutation(layout.num_sequences, seed, _HELD_OUT)
        self.num_sequences = count

    def batch(self, indices: NDArray[np.int64], epochs: NDArray[np.int64]) -> Batch:
        """Return the sequences of these numbers."""
        return self._layout.batch(self._order(indices + self._first), epochs)

    def lengths(self, indices: NDArray[np.int64], epochs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens these sequences have without padding on their right."""
        return self._layout.lengths(self._order(indices + self._first), epochs)

    def kept(self) -> KeptTokens:
        """Return what of the whole source is in sequences."""
        return self._layout.kept()

    def documents(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield lengths of documents of the whole source, and the targets that they keep."""
        return self._layout.documents()

    def close(self) -> None:
        """Give the files back."""
        self._layout.close()


# Stands where epochs stand in the key of an order; no run comes so far.
_HELD_OUT = -(2**40)
