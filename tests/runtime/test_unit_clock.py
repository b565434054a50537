import pytest
import torch

import zoo
from outsize.errors import ModelError
from outsize.model.split import split
from outsize.model.walk import Boundaries
from outsize.runtime.unit_clock import time_units
from runtime.oddities import VOCAB, Odd
from runtime.test_calibrate import skeleton


def clock(model, seq_len=16, chunk_tokens=None, **inputs):
    parts = split(model)
    ids = torch.randint(
        0, min(VOCAB, zoo.VOCAB_SIZE), (2, seq_len), generator=torch.Generator().manual_seed(0)
    )
    given = {"input_ids": ids, "labels": ids, **inputs}
    with Boundaries(parts.modules) as boundaries:
        return time_units(
            parts, boundaries.forwards, given, chunk_tokens=chunk_tokens, device=torch.device("cpu")
        )


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("chunk_tokens", [None, 8])
def test_every_unit_has_its_times_and_like_blocks_share_them(name, chunk_tokens):
    times = clock(skeleton(name), chunk_tokens=chunk_tokens)
    assert all(seconds > 0 for seconds in (*times.forward_s[:-1], *times.backward_s))
    assert times.forward_s[-1] == 0  # its forward and backward are one op
    assert len(set(times.backward_s[1:-1])) == 1


def test_the_model_and_the_random_numbers_are_as_they_were():
    model = skeleton("llama")
    state = torch.get_rng_state()
    clock(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_what_a_model_raises_is_told_as_its_own():
    with pytest.raises(ModelError, match="raised while its units were timed"):
        clock(skeleton("llama"), attention_mask=torch.ones(3, 3, 3, 3, 3))


def test_tensors_that_skip_units_and_arguments_of_every_kind_are_no_obstacle():
    times = clock(Odd())
    assert len(times.forward_s) == len(times.backward_s) == 7
