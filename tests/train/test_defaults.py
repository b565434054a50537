"""What a run has where nobody says: epochs, packing, lengths and rates that follow from data and method."""

import json
from pathlib import Path

import pytest

from outsize.config import Config
from outsize.config.load import load_config, parse_config
from outsize.data.reading.record_lengths import LEAST_STEPS
from outsize.training.defaults import LORA_LR, settle
from outsize.training.forecast import foresee
from outsize.training.run import train
from tiny import tiny_model, tiny_run

CHAT = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<eos>{% endfor %}"
RECORDS = {
    "messages": lambda n: {
        "messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n * n}!"}]
    },
    "prompt": lambda n: {"prompt": f"{n}?", "completion": f"{n * n}!"},
    "alpaca": lambda n: {"instruction": "2?", "output": "4"},
}
CHOSEN = {"train.epochs", "data.pack", "data.seq_len", "train.batch_size"}


def asked(directory: Path, record="messages", count=12, **sections) -> Config:
    """A run of which the data are records and nothing is said but where things are."""
    model, data = directory / "model", directory / "data.jsonl"
    if not model.exists():
        tiny_model(model, max_position_embeddings=256)
        (model / "chat_template.jinja").write_text(CHAT)
    data.write_text("".join(json.dumps(RECORDS[record](n)) + "\n" for n in range(count)))
    settings = {
        "model": {"path": str(model)},
        "data": {"path": str(data)},
        "train": {"run_dir": str(directory / "run")},
        "memory": {"device": "cpu", "device_memory": "512MiB", "host_memory": "512MiB"},
    }
    return parse_config({**settings, **{k: {**settings.get(k, {}), **v} for k, v in sections.items()}})


@pytest.mark.parametrize("record", RECORDS)
def test_records_train_in_epochs_of_whole_documents(tmp_path, record):
    settled = settle(asked(tmp_path, record), tmp_path)
    assert set(settled.chosen) == CHOSEN
    config = settled.config
    assert (config.train.epochs, config.data.pack, settled.may_unpack) == (1, "documents", True)
    assert config.data.seq_len % 64 == 0
    assert config.data.seq_len <= 256
    assert all(f"{key}=" in settled.line() for key in CHOSEN)


def test_text_and_tokens_train_as_ever(tmp_path):
    text = tiny_run(tmp_path)
    assert settle(text, tmp_path).config == text


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "steps", 7),
        ("train", "epochs", 2.0),
        ("train", "tokens_per_step", 512),
        ("train", "batch_size", 3),
        ("data", "seq_len", 32),
        ("data", "pack", "stream"),
        ("data", "pack", "none"),
        ("optimizer", "lr", 1e-3),
    ],
)
def test_what_is_said_stays(tmp_path, section, key, value):
    settled = settle(asked(tmp_path, **{section: {key: value}}, lora={"r": 2}), tmp_path)
    assert getattr(getattr(settled.config, section), key) == value
    assert f"{section}.{key}" not in settled.chosen
    load_config(None, [f"{k}={v}" for k, v in settled.chosen.items()] + [f"{section}.{key}={value}",
        "model.path=m", "data.path=d"])  # fmt: skip


def test_everything_said_is_nothing_chosen(tmp_path):
    config = asked(
        tmp_path,
        data={"pack": "stream", "seq_len": 64},
        train={"steps": 2, "batch_size": 2},
        optimizer={"lr": 1e-4},
    )
    settled = settle(config, tmp_path)
    assert settled.config == config
    assert not settled.line()


def test_a_step_has_a_few_records_and_an_epoch_some_steps(tmp_path):
    for count, most in ((12, 1), (400, 16), (1600, 16)):
        config = settle(asked(tmp_path, count=count), tmp_path).config
        whole = config.over(-(-count * 15 // config.data.seq_len))
        records = count * config.sequences_per_step / max(1, -(-count * 15 // config.data.seq_len))
        assert records <= 2 * most or config.sequences_per_step == 1
        assert whole.train.steps >= min(LEAST_STEPS, count) / 8


def test_adapters_learn_at_their_rate(tmp_path):
    lora = settle(asked(tmp_path, train={"method": "lora"}), tmp_path).config
    full = settle(asked(tmp_path), tmp_path).config
    assert (lora.optimizer.lr, full.optimizer.lr) == (LORA_LR, 2e-5)


def test_documents_get_a_sequence_each_where_the_model_sees_across_them(tmp_path, monkeypatch):
    from outsize.errors import ModelError
    from outsize.session.job import prepare

    def leaks(*_):
        raise ModelError("it sees across")

    monkeypatch.setattr(prepare, "check_borders", leaks)
    said = []
    result = train(asked(tmp_path), announce=said.append)
    kept = load_config(Path(result.run_dir) / "config.yaml")
    assert (kept.data.pack, kept.train.epochs) == ("none", 1)
    assert any("data.pack is none: it sees across" in line for line in said)
    with pytest.raises(ModelError):
        train(asked(tmp_path, data={"pack": "documents"}, train={"run_dir": str(tmp_path / "other")}))


def test_a_run_goes_on_with_what_it_had(tmp_path):
    before = asked(tmp_path, train={"steps": 2, "batch_size": 2}, data={"pack": "stream", "seq_len": 32})
    train(before)
    again = asked(tmp_path, train={"resume": "auto", "steps": 3})
    result = train(again)
    kept = load_config(Path(result.run_dir) / "config.yaml")
    assert (result.steps, kept.data.pack, kept.data.seq_len, kept.tokens_per_step) == (3, "stream", 32, 64)


def test_the_first_line_says_what_happens_and_a_dry_run_says_the_same(tmp_path):
    said: list[str] = []
    config = asked(tmp_path)
    foreseen = foresee(config)
    train(config, announce=said.append)
    line = next(line for line in said if line.startswith("train all of model"))
    for word in ("data.jsonl", "1 epoch", "steps of", "host memory", "written to disk"):
        assert word in line
        assert word in foreseen.headline
    assert foreseen.config.train.steps == load_config(tmp_path / "run" / "config.yaml").train.steps


def test_empty_replies_and_cut_records_are_counted(tmp_path):
    config = asked(tmp_path, data={"pack": "stream", "seq_len": 32}, train={"steps": 1})
    with open(tmp_path / "data.jsonl", "a") as file:
        for content in ("", None):
            reply = {"role": "assistant", "content": content}
            file.write(json.dumps({"messages": [{"role": "user", "content": "hm?"}, reply]}) + "\n")
    said: list[str] = []
    train(config, announce=said.append)
    text = "\n".join(said)
    assert "2 replies are empty, the first in " in text
    assert "data.jsonl:13" in text
    assert "documents are cut where a sequence of 32 tokens ends" in text
