import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outsize.data import IGNORED, ModelLimits, open_data
from outsize.data.batch import SeededPermutation
from outsize.data.packed_dataset import OnePerDocument, Packed, PackedDataset
from outsize.data.survey import Detected
from outsize.errors import ConfigError, DataError

DETECTED = Detected(
    format="text",
    forced=False,
    fields=(),
    mask_source="all tokens",
    num_files=1,
    num_skipped_files=0,
    num_documents=None,
    num_empty=0,
    num_tokens=0,
    num_trained_tokens=0,
    max_token_id=0,
    example="",
)


class MemoryStore:
    """Tokens 0, 1, 2, ...; documents of the given lengths; even tokens are targets if ``masked``."""

    def __init__(self, lengths, masked=False):
        self.bounds = np.cumsum([0, *lengths])
        self.num_tokens = int(self.bounds[-1])
        self.num_documents = len(lengths)
        self.masked = masked

    def reach(self, num_tokens):
        return self.num_tokens

    def read(self, start, count):
        assert 0 <= start <= start + count <= self.num_tokens
        return np.arange(start, start + count, dtype=np.int32)

    def read_rows(self, starts, *targets):
        for target in targets:
            for row, start in zip(target, starts, strict=True):
                row[:] = self.read(start, len(row))

    def read_trained(self, start, count):
        return self.read(start, count) % 2 == 0 if self.masked else None

    def document_ends(self, first, count):
        return self.bounds[first + 1 : first + 1 + count].astype(np.int64)

    def close(self):
        pass


def packed(num_tokens, seq_len, seed=0, masked=False):
    store = MemoryStore([num_tokens], masked)
    return PackedDataset(Packed(store, seq_len), DETECTED, seq_len=seq_len, seed=seed)


@given(seq_len=st.integers(2, 9), data=st.data(), batch_size=st.integers(1, 7), seed=st.integers(0, 99))
def test_every_token_is_used_once_per_epoch_up_to_the_remainder(seq_len, data, batch_size, seed):
    num_tokens = data.draw(st.integers(seq_len, 200))
    dataset = packed(num_tokens, seq_len, seed)
    kept = num_tokens - num_tokens % seq_len
    num_epochs = batch_size  # after this many epochs, batches and epochs end together
    num_steps = num_epochs * dataset.num_sequences // batch_size
    tokens = torch.cat([dataset.batch(step, batch_size).input_ids for step in range(num_steps)])
    for epoch in tokens.reshape(num_epochs, kept):
        assert sorted(epoch.tolist()) == list(range(kept))
    rows = tokens.reshape(-1, seq_len)
    assert (rows[:, 0] % seq_len == 0).all()
    assert (rows.diff(dim=1) == 1).all()


@given(step=st.integers(0, 10**6), batch_size=st.integers(1, 20), seed=st.integers(0, 99))
def test_a_resumed_run_sees_what_an_uninterrupted_one_sees(step, batch_size, seed):
    ran, resumed = packed(1000, 8, seed), packed(1000, 8, seed)
    for earlier in range(max(0, step - 3), step):
        ran.batch(earlier, batch_size)
    assert torch.equal(ran.batch(step, batch_size).input_ids, resumed.batch(step, batch_size).input_ids)


def test_seeds_and_epochs_differ():
    first = packed(1000, 10, seed=0)
    orders = [first.batch(0, 100), first.batch(1, 100), packed(1000, 10, seed=1).batch(0, 100)]
    assert len({tuple(batch.input_ids[:, 0].tolist()) for batch in orders}) == 3
    assert first.epoch(3, 50) == 1.5


def test_labels_follow_the_mask_and_are_not_shifted():
    batch = packed(100, 10, masked=True).batch(0, 4)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert torch.equal(batch.labels, torch.where(batch.input_ids % 2 == 0, batch.input_ids, IGNORED))
    assert batch.attention_mask is None
    plain = packed(100, 10).batch(0, 4)
    assert torch.equal(plain.labels, plain.input_ids)
    assert plain.labels.data_ptr() != plain.input_ids.data_ptr()
    assert plain.num_target_tokens == 4 * 9


def test_too_little_data_for_one_sequence():
    with pytest.raises(
        DataError, match=r"9 tokens, fewer than one sequence of 10; .*, or set data.pack to documents or none"
    ):
        packed(9, 10)
    store = MemoryStore([9])
    store.num_documents = None
    with pytest.raises(DataError, match=r"or lower data.seq_len$"):
        Packed(store, 10)


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=20), masked=st.booleans())
def test_one_document_per_sequence_is_padded_or_cut(lengths, masked):
    seq_len, pad_id = 8, 777
    store = MemoryStore(lengths, masked)
    dataset = PackedDataset(OnePerDocument(store, seq_len, pad_id), DETECTED, seq_len=seq_len, seed=1)
    assert dataset.num_sequences == len(lengths)
    batch = dataset.batch(0, len(lengths))
    seen = []
    for ids, labels, mask in zip(batch.input_ids, batch.labels, batch.attention_mask, strict=True):
        count = int(mask.sum())
        assert mask.tolist() == [1] * count + [0] * (seq_len - count)
        assert ids[count:].tolist() == [pad_id] * (seq_len - count)
        assert labels[count:].tolist() == [IGNORED] * (seq_len - count)
        expected = ids[:count] if not masked else torch.where(ids[:count] % 2 == 0, ids[:count], IGNORED)
        assert torch.equal(labels[:count], expected)
        seen.append((int(ids[0]), count))
    starts = [0, *np.cumsum(lengths).tolist()]
    assert sorted(seen) == [(starts[i], min(n, seq_len)) for i, n in enumerate(lengths)]
    assert batch.attention_mask.sum() == sum(min(n, seq_len) for n in lengths)


def test_documents_without_bounds_cannot_be_kept_apart():
    store = MemoryStore([10])
    store.num_documents = None
    with pytest.raises(ConfigError, match=r"data.pack: .*set it to stream"):
        OnePerDocument(store, 5, 0)


@pytest.mark.parametrize(("step", "num_sequences"), [(-1, 1), (0, 0)])
def test_steps_begin_at_zero(step, num_sequences):
    with pytest.raises(ValueError, match="step must be"):
        packed(100, 10).batch(step, num_sequences)


def test_the_order_is_that_of_the_permutation_whatever_the_blocks(tmp_path, monkeypatch):
    """Worked out block by block, in any order of asking, it is the permutation of each epoch."""
    monkeypatch.setattr("outsize.data.packed_dataset._BLOCK", 7)
    np.save(tmp_path / "tokens.npy", np.arange(50 * 4, dtype=np.int32))
    with open_data(
        tmp_path / "tokens.npy",
        None,
        seq_len=4,
        cache_dir=tmp_path,
        seed=3,
        limits=ModelLimits(vocab_size=999),
    ) as data:
        for step in (0, 9, 3, 4, 12, 1):
            rows = data.batch(step, 11).input_ids[:, 0] // 4
            for row, position in zip(rows.tolist(), range(step * 11, step * 11 + 11), strict=True):
                expected = SeededPermutation(50, 3, position // 50)(np.array([position % 50]))
                assert row == expected[0]
