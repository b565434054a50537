"""Sequences of one document each, those of like length in one batch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.trainer_pt_utils import get_length_grouped_indices

from data.test_packed import DETECTED, MemoryStore
from outsize.data.batch import SeededPermutation
from outsize.data.layouts import HeldPart, Mixed
from outsize.data.packed_dataset import OnePerDocument, PackedDataset
from outsize.data.prefetch import SharedData

SEQ_LEN, PAD_ID = 30, 77_777


def grouped(lengths, size, seed=0, layout=None):
    layout = layout or OnePerDocument(MemoryStore(lengths), SEQ_LEN, PAD_ID)
    return PackedDataset(layout, DETECTED, seq_len=SEQ_LEN, seed=seed).grouped(size)


def some_lengths(count, seed=0):
    return np.random.default_rng(seed).integers(2, 40, count).tolist()


@pytest.mark.parametrize(("count", "size"), [(3, 4), (40, 5), (41, 5), (500, 2)])
def test_the_order_is_that_of_transformers(count, size, monkeypatch):
    """Of the same permutation, and without the longest of all put first: the plan has room for that."""
    lengths = some_lengths(count)
    drawn = SeededPermutation(count, 3)(np.arange(count))
    monkeypatch.setattr(torch, "randperm", lambda *_, **__: torch.from_numpy(drawn))
    monkeypatch.setattr(torch, "argmax", lambda _: torch.tensor(0))
    expected = get_length_grouped_indices([min(n, SEQ_LEN) for n in lengths], size)
    monkeypatch.undo()
    starts = np.cumsum([0, *lengths])
    dataset = grouped(lengths, size, seed=3)
    for step in range(count // size):
        batch = dataset.batch(step, size)
        assert batch.input_ids[:, 0].tolist() == starts[expected[step * size : (step + 1) * size]].tolist()


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    size=st.integers(1, 9),
    seed=st.integers(0, 9),
)
def test_every_epoch_has_every_document_once_and_no_column_of_padding(lengths, size, seed):
    count, starts = len(lengths), np.cumsum([0, *lengths])
    dataset = grouped(lengths, size, seed)
    batches = [dataset.batch(step, size) for step in range(count)]  # as many epochs as a batch has sequences
    firsts = torch.cat([batch.input_ids[:, 0] for batch in batches])
    assert all(sorted(epoch.tolist()) == starts[:-1].tolist() for epoch in firsts.reshape(size, count))
    for step, batch in enumerate(batches):
        held = batch.attention_mask.sum(1)
        assert batch.input_ids.shape == (size, max(2, int(held.max())))
        assert torch.equal(batch.attention_mask == 0, batch.input_ids == PAD_ID)
        resumed = grouped(lengths, size, seed).batch(step, size)
        assert torch.equal(resumed.input_ids, batch.input_ids)


def test_batches_stay_whole_where_an_epoch_has_ended_within_one():
    """Of few sequences each batch is sorted by itself; after the batch that two epochs share, too."""
    dataset = grouped(list(range(2, 13)), 3)
    for step in range(30):
        held = dataset.batch(step, 3).attention_mask.sum(1).tolist()
        if step * 3 // 11 == (step * 3 + 2) // 11:
            assert held == sorted(held, reverse=True)


def test_ranks_share_a_batch():
    dataset = grouped(some_lengths(40), 6)
    shares = [SharedData(dataset, rank, 3).batch(2, 6) for rank in range(3)]
    assert torch.equal(torch.cat([share.input_ids for share in shares]), dataset.batch(2, 6).input_ids)


def test_the_share_of_padding_is_that_of_the_batches_of_an_epoch():
    dataset = grouped(some_lengths(42), 6)
    masks = [dataset.batch(step, 6).attention_mask for step in range(7)]
    kept = dataset.kept()
    assert kept.num_padding == sum(int((mask == 0).sum()) for mask in masks)
    assert kept.padding_saved == sum(6 * (SEQ_LEN - mask.shape[1]) for mask in masks) > 0
    (line,) = (line for line in kept.lines(SEQ_LEN) if "padding" in line)
    alone = 1 - kept.num_tokens / (42 * SEQ_LEN)
    assert line.endswith(
        f"of the sequences is padding; with 30 tokens for each document it would be {alone:.1%}"
    )


def test_sources_and_parts_of_them_are_grouped_as_one():
    lengths = some_lengths(30), some_lengths(50, 1)
    layouts = [OnePerDocument(MemoryStore(each), SEQ_LEN, PAD_ID) for each in lengths]
    mixed = Mixed([HeldPart(layouts[0], 6, 24, 0), layouts[1]], [1, 0.5], 0)
    dataset = grouped(None, 4, layout=mixed)
    for step in range(20):
        batch = dataset.batch(step, 4)
        drawn = dataset._drawn(np.arange(4 * step, 4 * step + 4))
        assert batch.attention_mask.sum(1).tolist() == mixed.lengths(*drawn).tolist()
    assert dataset.kept().padding_saved > 0
