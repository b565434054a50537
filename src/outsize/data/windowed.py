"""Sequences in the order of the files, drawn anew within windows: an order that needs no end of the data.

Sequence g of an epoch is one of window ``g div W``, which holds W sequences of the data. Which one, a permutation of
the window says; the number of the window, the epoch and the seed decide it. So the first window trains while the next
ones are tokenised, and a resumed run sees what an uninterrupted one would have seen. The last window of an epoch may be
shorter.
"""

import numpy as np
from numpy.typing import NDArray

from outsize.data.batch import SeededPermutation
from outsize.data.packed_dataset import NUM_COMPARED, Packed, PackedDataset
from outsize.data.survey import Detected, KeptTokens
from outsize.data.token_cache import GrowingTokens

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

    def describe(self, kept: KeptTokens | None = None) -> str:
        """Return what a command prints of the data: what was found so far."""
        more = "\n  the rest is tokenised while the run trains (data.window)"
        return f"{super().describe(kept)}{'' if self._is_whole else more}"

    def kept(self) -> KeptTokens:
        """Return what of the data is in sequences: what was known when the first window was there."""
        if self._is_whole:
            return super().kept()
        found = self.detected
        assert found.num_trained_tokens is not None
        return KeptTokens(num_tokens=found.num_tokens, num_trained=found.num_trained_tokens)

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
        known = self._order
        if known is None or known[0] != number:
            order = SeededPermutation(size, self._seed, number)(np.arange(size, dtype=np.int64))
            self._order = known = number, order
        return known[1]
