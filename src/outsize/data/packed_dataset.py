"""Sequences of equal length out of stored tokens, and batches as a pure function of the step.

Sequences are numbered without end: sequence g of the run is sequence ``permutation(g mod N)`` of epoch ``g div N``, N
the sequences in the data. Step s takes sequences ``s * n`` to ``s * n + n - 1``. So a run resumed at step k sees what
an uninterrupted run would have seen, with no state to save, and every sequence is used once per epoch.

Sequences that are padded may be grouped by length, as transformers' ``LengthGroupedSampler`` does: in runs of up to 50
batches the longest come first, so that those of a batch are about as long, and columns of nothing but padding are cut.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from outsize.data.batch import IGNORED, Batch, Masker, RecycledArrays, SeededPermutation
from outsize.data.survey import (
    Bucket,
    Detected,
    KeptTokens,
    histogram,
    kept_documents,
    num_across,
    survey_cut,
)
from outsize.data.tokens import TokenStore
from outsize.errors import Closing, ConfigError, DataError

# Positions whose order is worked out at once: 32 KiB of numbers.
_BLOCK = 4096
# Batches that are sorted by length together, unless an epoch has fewer than four times as many: those of transformers.
_MEGABATCH = 50
# Sequences that are looked at to tell a data set from another.
NUM_COMPARED = 64


class PackedLayout(Protocol):
    """How stored tokens are laid out in sequences."""

    @property
    def num_sequences(self) -> int:
        """Sequences per epoch."""

    def batch(self, indices: NDArray[np.int64], epochs: NDArray[np.int64]) -> Batch:
        """Return the sequences of these numbers, each as the epoch of the run has it, from 0."""

    def lengths(self, indices: NDArray[np.int64], epochs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens these sequences have without padding on their right."""

    def kept(self) -> KeptTokens:
        """Return what of the data is in sequences."""

    def documents(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield lengths of documents and the targets that they keep, see `kept_documents`; nothing without bounds."""

    def close(self) -> None:
        """Give the files back."""


class Packed:
    """Documents one after the other, cut every ``seq_len`` tokens; the remainder at the end is dropped.

    Tokens attend across the documents of their sequence; the EOS token between them is what tells them apart.

    Args:
        store: the tokens.
        seq_len: tokens of a sequence.
        num_trained: tokens of the store that are targets; None for all.

    Attributes:
        store: the tokens.
        seq_len: tokens of a sequence.
    """

    def __init__(self, store: TokenStore, seq_len: int, num_trained: int | None = None) -> None:
        self.store = store
        self.seq_len = seq_len
        self._num_trained = store.num_tokens if num_trained is None else num_trained
        self._arrays = RecycledArrays()
        total = store.reach(seq_len)
        if total is not None and total < seq_len:
            other = "" if store.num_documents is None else ", or set data.pack to documents or none"
            raise DataError(
                f"the data set holds {total} tokens, fewer than one sequence of {seq_len}; "
                f"use more data, or lower data.seq_len{other}"
            )

    @property
    def num_sequences(self) -> int:
        """Sequences per epoch."""
        return self.store.num_tokens // self.seq_len

    def batch(self, indices: NDArray[np.int64], _: NDArray[np.int64] | None = None) -> Batch:
        """Return the sequences of these numbers, the same in every epoch."""
        ids, labels = (self._arrays.take(len(indices), self.seq_len) for _ in range(2))
        starts = [index * self.seq_len for index in indices.tolist()]
        self.store.read_rows(starts, ids, labels)
        for row, start in enumerate(starts):
            trained = self.store.read_trained(start, self.seq_len)
            if trained is None:
                break  # no mask for one, no mask for any
            labels[row, ~trained] = IGNORED
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels))

    def lengths(self, indices: NDArray[np.int64], _: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens these sequences have: all the same."""
        return np.full_like(indices, self.seq_len)

    def kept(self) -> KeptTokens:
        """Return what of the data is in sequences: all but the remainder."""
        num_tokens = self.num_sequences * self.seq_len
        rest = self.store.num_tokens - num_tokens
        trained = self.store.read_trained(num_tokens, rest)
        is_masked = trained is not None and self.store.num_documents is not None
        return KeptTokens(
            num_documents=self.store.num_documents,
            num_across=num_across(self.store, self.seq_len) if is_masked else 0,
            num_tokens=num_tokens,
            num_trained=self._num_trained - int(rest if trained is None else trained.sum()),
        )

    def documents(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield lengths of documents and their targets: none is cut off, as a document goes on in the next sequence."""
        return iter(()) if self.store.num_documents is None else kept_documents(self.store, None)

    def close(self) -> None:
        """Give the files back."""
        self.store.close()


class DocumentLayout:
    """What layouts share whose documents do not go on from one sequence to the next.

    Args:
        store: the tokens, with bounds of documents.
        seq_len: tokens of a sequence.
        pad_id: fills what stays empty of a sequence.

    Raises:
        ConfigError: the tokens have no bounds of documents.
    """

    def __init__(self, store: TokenStore, seq_len: int, pad_id: int) -> None:
        if store.num_documents is None:
            raise ConfigError("data.pack: pre-tokenised data has no document bounds; set it to stream")
        self._store = store
        self._seq_len = seq_len
        self._pad_id = pad_id

    def lengths(self, indices: NDArray[np.int64], _: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens these sequences have: padding of some is as long as that of others."""
        return np.full_like(indices, self._seq_len)

    def _empty(self, num_sequences: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return ids and labels of sequences that hold nothing but padding."""
        shape = num_sequences, self._seq_len
        return np.full(shape, self._pad_id, np.int64), np.full(shape, IGNORED, np.int64)

    def _put(self, ids: NDArray[np.int64], labels: NDArray[np.int64], start: int) -> None:
        """Set ``ids`` and ``labels`` to the tokens from ``start`` on."""
        ids[:] = self._store.read(start, len(ids))
        trained = self._store.read_trained(start, len(ids))
        labels[:] = ids if trained is None else np.where(trained, ids, IGNORED)

    def close(self) -> None:
        """Give the files back."""
        self._store.close()


class OnePerDocument(DocumentLayout):
    """One document per sequence, cut at ``seq_len`` tokens, or padded on the right and masked."""

    def __init__(self, store: TokenStore, seq_len: int, pad_id: int) -> None:
        super().__init__(store, seq_len, pad_id)
        assert store.num_documents is not None
        self.num_sequences = store.num_documents

    def batch(self, indices: NDArray[np.int64], _: NDArray[np.int64] | None = None) -> Batch:
        """Return the sequences of these numbers, the same in every epoch."""
        ids, labels = self._empty(len(indices))
        mask = np.zeros_like(ids)
        for row, index in enumerate(indices.tolist()):
            ends = self._store.document_ends(max(index - 1, 0), 2 if index else 1)
            start = int(ends[0]) if index else 0
            count = min(int(ends[-1]) - start, self._seq_len)
            self._put(ids[row, :count], labels[row, :count], start)
            mask[row, :count] = 1
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels), torch.from_numpy(mask))

    def lengths(self, indices: NDArray[np.int64], _: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens these sequences have; those of all take 4 bytes of host memory each."""
        return self._lengths[indices].astype(np.int64)

    @cached_property
    def _lengths(self) -> NDArray[np.int32]:
        blocks = [np.minimum(lengths, self._seq_len).astype(np.int32) for lengths, _ in self.documents()]
        return np.concatenate(blocks)

    def kept(self) -> KeptTokens:
        """Return what of the data is in sequences: what is not cut off."""
        return survey_cut(self._store, self._seq_len)

    def documents(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield lengths of documents and the targets that they keep."""
        return kept_documents(self._store, self._seq_len)


class PackedDataset(Closing):
    """A data set ready to train on: `batch` for the data, ``detected`` for people.

    Args:
        layout: the sequences; closed with the data set.
        detected: what was found, source by source.
        seq_len: tokens per sequence.
        seed: of the order in which sequences are drawn.

    Attributes:
        found: what was found, source by source.
        detected: the first of that.
        template: the chat template that conversations were written with; None for the tokenizer's own, or without any.
        reply_end: what ends a reply, as the chat template writes it; empty where nothing does.
        seq_len: tokens per sequence.
    """

    def __init__(
        self, layout: PackedLayout, detected: Detected | Sequence[Detected], *, seq_len: int, seed: int
    ) -> None:
        self._layout = layout
        self._seed = seed
        self._group: int | None = None
        self._masker: Masker | None = None
        self._block: tuple[int, int, NDArray[np.int64]] | None = None
        self.found = [detected] if isinstance(detected, Detected) else list(detected)
        self.detected = self.found[0]
        self.template = next((each.template for each in self.found if each.template is not None), None)
        self.reply_end = next((each.reply_end for each in self.found if each.reply_end), "")
        self.seq_len = seq_len

    @cached_property
    def num_sequences(self) -> int:
        """Sequences per epoch."""
        return self._layout.num_sequences

    def grouped(self, num_sequences: int) -> Self:
        """Have batches of so many sequences hold those of like length from now on, and end with the longest of them."""
        self._group, self._block = num_sequences, None
        return self

    def masked(self, masker: Masker) -> Self:
        """Have tokens of all batches hidden from now on, and predicted."""
        self._masker = masker
        return self

    def describe(self, tokens: KeptTokens | None = None) -> str:
        """Return what a command prints of the data: what was found, and what is lost of it."""
        tokens = tokens or self.kept()
        lines = [f"  {line}" for line in tokens.lines(self.seq_len)]
        return "\n".join([*(source.describe() for source in self.found), *lines])

    def shown(self) -> str:
        """Return what a command prints of the first document of each source."""
        return "\n".join(source.shown() for source in self.found)

    def kept(self) -> KeptTokens:
        """Return what of the data is in sequences; padding is that of batches in the first epoch."""
        tokens = self._layout.kept()
        if self._group is None:
            return tokens
        num_tokens = room = 0
        for first in range(0, self.num_sequences, self._block_size):
            stop = min(first + self._block_size, self.num_sequences)
            lengths = self._layout.lengths(*self._drawn(np.arange(first, stop, dtype=np.int64)))
            starts = np.arange(0, len(lengths), self._group)
            num_tokens += int(lengths.sum())
            room += int(lengths[starts] @ np.diff(starts, append=len(lengths)))
        per_token, most = room / num_tokens, self.num_sequences * self.seq_len / num_tokens
        return replace(
            tokens,
            num_padding=round((per_token - 1) * tokens.num_tokens),
            padding_saved=round((most - per_token) * tokens.num_tokens),
        )

    def lengths(self) -> list[Bucket]:
        """Return how many documents there are of which length, the shortest first; empty where nobody knows."""
        return histogram(self._layout.documents())

    def identity(self) -> dict[str, object]:
        """Return what tells these sequences from others, wherever their files lie: how many, and a hash of some."""
        numbers = np.linspace(0, self.num_sequences - 1, min(self.num_sequences, NUM_COMPARED))
        return {
            "sequences_per_epoch": self.num_sequences,
            "digest": self._digest(numbers.astype(np.int64)),
        }

    def batch(self, step: int, num_sequences: int) -> Batch:
        """Return the batch of ``step`` (from 0); a pure function of its arguments, the data and the seed.

        The same ``num_sequences`` has to be used for all steps of a run. May be called from any thread.

        Raises:
            DataError: a file changed while it was in use, or the data set was closed.
        """
        if step < 0 or num_sequences < 1:
            raise ValueError(
                f"step must be at least 0 and num_sequences at least 1, got {step} and {num_sequences}"
            )
        first = step * num_sequences
        drawn = self._drawn(np.arange(first, first + num_sequences, dtype=np.int64))
        batch = self._layout.batch(*drawn)
        if self._group is not None:
            batch = batch.narrowed(max(2, int(self._layout.lengths(*drawn).max())))
        return (
            batch
            if self._masker is None
            else self._masker(batch, "trained", range(first, first + num_sequences))
        )

    def sequences(self, first: int, count: int) -> Batch:
        """Return ``count`` sequences from number ``first`` on, as they lie, for what is measured and not trained."""
        numbers = np.arange(first, first + count, dtype=np.int64)
        batch = self._layout.batch(numbers, np.zeros_like(numbers))
        return batch if self._masker is None else self._masker(batch, "measured", range(first, first + count))

    def epoch(self, step: int, num_sequences: int) -> float | None:
        """Return how many times the data was used before ``step``, e.g. 1.5; None where that is not known."""
        return step * num_sequences / self.num_sequences

    def num_made(self) -> int:
        """Return a number that grows while data are made that somebody may wait for."""
        return 0

    def stop(self) -> None:
        """Let go whoever waits for data."""

    def close(self) -> None:
        """Close the files. May be called twice; forgetting it leaks nothing, they close with the object."""
        self._layout.close()

    def _digest(self, numbers: NDArray[np.int64]) -> str:
        """Return a hash of these sequences."""
        batch = self._layout.batch(numbers, np.zeros_like(numbers))
        digest = hashlib.blake2b(digest_size=8)
        for tensor in (batch.input_ids, batch.labels):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def _drawn(self, run_positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the sequences that the run draws at these positions, and the epoch of each."""
        epochs, positions = np.divmod(run_positions, self.num_sequences)
        indices = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            indices[here] = self._permuted(epoch, positions[here])
        return indices, epochs

    @property
    def _block_size(self) -> int:
        """Positions whose order is worked out at once."""
        if self._group is None:
            return _BLOCK
        return self._group * max(1, min(_MEGABATCH, self.num_sequences // (4 * self._group)))

    def _permuted(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where ``positions``, one after the other, go in an epoch; a block of them is worked out at once.

        The cipher of a few positions costs as much as that of a thousand. Several threads may work out the same block.
        Blocks that are sorted by length begin with a batch, of which an epoch may begin with the rest.
        """
        permuted, size = np.empty_like(positions), self._block_size
        shift = 0 if self._group is None else -epoch * self.num_sequences % self._group
        blocks = (positions - shift) // size
        for number in range(int(blocks[0]), int(blocks[-1]) + 1):
            first, stop = max(0, number * size + shift), min((number + 1) * size + shift, self.num_sequences)
            cached = self._block
            if cached is None or cached[:2] != (epoch, number):
                span = np.arange(first, stop, dtype=np.int64)
                order = SeededPermutation(self.num_sequences, self._seed, epoch)(span)
                if self._group is not None:
                    lengths = self._layout.lengths(order, np.full_like(order, epoch))
                    order = order[np.argsort(-lengths, kind="stable")]
                cached = (epoch, number, order)
                self._block = cached
            here = blocks == number
            permuted[here] = cached[2][positions[here] - first]
        return permuted
