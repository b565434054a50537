"""What ranks read is what one process would have read: no row twice, none lost, whatever their number."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outsize.data import IGNORED, SharedData
from outsize.data.batch import Batch
from outsize.errors import ConfigError


class Counting:
    """A source whose rows tell their number; every third token is no target."""

    def __init__(self, masked=False):
        self.masked = masked

    def batch(self, step, num_sequences):
        rows = torch.arange(step * num_sequences, (step + 1) * num_sequences)
        ids = rows[:, None] * 100 + torch.arange(7)
        return Batch(
            ids, torch.where(ids % 3 == 0, IGNORED, ids), torch.ones_like(ids) if self.masked else None
        )


def joined(shares, name):
    return torch.cat([getattr(share, name) for share in shares])


@given(size=st.integers(1, 9), extra=st.integers(0, 20), step=st.integers(0, 50), masked=st.booleans())
def test_shares_of_all_ranks_are_the_batch_of_one_process(size, extra, step, masked):
    source, count = Counting(masked), size + extra
    whole = source.batch(step, count)
    shares = [SharedData(source, rank, size).batch(step, count) for rank in range(size)]
    assert torch.equal(joined(shares, "input_ids"), whole.input_ids)
    assert torch.equal(joined(shares, "labels"), whole.labels)
    if masked:
        assert torch.equal(joined(shares, "attention_mask"), whole.attention_mask)
    assert sum(share.num_target_tokens for share in shares) == whole.num_target_tokens
    assert all(share.whole.num_target_tokens == whole.num_target_tokens for share in shares)
    assert max(s.num_sequences for s in shares) - min(s.num_sequences for s in shares) <= 1


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    steps=st.integers(1, 4),
    count=st.integers(6, 12),
)
def test_a_run_that_goes_on_with_other_ranks_reads_what_an_uninterrupted_one_reads(sizes, steps, count):
    """Every entry of ``sizes`` is a start with that many ranks, which trains ``steps`` steps."""
    source = Counting()
    read = [
        SharedData(source, rank, size).batch(start * steps + step, count).input_ids
        for start, size in enumerate(sizes)
        for step in range(steps)
        for rank in range(size)
    ]
    expected = [source.batch(step, count).input_ids for step in range(len(sizes) * steps)]
    assert torch.equal(torch.cat(read), torch.cat(expected))


def test_more_ranks_than_rows_are_refused():
    with pytest.raises(ConfigError, match="shared out to 3 ranks"):
        SharedData(Counting(), 0, 3).batch(0, 2)
    with pytest.raises(ValueError, match="numbered from 0"):
        SharedData(Counting(), 3, 3)
