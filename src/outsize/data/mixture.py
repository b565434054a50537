"""Several sources as one: an epoch has every sequence of a source as often as the weight of the source says."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray

from outsize.data.batch import Batch, SeededPermutation
from outsize.data.packed_dataset import PackedLayout
from outsize.data.survey import KeptTokens


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
        found = np.empty_like(indices)
        for rows, layout, numbers in self._of(indices, epochs):
            found[rows] = layout.lengths(numbers, epochs[rows])
        return found

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
