"""``outsize score``: texts in, a line or a file of numbers for each."""

import json
import math
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli.command_line import status_of
from outsize import files
from outsize.units import format_bytes
from support import make_model_dir

pytestmark = pytest.mark.filterwarnings("ignore")
run = partial(status_of, "score")
ROOM = ("--home", "disk", "--device", "cpu", "--device-memory", "64MiB", "--dtype", "fp32", "--json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("score") / "tiny", max_position_embeddings=256)


def test_completions_are_scored_and_a_run_goes_on(model: Path, tmp_path: Path, capsys: Any):
    records = [{"prompt": f"number {n} is ", "completion": " great"} for n in range(5)]
    data, out = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    data.write_text("\n".join(json.dumps(one) for one in [*records, {"text": "a text"}]))
    assert run(model, "--data", data, "--out", out, *ROOM) == 0
    whole, said = out.read_text(), json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in whole.splitlines()]
    resident, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model).eval(),
        AutoTokenizer.from_pretrained(model),
    )
    ids = tokenizer("number 0 is  great")["input_ids"]
    start = len(tokenizer("number 0 is")["input_ids"])
    with torch.no_grad():
        logprobs = resident(torch.tensor([ids])).logits[0].log_softmax(-1)
    want = [float(logprobs[place - 1, ids[place]]) for place in range(start, len(ids))]
    assert lines[0]["token_logprobs"] == pytest.approx(want, abs=1e-5)
    assert said["perplexity"] == pytest.approx(math.exp(-said["logprob"] / said["num_scored_tokens"]))
    # As a loss of power leaves it: a block was never written, one behind it was.
    first = "".join(line + "\n" for line in whole.splitlines()[:3])
    out.write_text(first + '{"logpr' + "\0" * 60 + "\n" + whole.splitlines()[5] + "\n")
    assert run(model, "--data", data, "--out", out, *ROOM) == 0
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["logprob"] for one in again] == pytest.approx([one["logprob"] for one in lines], abs=1e-5)
    assert json.loads(capsys.readouterr().out)["num_texts"] == 3
    assert run(model, "--data", data, "--out", out, "--want", "embeddings", *ROOM) == 2
    assert "was made with other settings (want)" in capsys.readouterr().err


def test_results_of_other_data_or_other_weights_do_not_come_behind_those_that_are_there(
    model: Path, tmp_path: Path, capsys: Any
):
    """Data of the same size, weights of the same name, and notes of a version that noted neither."""
    data, out, copy = tmp_path / "data.jsonl", tmp_path / "out.jsonl", tmp_path / "model"
    shutil.copytree(model, copy)
    data.write_text(json.dumps({"text": "a text"}))
    asked = (copy, "--data", data, "--out", out, *ROOM)
    assert run(*asked) == 0
    data.write_text(json.dumps({"text": "b text"}))
    assert run(*asked) == 2
    assert "was made with other settings (data_digest)" in capsys.readouterr().err
    data.write_text(json.dumps({"text": "a text"}))
    assert run(*asked) == 0  # nothing is left to do
    os.utime(copy / "model.safetensors", (1, 1))
    assert run(*asked) == 2
    assert "was made with other settings (model_files)" in capsys.readouterr().err
    note = tmp_path / "out.jsonl.made-with.json"
    noted = json.loads(note.read_text())
    former = {key: value for key, value in noted.items() if key not in ("data_digest", "model_files")}
    note.write_text(json.dumps(former | {"data_bytes": "18"}))
    assert run(*asked) == 2
    assert "did not note data_digest and model_files" in capsys.readouterr().err


def test_a_text_file_is_scored_in_pieces_and_states_are_files(model: Path, tmp_path: Path, capsys: Any):
    data = tmp_path / "data.txt"
    data.write_text("once upon a time there was a text of some length")
    assert run(model, "--data", data, "--out", tmp_path / "out", "--context", 16, *ROOM) == 0
    tokens = len(AutoTokenizer.from_pretrained(model)(data.read_text())["input_ids"])
    assert json.loads(capsys.readouterr().out)["num_scored_tokens"] == tokens - 1
    done: list[str] = []

    class Watched(files.System):
        def fsync(self, descriptor: int) -> None:
            done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")

        def rename(self, source: Path, target: Path) -> None:
            done.append(f"rename {source.name}")
            super().rename(source, target)

    for want in ("hidden", "logits"):
        place = tmp_path / want
        with files.replaced(Watched()):
            assert run(model, "--data", data, "--out", place, "--context", 16, "--want", want, *ROOM) == 0
        named = done.index("rename 00000000.safetensors.partial")
        assert done[named - 1] == "sync 00000000.safetensors.partial"
        assert load_file(place / "00000000.safetensors")[want].shape[0] == (16 if want == "hidden" else 15)
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}))
    assert run(model, "--data", tmp_path / "none.txt", "--out", tmp_path / "x", *ROOM) == 2
    assert run(model, "--data", chats, "--out", tmp_path / "x", *ROOM) == 2
    assert "of a conversation, put the reply to be scored there" in capsys.readouterr().err
    # Nothing was written, so other settings may.
    assert run(model, "--data", data, "--out", tmp_path / "x", "--context", 16, *ROOM) == 0


def test_a_completion_is_scored_whole(
    model: Path, tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture
):
    merging = shutil.copytree(model, tmp_path / "merging")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["import"])
    tokenizer.save_pretrained(merging)

    def status(name: str, *records: dict[str, str]) -> int:
        data = tmp_path / f"{name}.jsonl"
        data.write_text("\n".join(map(json.dumps, records)))
        return run(merging, "--data", data, "--out", tmp_path / f"{name}.out", *ROOM)

    assert status("merged", {"prompt": "x imp", "completion": "ort", "label": 1}) == 0
    assert "these fields are not read (records that have them): label (1)" in caplog.text
    assert (
        run(model, "--data", tmp_path / "merged.jsonl", "--out", tmp_path / "x", "--context", 9, *ROOM) == 2
    )
    assert "--context cuts a text file into pieces" in capsys.readouterr().err
    (line,) = map(json.loads, (tmp_path / "merged.out").read_text().splitlines())
    assert (len(line["token_logprobs"]), line["is_greedy"]) == (1, False)


def test_records_without_a_token_are_said_and_have_empty_results(
    model: Path, tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture
):
    """A line each, so that lines are those of the data, and a run goes on behind them; `logits` and such as files."""
    data, out = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    records = [
        {"prompt": "a", "completion": ""},
        {"prompt": "a", "completion": " b"},
        {"text": ""},
        {"text": "a b"},
    ]
    data.write_text("\n".join(map(json.dumps, records)))
    assert run(model, "--data", data, "--out", out, *ROOM) == 0
    assert f"of 4 texts 2 have no token to score, or none before the first: {data}:1, {data}:3" in caplog.text
    said, lines = (
        json.loads(capsys.readouterr().out),
        [json.loads(line) for line in out.read_text().splitlines()],
    )
    assert [one["logprob"] is None for one in lines] == [True, False, True, False]
    assert (lines[0]["is_greedy"], lines[0]["token_logprobs"]) == (None, [])
    assert (said["num_done"], said["num_scored_tokens"]) == (
        4,
        sum(len(one["token_logprobs"]) for one in lines),
    )
    out.write_text("".join(line + "\n" for line in out.read_text().splitlines()[:1]))
    assert run(model, "--data", data, "--out", out, *ROOM) == 0
    again = [json.loads(line)["logprob"] for line in out.read_text().splitlines()]
    assert again == pytest.approx([one["logprob"] for one in lines])
    for want, empty in (("logits", 2), ("hidden", 1)):
        place = tmp_path / want
        assert run(model, "--data", data, "--out", place, "--want", want, *ROOM) == 0
        sizes = [load_file(place / f"{number:08}.safetensors")[want].numel() for number in range(4)]
        assert sizes.count(0) == empty
    data.write_text(json.dumps({"text": ""}))
    assert run(model, "--data", data, "--out", tmp_path / "x", *ROOM) == 2
    assert "of 1 texts 1 have no token" in " ".join(capsys.readouterr().err.split())


def test_embeddings_of_a_model_of_sentence_transformers_are_said_to_be_means(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    data, copy = tmp_path / "data.jsonl", Path(shutil.copytree(model, tmp_path / "model"))
    data.write_text(json.dumps({"text": "once"}))
    for number, names in enumerate([(), ("modules.json",)]):
        for name in names:
            (copy / name).write_text("[]")
        assert run(copy, "--data", data, "--out", tmp_path / str(number), "--want", "embeddings", *ROOM) == 0
        assert ("by none of its modules" in caplog.text) is bool(names)


def test_what_files_take_is_said_before_and_refused_where_there_is_no_room(
    model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"text": "once upon a time"}))
    for number, more in enumerate([("logits",), ("logits", "--top-k", 4), ("hidden",)]):
        place = tmp_path / str(number)
        assert run(model, "--data", data, "--out", place, "--want", *more, *ROOM) == 0
        told = capsys.readouterr().err
        tensors = load_file(place / "00000000.safetensors")
        written = sum(
            tensors[name].nbytes for name in ("logits", "hidden", "indices", "mass") if name in tensors
        )
        assert f"take {format_bytes(written)} in {place}" in " ".join(told.split())
    monkeypatch.setattr(files, "free_bytes", lambda path: 100)
    assert run(model, "--data", data, "--out", tmp_path / "x", "--want", "logits", *ROOM) == 2
    assert "100 B are free" in " ".join(capsys.readouterr().err.split())
