"""Masked language modelling: the tokens that transformers' collator hides, whoever makes the batch and when."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DataCollatorForLanguageModeling

from outsize.data import ModelLimits, open_data
from outsize.data.batch import IGNORED, Batch, Masker
from outsize.errors import ConfigError, DataError
from support import make_tokenizer

TOKENIZER = make_tokenizer(mask_token="<mask>", cls_token="<cls>", sep_token="<sep>")
SHARES = [{}, {"mlm_probability": 0.5}, {"mask_replace_prob": 1.0, "random_replace_prob": 0.0}]
SHARES += [
    {"mask_replace_prob": 0.0, "random_replace_prob": 1.0},
    {"mask_replace_prob": 0.0, "random_replace_prob": 0.0},
]
SHARES += [{"mask_replace_prob": 0.5, "random_replace_prob": 0.4}, {"mlm_probability": 1.0}]


def batch_of(num_sequences=4, seq_len=64, seed=0):
    ids = torch.randint(1, 257, (num_sequences, seq_len), generator=torch.Generator().manual_seed(seed))
    ids[:, 0], ids[:, -1] = TOKENIZER.cls_token_id, TOKENIZER.sep_token_id
    return Batch(ids, ids.clone())


@pytest.mark.parametrize("shares", SHARES)
def test_a_sequence_is_masked_as_the_collator_of_transformers_masks_it(shares):
    masker, batch = Masker(TOKENIZER, 7, **shares), batch_of()
    masked = masker(batch, "trained", range(20, 24))
    for row, ids in enumerate(batch.input_ids.tolist()):
        collator = DataCollatorForLanguageModeling(
            TOKENIZER, seed=masker.seed_of("trained", 20 + row), **shares
        )
        theirs = collator([ids])
        assert torch.equal(masked.input_ids[row], theirs["input_ids"][0])
        assert torch.equal(masked.labels[row], theirs["labels"][0])
    assert (masked.labels != IGNORED).any()


def test_labels_are_the_tokens_that_were_hidden_and_nothing_else_is_trained_or_changed():
    batch = batch_of(64, 256)
    masked = Masker(TOKENIZER, 0)(batch, "trained", range(64))
    hidden = masked.labels != IGNORED
    assert torch.equal(masked.labels[hidden], batch.input_ids[hidden])
    assert torch.equal(masked.input_ids[~hidden], batch.input_ids[~hidden])
    is_mask = masked.input_ids == TOKENIZER.mask_token_id
    kept = masked.input_ids == batch.input_ids
    assert abs(hidden.float().mean() - 0.15) < 0.01
    assert abs(is_mask[hidden].float().mean() - 0.8) < 0.03
    assert abs(kept[hidden].float().mean() - 0.1) < 0.03
    assert not hidden[:, [0, -1]].any()


def test_padding_and_what_the_data_do_not_train_are_neither_hidden_nor_predicted():
    batch = batch_of()
    labels = batch.labels.clone()
    labels[:, :20] = IGNORED
    mask = torch.ones_like(labels)
    mask[:, 50:], labels[:, 50:] = 0, IGNORED
    masked = Masker(TOKENIZER, 0, mlm_probability=1.0)(
        replace(batch, labels=labels, attention_mask=mask), "m", range(4)
    )
    hidden = masked.labels != IGNORED
    assert hidden[:, 20:50].all()
    assert not hidden[:, :20].any()
    assert not hidden[:, 50:].any()
    assert torch.equal(masked.input_ids[~hidden], batch.input_ids[~hidden])
    assert torch.equal(masked.attention_mask, mask)


def test_masks_depend_on_seed_kind_and_number_and_on_nothing_else():
    batch = batch_of(1)
    first = Masker(TOKENIZER, 0)(batch, "trained", [5])
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    assert torch.equal(Masker(TOKENIZER, 0)(batch, "trained", [5]).labels, first.labels)
    assert torch.equal(torch.random.get_rng_state(), before)
    for seed, kind, number in ((1, "trained", 5), (0, "measured", 5), (0, "trained", 6)):
        assert not torch.equal(Masker(TOKENIZER, seed)(batch, kind, [number]).labels, first.labels)
    assert torch.equal(batch.input_ids, batch_of(1).input_ids)


@pytest.fixture(params=["stream", "none", "window"])
def data(tmp_path, request):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "line {n}: the square of {n} is {n * n}"}}\n' for n in range(300)))
    how = {"window": 8} if request.param == "window" else {"pack": request.param}
    limits = ModelLimits(vocab_size=len(TOKENIZER))
    with open_data(path, TOKENIZER, seq_len=32, cache_dir=tmp_path / "c", limits=limits, **how) as found:
        yield found.masked(Masker(TOKENIZER, 0))


def test_a_batch_is_the_same_whoever_makes_it_and_in_whatever_order(data):
    in_order = [data.batch(step, 4) for step in range(8)]
    with ThreadPoolExecutor(4) as threads:
        others = list(threads.map(lambda step: data.batch(step, 4), reversed(range(8))))
    for one, other in zip(in_order, reversed(others), strict=True):
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.labels, other.labels)


def test_a_second_epoch_hides_other_tokens(data):
    if data.num_sequences < 4:
        pytest.skip("a window that is still being made")
    steps = data.num_sequences
    first, second = ([data.batch(epoch * steps + step, 1) for step in range(steps)] for epoch in range(2))
    hidden = [sum(int((b.labels != IGNORED).sum()) for b in batches) for batches in (first, second)]
    assert hidden[0] != hidden[1]


def test_what_is_measured_is_masked_alike_however_it_is_cut(data):
    together = data.sequences(3, 4)
    alone = [data.sequences(number, 1) for number in range(3, 7)]
    assert torch.equal(together.input_ids, torch.cat([each.input_ids for each in alone]))
    assert torch.equal(together.labels, torch.cat([each.labels for each in alone]))
    assert np.isin(TOKENIZER.mask_token_id, together.input_ids.numpy())


def test_a_tokenizer_without_a_mask_token_is_refused_by_name():
    with pytest.raises(
        DataError, match=r"TokenizersBackend|PreTrainedTokenizerFast.* no mask token; set mask_token"
    ):
        Masker(make_tokenizer(), 0)


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_refused_unless_none_is_drawn():
    with pytest.raises(DataError, match=r"data.random_replace_prob=0"):
        Masker(TOKENIZER, 0, vocab_size=100)
    Masker(TOKENIZER, 0, vocab_size=300)


def test_shares_that_are_more_than_all_are_refused():
    with pytest.raises(ConfigError, match="should not exceed 1"):
        Masker(TOKENIZER, 0, mask_replace_prob=0.9, random_replace_prob=0.2)
