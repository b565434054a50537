"""An order within windows, and a run over data that are tokenised meanwhile."""

import json
import threading

import numpy as np
import pytest
import torch

from outsize.config import load_config
from outsize.data import Corpus, ModelLimits, encode, open_data, opening
from outsize.errors import ConfigError, DataError
from outsize.training import run_data
from outsize.training.run import train
from patience import PATIENCE_S
from support import end_of, in_dir, make_run

SEQ_LEN, WINDOW = 16, 8


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    lines = [
        json.dumps({"text": f"document {n} of many, said the quick brown fox {n % 7}"}) for n in range(60)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def gate(monkeypatch):
    """Tokenise eight documents, and the others when the gate opens."""
    opened, encoded = threading.Event(), opening._encoded_ahead

    def slowly(encoder, reader):
        for number, batch in enumerate(encoded(encoder, reader)):
            while number and not opened.wait(0.01):
                yield []
            yield batch

    monkeypatch.setattr(encode, "BATCH_DOCUMENTS", 8)
    monkeypatch.setattr(opening, "_encoded_ahead", slowly)
    yield opened
    opened.set()


def opened(path, tokenizer, cache_dir, *, window=WINDOW, **options):
    return open_data(
        Corpus(path=path), tokenizer, seq_len=SEQ_LEN, cache_dir=cache_dir, seed=5, window=window, **options
    )


def test_every_window_is_drawn_anew_and_nothing_is_left_out(corpus, tokenizer, cache_dir):
    with (
        opened(corpus, tokenizer, cache_dir, window=None) as whole,
        opened(corpus, tokenizer, cache_dir) as data,
    ):
        count = data.num_sequences
        assert count == whole.num_sequences > 2 * WINDOW
        lying = whole.sequences(0, count).input_ids
        epochs = [data.batch(epoch, count).input_ids for epoch in range(2)]
        for drawn in epochs:
            for first in range(0, count, WINDOW):
                window = slice(first, min(first + WINDOW, count))
                assert sorted(drawn[window].tolist()) == sorted(lying[window].tolist())
        assert not torch.equal(epochs[0], lying)
        assert not torch.equal(epochs[0], epochs[1])
        orders = [[lying.tolist().index(row) - first for row in epochs[0][first : first + WINDOW].tolist()]
                  for first in (0, WINDOW)]  # fmt: skip
        assert orders[0] != orders[1]


def test_what_is_tokenised_meanwhile_has_the_same_batches(corpus, tokenizer, cache_dir, gate):
    with opened(corpus, tokenizer, cache_dir) as growing:
        early = [growing.batch(step, 2).input_ids for step in range(WINDOW // 2)]
        assert list(cache_dir.glob("*/index.json")) == []
        assert growing.epoch(1, 2) is None
        assert "tokenised while the run trains" in growing.describe()
        before = growing.identity()
        gate.set()
        count = growing.num_sequences
        later = [growing.batch(step, 2).input_ids for step in range(WINDOW // 2, count + 3)]
        assert growing.epoch(count, 2) == 2.0
        assert growing.identity() == before
    with opened(corpus, tokenizer, cache_dir) as found:  # in the cache
        assert "while the run trains" not in found.describe()
        assert found.identity() == before
        assert found.kept().num_tokens == count * SEQ_LEN
        for step, batch in enumerate([*early, *later]):
            assert torch.equal(found.batch(step, 2).input_ids, batch)


def test_who_resumes_waits_for_the_sequences_that_come_next(corpus, tokenizer, cache_dir, gate):
    with opened(corpus, tokenizer, cache_dir) as growing:
        found = []
        reader = threading.Thread(target=lambda: found.append(growing.batch(2 * WINDOW, 1)), daemon=True)
        reader.start()
        reader.join(0.1)
        assert not found
        gate.set()
        reader.join(PATIENCE_S)
        assert found[0].input_ids.shape == (1, SEQ_LEN)


def test_a_record_that_is_malformed_ends_the_run_where_it_is_needed(corpus, tokenizer, cache_dir, gate):
    corpus.write_text(corpus.read_text() + "{no json\n" * 300)
    with opened(corpus, tokenizer, cache_dir) as growing:
        gate.set()
        growing.batch(0, 1)
        with pytest.raises(DataError, match=r"corpus\.jsonl:61"):
            growing.batch(1000, 1)
        growing.batch(0, 1)
    assert list(cache_dir.iterdir()) == []


@pytest.mark.parametrize("wrong", ["empty", "short", "ids"])
def test_data_that_cannot_be_used_are_refused_at_once(wrong, tmp_path, tokenizer, cache_dir):
    path = tmp_path / "data.txt"
    path.write_text({"empty": "", "short": "a", "ids": "some words " * 40}[wrong])
    limits = ModelLimits(vocab_size=len(tokenizer))
    match = {"empty": "empty", "short": "fewer than one sequence", "ids": "outside the"}[wrong]
    if wrong == "ids":
        tokenizer = type(tokenizer)(tokenizer_object=tokenizer._tokenizer, eos_token="<|endoftext|>")
        limits = ModelLimits(vocab_size=100)
    with pytest.raises(DataError, match=match if wrong != "ids" else "embedding"):
        opened(path, tokenizer, cache_dir, limits=limits)
    assert not list(cache_dir.glob(".writing*"))


def test_windows_are_of_one_stream(corpus, tokenizer, cache_dir):
    with pytest.raises(ConfigError, match=r"data\.window: only one source"):
        opened(corpus, tokenizer, cache_dir, pack="none")


def test_what_is_tokenised_by_the_first_window_is_told_whole(corpus, tokenizer, cache_dir, monkeypatch):
    monkeypatch.setattr(encode, "BATCH_DOCUMENTS", 8)
    with opened(corpus, tokenizer, cache_dir, window=10_000) as data:
        assert data.detected.num_documents == 60
        assert data.kept().num_trained == data.num_sequences * SEQ_LEN
        assert "while the run trains" not in data.describe()


def test_a_run_ends_without_what_it_does_not_need(tmp_path, gate):
    config = make_run(tmp_path, data={"path": str(lines_of(tmp_path)), "window": 4}, train={"steps": 1})
    assert train(config).steps == 1
    assert not gate.is_set()
    assert list((tmp_path / "run" / "data").iterdir()) == []


def test_a_run_that_is_measured_on_what_it_trains_on_tokenises_both(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "BATCH_DOCUMENTS", 8)
    path = str(lines_of(tmp_path))
    config = make_run(tmp_path, data={"path": path, "window": 4}, eval={"data": path, "every": 2})
    result = train(config)
    assert result.eval_loss is not None


def lines_of(directory):
    path = directory / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": f"line {n} of many"}) + "\n" for n in range(200)))
    return path


def test_whoever_closes_early_leaves_nothing(corpus, tokenizer, cache_dir, gate):
    growing = opened(corpus, tokenizer, cache_dir)
    threading.Timer(0.05, gate.set).start()
    growing.close()
    growing.close()
    assert list(cache_dir.iterdir()) == []
    with pytest.raises(DataError, match="closed"):
        growing.batch(0, 1)


def test_trained_tokens_are_told_as_they_come(tmp_path, tokenizer, cache_dir, gate):
    path = tmp_path / "chats.jsonl"
    records = [{"prompt": f"question {n} " * 3, "completion": f"answer {n} " * 2} for n in range(40)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with opened(path, tokenizer, cache_dir) as growing:
        early = growing.batch(0, 4).labels
        gate.set()
        assert growing.num_sequences
    with opened(path, tokenizer, cache_dir) as found:
        assert torch.equal(found.batch(0, 4).labels, early)
        assert (np.asarray(early) < 0).any()


def test_a_run_goes_on_with_the_bits_of_one_that_was_not_interrupted(tmp_path):
    config = make_run(tmp_path, data={"window": 4})
    train(config)
    half = in_dir(config, tmp_path / "half", steps=2)
    train(half)
    train(in_dir(config, tmp_path / "half", resume="auto"))
    whole, resumed = end_of(tmp_path / "run"), end_of(tmp_path / "half")
    tensors = [name for name, value in whole.items() if isinstance(value, torch.Tensor)]
    assert tensors
    assert all(torch.equal(whole[name], resumed[name]) for name in tensors)
    other = config.model_copy(update={"data": config.data.model_copy(update={"window": 5})})
    with pytest.raises(ConfigError, match=r"other data: data\.window=4, and here data\.window=5"):
        train(in_dir(other, tmp_path / "half", resume="auto", steps=6))


def test_a_run_tells_how_much_is_tokenised(tmp_path, monkeypatch):
    monkeypatch.setattr(run_data, "SAY_EVERY_S", 0.0)
    said: list[str] = []
    train(make_run(tmp_path, train={"steps": 1}), announce=said.append)
    assert any(line.startswith("tokenised 100% of ") for line in said)
    run_data.tokenising(said.append)(0, 0)
    assert said[-1] == "tokenised some of a dataset"


@pytest.mark.parametrize(
    "setting",
    ["data.pack=none", "data.weight=2", "data.more=[{path: b.txt}]", "train.epochs=1", "eval.split=0.1"],
)
def test_what_needs_the_end_of_the_data_is_refused(setting):
    key = setting.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"data\.window: {key} needs all data"):
        load_config(None, ["model.path=model", "data.path=a.txt", "data.window=100", setting])
