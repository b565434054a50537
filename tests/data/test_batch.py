import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outsize.data import IGNORED, Batch
from outsize.errors import ConfigError


def make_batch(num_sequences: int, seq_len: int = 4, padded: bool = False) -> Batch:
    ids = torch.arange(num_sequences * seq_len).reshape(num_sequences, seq_len)
    mask = torch.ones_like(ids) if padded else None
    return Batch(ids, ids.clone(), mask, None if padded else ids % seq_len)


@given(num_sequences=st.integers(1, 40), data=st.data(), padded=st.booleans())
def test_split_keeps_every_sequence_in_order_as_even_as_possible(num_sequences, data, padded):
    batch = make_batch(num_sequences, padded=padded)
    num_microbatches = data.draw(st.integers(1, num_sequences))
    parts = batch.split(num_microbatches)
    sizes = [part.num_sequences for part in parts]
    assert len(parts) == num_microbatches
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([part.input_ids for part in parts]), batch.input_ids)
    assert torch.equal(torch.cat([part.labels for part in parts]), batch.labels)
    assert sum(part.num_target_tokens for part in parts) == batch.num_target_tokens
    assert all(part.inputs.keys() == batch.inputs.keys() for part in parts)
    name = "attention_mask" if padded else "position_ids"
    assert torch.equal(torch.cat([part.inputs[name] for part in parts]), batch.inputs[name])


@pytest.mark.parametrize("num_microbatches", [0, 3])
def test_split_refuses_more_microbatches_than_sequences(num_microbatches):
    with pytest.raises(ConfigError, match=f"2 sequences into {num_microbatches}"):
        make_batch(2).split(num_microbatches)


def test_target_tokens_are_those_that_a_shifted_loss_averages_over():
    labels = torch.tensor([[1, 2, IGNORED, 4], [IGNORED, 6, 7, 8]])
    batch = Batch(labels.clamp(min=0), labels)
    logits = torch.randn(2, 4, 10)
    summed = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, 10), labels[:, 1:].reshape(-1), reduction="none"
    )
    assert batch.num_target_tokens == 5 == int((summed != 0).sum())
