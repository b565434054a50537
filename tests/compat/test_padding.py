"""Models that read padding as text are told from those that leave it out."""

import pytest
import torch

import zoo
from outsize.compat.padding import reads_padding


@pytest.mark.parametrize("name", ["llama", "mamba", "qwen3_next", "jamba", "rwkv", "recurrent_gemma"])
def test_padding_is_read_by_those_whose_logits_it_changes(name: str):
    model = zoo.build(name).eval()
    ids, padded = torch.tensor([[5, 9, 33]]), torch.tensor([[0, 0, 0, 0, 5, 9, 33]])
    with torch.no_grad():
        alone = model(ids, attention_mask=torch.ones_like(ids)).logits[0, -1]
        beside = model(padded, attention_mask=(padded > 0).long()).logits[0, -1]
    assert reads_padding(model) == (not torch.allclose(alone, beside, rtol=1e-3, atol=1e-3))
