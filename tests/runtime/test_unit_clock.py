import pytest
import torch

import zoo
from outsize.errors import ModelError
from outsize.model.split import split
from outsize.model.walk import Boundaries
from outsize.planner.program.program import Kind
from outsize.planner.program.stages import Choice
from outsize.runtime.device.heap import ResidentLimit
from outsize.runtime.trial.unit_clock import _num_samples, _num_waiting, time_units
from runtime.oddities import VOCAB, Odd
from runtime.test_calibrate import skeleton


def clock(model, seq_len=16, chunk_tokens=None, num_kept=0, **inputs):
    parts = split(model)
    ids = torch.randint(
        0, min(VOCAB, zoo.VOCAB_SIZE), (2, seq_len), generator=torch.Generator().manual_seed(0)
    )
    given = {"input_ids": ids, "labels": ids, **inputs}
    with Boundaries(parts.modules) as boundaries:
        return time_units(
            parts,
            boundaries.forwards,
            given,
            chunk_tokens=chunk_tokens,
            device=torch.device("cpu"),
            num_kept=[num_kept] * parts.spec.num_streamed if num_kept else [],
            limit=ResidentLimit(0, 2**40) if num_kept else None,
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


@pytest.mark.parametrize("model", ["llama", "odd"])
def test_forwards_that_keep_all_and_their_backwards_are_timed_where_a_plan_has_them(model):
    times = clock(Odd() if model == "odd" else skeleton(model), num_kept=2)
    assert all(seconds > 0 for seconds in (*times.kept_forward_s[:-1], *times.kept_backward_s))
    assert times.kept_backward_s[-1] == times.backward_s[-1]
    assert times.forward(Kind.FORWARD_KEEP, 1) == times.kept_forward_s[1]
    assert times.forward(Kind.FORWARD, 1) == times.forward_s[1]
    assert times.backward(Choice.KEEP, 1) == times.kept_backward_s[1]
    assert times.backward(Choice.RECOMPUTE, 1) == times.backward_s[1]


def test_the_number_of_samples_follows_from_the_first():
    assert [_num_waiting(first_s) for first_s in (1.0, 0.4, 0.1, 0.01, 0.0)] == [0, 2, 5, 50, 64]
    firsts = (20.0, 1.0, 0.4, 0.1, 0.01, 0.001, 0.0)
    assert [_num_samples(first_s) for first_s in firsts] == [0, 1, 2, 3, 5, 5, 1000]
