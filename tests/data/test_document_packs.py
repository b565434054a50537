"""Whole documents, several to a sequence."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.test_packed import DETECTED, MemoryStore
from outsize.data import IGNORED
from outsize.data.layouts import DocumentPacks, Mixed, best_fit
from outsize.data.packed_dataset import PackedDataset
from outsize.errors import ConfigError

SEQ_LEN, PAD_ID = 8, 777


def one_after_the_other(lengths: list[int], capacity: int) -> list[int]:
    """What bins hold if items are placed one at a time, the longest first, each where it leaves the least room."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [bin for bin, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(capacity)
            fitting = [len(rooms) - 1]
        rooms[min(fitting, key=rooms.__getitem__)] -= length
    return sorted(capacity - room for room in rooms)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60), capacity=st.integers(20, 30))
def test_equal_lengths_placed_together_fill_bins_as_one_by_one(lengths: list[int], capacity: int):
    bins = best_fit(np.array(lengths), capacity)
    held = np.bincount(bins, weights=lengths).astype(int)
    assert sorted(held.tolist()) == one_after_the_other(lengths, capacity)


@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=20), masked=st.booleans())
def test_every_token_lies_once_in_a_sequence_and_positions_tell_the_borders(lengths: list[int], masked: bool):
    if not any(lengths):
        lengths = [*lengths, 1]
    store = MemoryStore(lengths, masked)
    dataset = PackedDataset(DocumentPacks(store, SEQ_LEN, PAD_ID), DETECTED, seq_len=SEQ_LEN, seed=1)
    batch = dataset.batch(0, dataset.num_sequences)
    assert batch.position_ids is not None
    assert batch.attention_mask is None
    assert (batch.position_ids[:, 0] == 0).all()
    begins = batch.position_ids == 0
    assert (batch.position_ids.diff(dim=1)[~begins[:, 1:]] == 1).all()
    padding = batch.input_ids == PAD_ID
    targets = ~begins & ~padding & (batch.input_ids % 2 == 0 if masked else True)
    assert torch.equal(batch.labels, batch.input_ids.masked_fill(~targets, IGNORED))
    assert sorted(batch.input_ids[~padding].tolist()) == list(range(sum(lengths)))
    starts = np.cumsum([0, *lengths])
    parts = {int(start) + k for start, n in zip(starts, lengths, strict=False) for k in range(0, n, SEQ_LEN)}
    assert set(batch.input_ids[begins & ~padding].tolist()) == parts
    kept = dataset.kept()
    assert (kept.num_tokens, kept.num_padding) == (sum(lengths), int(padding.sum()))
    assert kept.num_trained == batch.num_target_tokens
    assert sum(bucket.num_trained for bucket in dataset.lengths()) == kept.num_trained
    assert (kept.num_split, kept.longest) == (sum(n > SEQ_LEN for n in lengths), max(lengths))
    assert kept.num_padding + kept.padding_saved == len(parts) * SEQ_LEN - sum(lengths)


def test_the_share_of_padding_is_told_beside_what_it_would_be():
    layout = DocumentPacks(MemoryStore([6, 2, 4, 3]), SEQ_LEN, PAD_ID)
    assert layout.kept().lines(SEQ_LEN) == [
        "6.2% of the sequences is padding; with 8 tokens for each document it would be 53.1%"
    ]


def test_documents_that_are_split_are_told():
    told = DocumentPacks(MemoryStore([20, 8, 9]), SEQ_LEN, PAD_ID).kept().lines(SEQ_LEN)[-1]
    assert told.startswith(
        "2 of 3 documents are longer than data.seq_len=8 tokens (the longest has 20) and go on"
    )


def test_sources_are_mixed():
    layouts = [DocumentPacks(MemoryStore([6, 2, 4]), SEQ_LEN, PAD_ID) for _ in range(2)]
    batch = Mixed(layouts, [1.0, 1.0], seed=0).batch(np.array([3, 0, 1]), np.zeros(3, np.int64))
    assert batch.position_ids is not None
    assert torch.equal(batch.position_ids == 0, (batch.labels == IGNORED) & (batch.position_ids == 0))
    assert batch.position_ids.tolist() == [[0, 1, 2, 3] * 2, [*range(6), 0, 1], [0, 1, 2, 3] * 2]


def test_documents_without_bounds_cannot_be_packed():
    store = MemoryStore([10])
    store.num_documents = None
    with pytest.raises(ConfigError, match=r"data.pack: .*set it to stream"):
        DocumentPacks(store, 5, 0)
