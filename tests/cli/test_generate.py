"""``outsize generate``: what it prints, and what it refuses."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import zoo
from cli.command_line import status_of
from support import save_model
from tiny import tiny_model

ROOM = ["--device", "cpu", "--device-memory", "64MiB"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=3)


run = partial(status_of, "generate")


def resident(model: Path, prompt: str, count: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    written = plain.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("home", ["host", "disk"])
def test_it_writes_what_the_resident_model_writes(model: Path, home: str, capsys: Any):
    prompts = ["--prompt", "the square", "--prompt", "a"]
    assert (
        run(model, *prompts, "--max-new-tokens", 5, "--batch-size", 2, "--home", home, *ROOM, "--json") == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [one["prompt"] for one in found["written"]] == ["the square", "a"]
    assert [one["text"] for one in found["written"]] == [resident(model, p, 5) for p in ("the square", "a")]
    assert (found["num_tokens"], found["num_passes"]) == (10, 5)
    assert (found["bytes_per_pass"] > 0) == (home == "disk")


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_texts_of_batches_are_printed_once(model: Path, num_prompts: int, capsys: Any):
    """Also where the last batch, or the only one, holds a single prompt."""
    prompts = ["the square", "a", "b"][:num_prompts]
    given = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert run(model, *given, "--max-new-tokens", 5, "--batch-size", 2, "--home", "host", *ROOM) == 0
    assert capsys.readouterr().out == "".join(f"{p}{resident(model, p, 5)}\n\n" for p in prompts)


def resident_ids(model: Path) -> dict[str, list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = {}
    for prompt in ("the square", "a"):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        found[prompt] = plain.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :].tolist()
    return found


def test_a_text_ends_at_any_of_the_marks_that_generation_stops_at(model: Path, tmp_path: Path, capsys: Any):
    """What pads a row that ended first is no token of it."""
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    plain = resident_ids(copy)
    other = next(token for token in plain["a"][1:] if token not in plain["the square"])
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, other]}))
    prompts = ["--prompt", "the square", "--prompt", "a", "--batch-size", 2, "--max-new-tokens", 5]
    assert run(copy, *prompts, "--home", "host", *ROOM, "--json") == 0
    written = json.loads(capsys.readouterr().out)["written"]
    assert [one["num_tokens"] for one in written] == [5, plain["a"].index(other) + 1]


def test_a_tight_device_streams_and_says_where_it_breaks_even(model: Path, capsys: Any):
    arguments = ["--prompt", "a", "--max-new-tokens", 6, "--home", "disk", "--device", "cpu"]
    assert run(model, *arguments, "--device-memory", "100KiB", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_streamed"] > 0
    assert found["break_even_batch"] > 0
    assert run(model, *arguments, "--device-memory", "100KiB") == 0
    said = capsys.readouterr()
    assert said.out == resident(model, "a", 6) + "\n"
    assert "break-even batch" in said.err


def test_prompts_come_from_a_file_and_sampling_repeats(model: Path, tmp_path: Path, capsys: Any):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n", encoding="utf-8")
    written = []
    for seed in (1, 1, 2):
        chosen = ["--sample", "--temperature", 2.0, "--seed", seed, "--max-new-tokens", 8]
        assert run(model, "--prompts", file, *chosen, "--home", "disk", *ROOM, "--json") == 0
        written.append(json.loads(capsys.readouterr().out)["written"])
    assert [one["prompt"] for one in written[0]] == ["one", "two"]
    assert written[0] == written[1] != written[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no prompt"),
        (["--prompt", "a", "--max-new-tokens", 0], "at least 1"),
        (["--prompt", "a", "--batch-size", 0], "at least 1"),
        (["--prompt", "a", "--sample", "--temperature", 0], "above zero"),
        (["--prompt", ""], "empty prompt"),
        (["--prompt", "a" * 60, "--max-new-tokens", 5], "64 positions"),
        (["--prompts", "no/such/file"], "cannot be read"),
        (
            ["--prompt", "a", "--max-new-tokens", 4, "--home", "disk", "--device-memory", "10KiB"],
            "do not fit",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_is_refused_with_advice(model: Path, arguments: list[Any], message: str, capsys: Any):
    assert run(model, *arguments, "--device", "cpu") == 2
    assert message in capsys.readouterr().err


def test_a_model_that_writes_no_text_is_refused(tmp_path: Path, capsys: Any):
    save_model(zoo.build("bert"), tmp_path / "bert")
    assert run(tmp_path / "bert", "--prompt", "a", *ROOM) == 2
    assert "writes no text" in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path, capsys: Any):
    save_model(zoo.build("llama"), tmp_path / "llama")
    assert run(tmp_path / "llama", "--prompt", "a", *ROOM) == 2
    assert "tokenizer" in capsys.readouterr().err
