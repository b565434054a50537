"""Layouts of sequences: whole documents packed together, mixtures of sources, and order within windows.

A document goes where it leaves the least room, the longest documents first (best fit decreasing), so that little is
padding. What of a sequence stays empty is a document of its own as far as positions tell, and no target.

Sequence g of an epoch is one of window ``g div W``, which holds W sequences of the data. Which one, a permutation of
the window says; the number of the window, the epoch and the seed decide it. So the first window trains while the next
ones are tokenised, and a resumed run sees what an uninterrupted one would have seen. The last window of an epoch may be
shorter.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray

from outsize.data.batch import IGNORED, Batch, SeededPermutation
from outsize.data.packed_dataset import NUM_COMPARED, DocumentLayout, Packed, PackedDataset, PackedLayout
from outsize.data.survey import Detected, KeptTokens, document_parts, targets_of
from outsize.data.token_cache import GrowingTokens
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


# Windows of an epoch have permutations of their own, and so have epochs: more windows than an epoch has.
_WINDOWS = 2**40


class WindowedDataset(PackedDataset):
    """A data set whose order is drawn window by window.

    Args:
        layout: one stream of documents, of which more may still come.
        detected: what was found so far.
        seed: of the order within windows.
        window: sequences of a window.
        num_bytes: of the files, which tell these data from others.
    """

    def __init__(
        self,
        layout: Packed,
        detected: Detected,
        *,
        seed: int,
        window: int,
        num_bytes: int,
    ) -> None:
        super().__init__(layout, detected, seq_len=layout.seq_len, seed=seed)
        self._store, self._window, self._num_bytes = layout.store, window, num_bytes
        # What was found may be of the first documents.
        self._is_whole = self._store.reach(0) == detected.num_tokens
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def describe(self, tokens: KeptTokens | None = None) -> str:
        """Return what a command prints of the data: what was found so far."""
        more = "\n  the rest is tokenised while the run trains (data.window)"
        return f"{super().describe(tokens)}{'' if self._is_whole else more}"

    def kept(self) -> KeptTokens:
        """Return what of the data is in sequences: what was known when the first window was there."""
        if self._is_whole:
            return super().kept()
        detected = self.detected
        assert detected.num_trained_tokens is not None
        return KeptTokens(num_tokens=detected.num_tokens, num_trained=detected.num_trained_tokens)

    def identity(self) -> dict[str, object]:
        """Return what tells these sequences from others: the window, bytes of files, and a hash of the first ones."""
        total = self._reach(self._window)
        count = min(self._window, NUM_COMPARED) if total is None else min(self._window, NUM_COMPARED, total)
        return {
            "sequences_per_epoch": None,
            "sequences_per_window": self._window,
            "source_bytes": self._num_bytes,
            "digest": self._digest(np.arange(count)),
        }

    def epoch(self, step: int, num_sequences: int) -> float | None:
        """Return how many times the data was used before ``step``; None while nobody knows how much there is."""
        return None if self._store.reach(0) is None else super().epoch(step, num_sequences)

    def num_made(self) -> int:
        """Return how many tokens are there, of data that are tokenised meanwhile."""
        return self._store.num_made if isinstance(self._store, GrowingTokens) else 0

    def stop(self) -> None:
        """Let go whoever waits for data; what is not tokenised now will not be."""
        if isinstance(self._store, GrowingTokens):
            self._store.stop()

    def _reach(self, num_sequences: int) -> int | None:
        """Wait for so many sequences, or for the last; returns how many there are in all, None where more come."""
        total = self._store.reach(num_sequences * self.seq_len)
        return None if total is None else total // self.seq_len

    def _drawn(self, run_positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        total = self._reach((int(run_positions[-1]) // self._window + 1) * self._window)
        epochs, places = np.zeros_like(run_positions), run_positions
        if total is not None:
            epochs, places = np.divmod(run_positions, total)
        numbers = epochs * _WINDOWS + places // self._window
        indices = np.empty_like(places)
        for number in np.unique(numbers).tolist():
            here, first = numbers == number, number % _WINDOWS * self._window
            size = self._window if total is None else min(self._window, total - first)
            indices[here] = first + self._order_of(number, size)[places[here] - first]
        return indices, epochs

    def _order_of(self, number: int, size: int) -> NDArray[np.int64]:
        """Return the order of a window of an epoch; several threads may work out the same one."""
        cached = self._order
        if cached is None or cached[0] != number:
            order = SeededPermutation(size, self._seed, number)(np.arange(size, dtype=np.int64))
            self._order = cached = number, order
        return cached[1]
