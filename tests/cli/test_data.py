"""``outsize data``: what would be trained, from the files of a model alone."""

import json
from pathlib import Path

import pytest

from cli.command_line import status_of
from support import make_model_dir


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    model = make_model_dir(tmp_path / "model")
    records = [{"prompt": "p" * (3 * i), "completion": "c" * 5} for i in range(1, 21)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for weights in model.glob("*.safetensors"):
        weights.unlink()  # nothing of them is read
    return ["--model", str(model), "--data", str(tmp_path / "a.jsonl"), "--seq-len", "32", "--steps", "10"]


def test_what_is_cut_and_how_long_documents_are_is_shown(paths, capsys):
    assert status_of("data", *paths, "--set", "data.pack=none") == 0
    out = capsys.readouterr().out
    assert "data: format prompt_completion (detected, fields prompt, completion), 1 file" in out
    assert "documents are cut at data.seq_len=32 tokens (the longest has 66)" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("<=")]
    assert [(row[1], row[2]) for row in rows] == [("16", "3"), ("32", "5"), ("64", "11"), ("128", "1")]
    assert "tokens/s by 4 (data.workers); " in out
    assert "20 sequences of 32 tokens per epoch, 20.0 steps; the run takes 0.50 epochs" in out


def test_the_same_as_an_object(paths, capsys):
    assert status_of("data", *paths, "--set", "data.pack=none", "--set", "train.epochs=3", "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["sources"][0]["num_documents"] == sum(b["num_documents"] for b in found["lengths"]) == 20
    assert found["kept"]["num_trained"] == sum(b["num_trained"] for b in found["lengths"])
    assert found["epochs"] == 3.0
    assert [rate["workers"] for rate in found["loader"]] == [1, 2, 4]
    assert all(rate["tokens_per_s"] > 0 for rate in found["loader"])
    assert found["enough_workers"] in (1, 2, 4)


def test_nothing_left_to_train_is_refused(paths, capsys):
    assert status_of("data", *paths, "--seq-len", "3", "--set", "data.pack=none") == 2
    assert "DataError: no token is trained: what would be is cut off" in capsys.readouterr().err
