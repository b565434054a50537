"""``outsize generate``: what it prints, and what it refuses."""

import io
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import zoo
from cli.command_line import status_of
from outsize.cli.text.records_text import ResumedLines, results_at
from outsize.errors import ConfigError, StorageError
from outsize.functions import export
from outsize.training.run import train
from support import make_run, save_model
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
    written = plain.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # the mark of an end within a prompt is no padding
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )
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


@pytest.mark.parametrize(
    ("home", "room", "says"),
    [
        ("disk", "64MiB", "all weights stayed on the device"),
        ("disk", "90KiB", "break-even batch"),
        ("host", "64MiB", "nothing moved"),
    ],
)
def test_what_is_said_of_weights_is_what_they_did(model: Path, home: str, room: str, says: str, capsys: Any):
    given = ("--prompt", "a", "--max-new-tokens", 5, "--home", home, "--device-memory", room)
    assert run(model, *given, "--device", "cpu") == 0
    said = capsys.readouterr().err
    kinds = ("all weights stayed on the device", "break-even batch", "nothing moved")
    assert [kind for kind in kinds if kind in said] == [says]


@pytest.mark.parametrize(("room", "stays"), [("380KiB", False), ("700KiB", True)])
def test_experts_that_came_and_those_that_stay_are_told(
    model: Path, tmp_path: Path, room: str, stays: bool, capsys: Any
):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 48, "head_dim": 16}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257}
    chosen = {"num_experts": 16, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("qwen3_moe", **sizes, **heads, **chosen, eos_token_id=None)
    torch.manual_seed(0)
    save_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32), tmp_path)
    for file in model.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    given = ("--prompt", "a", "--max-new-tokens", 8, "--home", "host", "--device", "emulated:1")
    assert run(tmp_path, *given, "--device-memory", room, "--json") == 0
    said = capsys.readouterr()
    figures = json.loads(said.out)
    experts, expert_bytes = figures["experts"], 3 * 64 * 48 * 4
    assert experts["num_experts"] == 3 * 16
    assert experts["bytes_moved"] == expert_bytes * (experts["num_uses"] - experts["num_hits"]) > 0
    assert experts["hot_bytes"] == expert_bytes * experts["num_hot"]
    assert (experts["num_hits"] > 0, experts["num_hot"] > 0, figures["num_streamed"] == 0) == (stays,) * 3
    assert "all weights stayed" not in said.err
    assert ("all weights but experts stayed on the device" in said.err) == stays
    assert f"experts: {experts['num_hits']} of {experts['num_uses']} were on the device" in said.err


def test_a_text_ends_before_a_string_that_stops_it(model: Path, capsys: Any):
    whole = resident(model, "the square", 24)
    stop = whole[8:11]
    assert run(model, "--prompt", "the square", "--max-new-tokens", 24, "--stop", stop, *ROOM, "--json") == 0
    (one,) = json.loads(capsys.readouterr().out)["written"]
    assert (one["text"], one["finish_reason"]) == (whole[: whole.index(stop)], "stop")


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


def test_many_prompts_go_to_a_file_and_a_run_goes_on(model: Path, tmp_path: Path, capsys: Any):
    """Each is drawn by a seed of its own, so that those behind a run that ended are what they would have been."""
    data, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"number {n}"}) for n in range(7)))
    asked = [
        "--prompts",
        data,
        "--out",
        out,
        "--max-new-tokens",
        6,
        "--sample",
        "--seed",
        3,
        "--home",
        "disk",
    ]
    asked += ["--device", "cpu", "--device-memory", "140KiB", "--json"]
    assert run(model, *asked, "--in-flight", 4) == 0
    whole, figures = out.read_text(), json.loads(capsys.readouterr().out)
    assert figures["most_rows"] > 1
    assert figures["num_passes"] < 7 * 6
    assert "written" not in figures
    assert [json.loads(line)["prompt"] for line in whole.splitlines()] == [f"number {n}" for n in range(7)]
    out.write_text("".join(f"{line}\n" for line in whole.splitlines()[:3]) + '{"prom')
    assert run(model, *asked, "--in-flight", 1) == 0
    assert out.read_text() == whole
    assert json.loads(capsys.readouterr().out)["num_prompts"] == 4
    assert run(model, *asked) == 0  # nothing is left to do
    assert out.read_text() == whole
    assert run(model, *asked, "--seed", 4) == 2
    assert "was made with other settings (seed)" in capsys.readouterr().err
    data.write_text(data.read_text().replace("number 6", "letter g"))
    assert run(model, *asked) == 2
    assert "was made with other settings (prompts_digest)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no prompt"),
        (["--json-lines", "--out", "x", "--prompt", "a"], "choose one"),
        (["--chat", "--out", "x"], "there is no prompt"),
        (["--prompt", "a", "--max-new-tokens", 0], "at least 1"),
        (["--prompt", "a", "--batch-size", 0], "at least 1"),
        (["--prompt", "a", "--stop", ""], "--stop is an empty string"),
        (["--prompt", "a", "--sample", "--temperature", 0], "above zero"),
        (["--prompt", ""], "empty prompt"),
        (["--prompt", "a" * 60, "--max-new-tokens", 5], "64 positions"),
        (["--prompts", "no/such/file"], "cannot be read"),
        (
            ["--prompt", "a", "--max-new-tokens", 4, "--home", "disk", "--device-memory", "10KiB"],
            "do not fit",
        ),
        (["--prompt", "a", "--max-new-tokens", 4, "--home", "host", "--device-memory", "1KiB"], "do not fit"),
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


def test_a_conversation_is_written_by_the_template_of_the_tokenizer(
    model: Path, monkeypatch: Any, capsys: Any
):
    """Without a template by the plain one; the second message comes with the first and its reply."""
    plain = "### user:\n{}\n\n### assistant:\n"
    tokenizer = AutoTokenizer.from_pretrained(model)
    shared = ["--max-new-tokens", 2, "--home", "host", *ROOM]
    assert run(model, "--chat", "--prompt", "a", *shared, "--json") == 0
    (one,) = json.loads(capsys.readouterr().out)["written"]
    assert one["prompt"] == plain.format("a")
    assert one["text"] == resident(model, one["prompt"], 2)
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n\nb\n"))
    assert run(model, "--chat", "--batch-size", 2, *shared) == 0
    said, noted = capsys.readouterr()
    assert "note: --batch-size has no effect in a conversation" in noted
    closed = f"{plain.format('a')}{one['text']}{tokenizer.eos_token or ''}\n{plain.format('b')}"
    assert said == f"{one['text']}\n{resident(model, closed, 2)}\n"


def test_prompts_of_records_and_of_standard_input(model: Path, tmp_path: Path, monkeypatch: Any, capsys: Any):
    records = [{"prompt": "the square"}, {"prompt": "a"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setattr("sys.stdin", io.StringIO("the square\na\n"))
    shared = ["--max-new-tokens", 3, "--home", "host", *ROOM, "--json-lines"]
    printed = []
    for source in (tmp_path / "p.jsonl", "-"):
        assert run(model, "--prompts", source, *shared) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert [json.loads(line)["text"] for line in printed[0].splitlines()] == [
        resident(model, prompt, 3) for prompt in ("the square", "a")
    ]
    (tmp_path / "p.jsonl").write_text("[1]\n")
    assert run(model, "--prompts", tmp_path / "p.jsonl", *shared) == 2
    assert "p.jsonl:1: a record needs 'prompt'" in capsys.readouterr().err


def test_a_record_that_is_a_conversation_keeps_its_system_message_and_tools(
    model: Path, tmp_path: Path, capsys: Any, caplog: Any
):
    copy, file = Path(shutil.copytree(model, tmp_path / "model")), tmp_path / "p.jsonl"
    (copy / "chat_template.jinja").write_text(
        "{% for t in tools or [] %}[{{ (t.function or t).name }}]{% endfor %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    )
    user, tools = [{"role": "user", "content": "hi"}], [{"name": "add"}]
    records: list[tuple[list[str], dict[str, Any], str]] = [
        ([], {"messages": user, "tools": tools, "system": "brief"}, "[add]system:brief;user:hi;"),
        ([], {"messages": user, "tools": json.dumps(tools)}, "[add]user:hi;"),
        ([], {"conversations": [{"from": "human", "value": "hi"}]}, "user:hi;"),
        ([], {"prompt": user, "functions": tools, "answer": "2"}, "[add]user:hi;"),
        ([], {"prompt": "hi", "system": "brief"}, "system:brief;user:hi;"),
        (["--chat", "--system", "brief"], {"messages": user, "tools": tools}, "[add]system:brief;user:hi;"),
        ([], {"prompt": " "}, " "),
    ]
    shared = ["--max-new-tokens", 1, "--home", "host", *ROOM, "--json"]
    for how, record, want in records:
        file.write_text(json.dumps(record))
        assert run(copy, *how, "--prompts", file, *shared) == 0
        assert json.loads(capsys.readouterr().out)["written"][0]["prompt"] == want
    assert "these fields are not read (records that have them): answer (1)" in caplog.text
    refused: list[tuple[list[str], dict[str, Any], str]] = [
        ([], {"prompt": "hi", "tools": tools}, "p.jsonl:1: tools: beside a 'prompt' that is a text"),
        (["--chat", "--system", "brief"], {"messages": user, "system": "long"}, "--system says another"),
    ]
    for how, record, message in refused:
        file.write_text(json.dumps(record))
        assert run(copy, *how, "--prompts", file, *shared) == 2
        assert message in capsys.readouterr().err


def test_tokens_are_drawn_as_transformers_draws_them(model: Path, capsys: Any):
    drawing = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05}
    flags = [word for name, value in drawing.items() for word in (f"--{name.replace('_', '-')}", value)]
    shared = ["--prompt", "the square", "--max-new-tokens", 6, "--home", "host", *ROOM]
    assert run(model, "--sample", "--seed", 3, *flags, *shared, "--json") == 0
    (one,) = json.loads(capsys.readouterr().out)["written"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = torch.tensor([tokenizer("the square")["input_ids"]])
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(3)
    wanted = plain.generate(ids, max_new_tokens=6, do_sample=True, pad_token_id=0, **drawing)
    assert one["text"] == tokenizer.decode(wanted[0, ids.shape[1] :], skip_special_tokens=True)
    assert run(model, *flags, "--seed", 3, *shared) == 0
    assert capsys.readouterr().err.count("has no effect without --sample") == len(drawing) + 1
    assert run(model, "--sample", "--top-p", 1.5, *shared) == 2
    assert "--top-p is 1.5; it has to be above 0 and at most 1" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_directory_of_a_run_is_a_model(method: str, tmp_path: Path, capsys: Any):
    """Of a run of adapters, and of the adapters that it exports, these stand in their model as they are."""
    train(make_run(tmp_path, train={"method": method, "steps": 2}, optimizer={"lr": 0.1}))
    whole = export(tmp_path / "run", tmp_path / "whole", merge=method == "lora")
    places = [tmp_path / "run", whole]
    if method == "lora":
        places.append(export(tmp_path / "run", tmp_path / "adapters"))
    texts = []
    for place in places:
        assert run(place, "--prompt", "ab", "--max-new-tokens", 6, "--home", "host", *ROOM, "--json") == 0
        texts.append(json.loads(capsys.readouterr().out)["written"][0]["text"])
    assert len(set(texts)) == 1
    assert texts[0] == resident(whole, "ab", 6)


def test_weights_that_do_not_move_are_said_to_rest_in_host_memory(model: Path, capsys: Any):
    """On a processor a host home is where the model computes, and a budget of the device does not bound it."""
    shared = ["--prompt", "a", "--max-new-tokens", 2, "--device", "cpu"]
    assert run(model, *shared, "--device-memory", "1MiB", "--home", "host") == 0
    assert "weights were used where they rest, in host memory" in capsys.readouterr().err
    assert run(model, *shared, "--device-memory", "64MiB", "--home", "disk") == 0
    assert "weights were used where they rest" not in capsys.readouterr().err


ONE = ["--max-new-tokens", 2, "--home", "host", *ROOM]


def prompts_of(capsys: Any) -> list[str]:
    return [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()]


def test_lines_of_a_file_end_at_line_feeds_alone(model: Path, tmp_path: Path, capsys: Any):
    """Of a record, and of a text; a byte order mark is no part of either."""
    said = "a\u2028b\u2029c\x85d"
    for mark in ("", "\ufeff"):
        record = mark + json.dumps({"prompt": said}, ensure_ascii=False) + "\n"
        (tmp_path / "x.jsonl").write_text(record, encoding="utf-8")
        (tmp_path / "x.txt").write_bytes(f"{mark}one\x0ctwo\r\nthree\u2028four\n\n".encode())
        assert run(model, "--prompts", tmp_path / "x.jsonl", *ONE, "--json-lines") == 0
        assert prompts_of(capsys) == [said]
        assert run(model, "--prompts", tmp_path / "x.txt", *ONE, "--json-lines") == 0
        assert prompts_of(capsys) == ["one\x0ctwo", "three\u2028four"]


def test_what_is_no_text_is_refused_wherever_it_comes_from(
    model: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
):
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "emoji \ud83d"}]}))
    (tmp_path / "deep.jsonl").write_text("[" * 200_000)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    piped = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="ascii", errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", piped)
    for given, message in (
        (["--prompt", "caf\udce9"], "at character 3 is an unpaired surrogate"),
        (["--prompts", tmp_path / "x.jsonl"], "unpaired surrogate, '\\ud83d'"),
        (["--prompts", tmp_path / "deep.jsonl"], "deep.jsonl:1: not valid JSON"),
        (["--prompts", tmp_path / "latin.txt"], "name a file in UTF-8"),
        (["--prompts", "-"], "name a file in UTF-8"),
    ):
        assert run(model, *given, *ONE) == 2
        assert message in capsys.readouterr().err


def test_a_conversation_has_one_mark_of_its_beginning(tmp_path: Path, capsys: Any):
    """The template writes it, and the tokenizer would once more."""
    model = tiny_model(tmp_path / "model", num_hidden_layers=2)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{{ '<eos>' }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.bos_token = "<eos>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 0)]
    )
    tokenizer.save_pretrained(model)
    records = tmp_path / "m.jsonl"
    records.write_text(json.dumps({"messages": [{"role": "user", "content": "a b"}]}) + "\n")
    texts = []
    for how in (["--chat"], []):
        assert (
            run(model, *how, "--prompts", records, "--max-new-tokens", 8, "--home", "host", *ROOM, "--json")
            == 0
        )
        texts.append(json.loads(capsys.readouterr().out)["written"])
    assert texts[0] == texts[1]
    assert texts[0][0]["prompt"] == "<eos>a b"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_stream_that_cannot_write_a_character_writes_another(
    model: Path, tmp_path: Path, monkeypatch: Any, errors: str, as_json: bool
):
    (tmp_path / "p.txt").write_text("é😀\n", encoding="utf-8")
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii", errors=errors))
    shown = ["--json"] if as_json else ["--batch-size", 2]
    assert run(model, "--prompts", tmp_path / "p.txt", *ONE, *shown) == 0
    said = raw.getvalue()
    assert json.loads(said)["written"][0]["prompt"] == "é😀" if as_json else said.startswith(b"??")


def test_a_full_disk_behind_a_redirect_is_said(model: Path, capsys: Any, monkeypatch: Any):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    assert status_of("inspect", model) == 1
    assert "could not be written to stdout; is its disk full?" in capsys.readouterr().err


def test_the_checkpoints_own_temperature_holds_where_none_is_said(model: Path, tmp_path: Path, capsys: Any):
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    (copy / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.01}))
    texts = []
    for how in ([], ["--sample"], ["--sample", "--temperature", 1.0]):
        assert run(copy, "--prompt", "a", *how, "--max-new-tokens", 8, "--home", "host", *ROOM, "--json") == 0
        texts.append(json.loads(capsys.readouterr().out)["written"][0]["text"])
    assert texts[0] == texts[1] != texts[2]


def test_two_processes_do_not_write_one_file(model: Path, tmp_path: Path, capsys: Any):
    out = tmp_path / "out.jsonl"
    given = ("--prompt", "a", "--out", out, "--max-new-tokens", 2, *ROOM)
    with results_at(out, {"of": "another"}):
        for lines in ("", "{}\n"):
            out.write_text(lines)
            assert run(model, *given) == 2
            assert f"{out} is written by another process now" in capsys.readouterr().err
        with pytest.raises(StorageError), results_at(out, {}):
            pass
    out.write_text("")
    assert run(model, *given) == 0


def test_results_of_another_kind_are_refused_and_what_a_killed_run_began_is_not(tmp_path: Path):
    lines, directory = tmp_path / "lines.jsonl", tmp_path / "directory"
    lines.touch()  # killed between this and the note beside it
    with results_at(lines, {}), results_at(directory, {}, in_files=True):
        pass
    for place, in_files in ((lines, True), (directory, False)):
        with (
            pytest.raises(ConfigError, match="choose another --out"),
            results_at(place, {}, in_files=in_files),
        ):
            pass
    others = tmp_path / "others.jsonl"
    others.write_text("{}")
    with pytest.raises(ConfigError, match="has not made it"), results_at(others, {}):
        pass


def test_lines_that_others_take_away_end_what_writes_them(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    lines = ResumedLines(out)
    lines.add({"a": "é"})
    lines.add({"b": 2})
    assert [json.loads(line) for line in out.read_text().splitlines()] == [{"a": "é"}, {"b": 2}]
    out.unlink()
    with pytest.raises(StorageError, match="changed or removed while this command wrote it"):
        lines.add({"c": 3})
