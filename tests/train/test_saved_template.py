"""The chat template that a run trains with is that of its checkpoints, exports and adapters."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import outsize
from outsize.checkpoint.checkpoint_state import latest
from outsize.data.chat import CHATML_TEMPLATE, FALLBACK_TEMPLATE, ChatTemplate
from outsize.errors import CheckpointError, DataError
from outsize.functions import export
from outsize.training.run import train
from outsize.wrapped.module import runner_of
from support import make_model_dir, make_run

ASKED = [{"role": "user", "content": "question"}]
CHAT = {"messages": [*ASKED, {"role": "assistant", "content": "answer"}]}
OWN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_run(
    directory: Path,
    own: Any,
    template: str | None,
    marks: Sequence[str] = (),
    announce: Callable[[str], object] = print,
    **train_section: Any,
) -> Path:
    config = make_run(directory, train={"steps": 1, **train_section}, data={"template": template})
    (directory / "chats.jsonl").write_text((json.dumps(CHAT) + "\n") * 40)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    tokenizer.chat_template = own
    tokenizer.add_tokens(list(marks), special_tokens=True)
    tokenizer.save_pretrained(config.model.path)
    data = config.data.model_copy(update={"path": str(directory / "chats.jsonl")})
    train(config.model_copy(update={"data": data}), announce=announce)
    return directory / "run"


def template_of(directory: Path | None) -> Any:
    return AutoTokenizer.from_pretrained(directory).chat_template


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize(
    ("own", "template", "saved"),
    [
        pytest.param(None, "chatml", CHATML_TEMPLATE, id="none, another"),
        pytest.param(OWN, "chatml", CHATML_TEMPLATE, id="its own, another"),
        pytest.param({"default": OWN, "tool_use": OWN + "!"}, "chatml", CHATML_TEMPLATE, id="two, another"),
        pytest.param({"default": OWN, "tool_use": OWN + "!"}, "tool_use", OWN + "!", id="two, one of them"),
        pytest.param(None, None, FALLBACK_TEMPLATE, id="none"),
        pytest.param(OWN, None, OWN, id="its own"),
        pytest.param(
            {"default": OWN, "tool_use": OWN + "!"}, None, {"default": OWN, "tool_use": OWN + "!"}, id="two"
        ),
    ],
)
def test_checkpoints_and_exports_hold_the_template_of_training(tmp_path, own, template, saved, method):
    run = chat_run(tmp_path, own, template, method=method)
    assert template_of(latest(run)) == saved
    assert template_of(export(run, tmp_path / "out")) == saved
    if method == "lora":
        assert template_of(export(run, tmp_path / "merged", merge=True)) == saved


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("given", [None, 7, [7, 8]])
def test_text_stops_where_trained_replies_end(tmp_path, method, given):
    """A base model's own end mark is another one: without this, text goes on behind every reply."""
    model = tmp_path / "model"
    make_model_dir(model)
    path = model / "generation_config.json"
    path.unlink(missing_ok=True)
    if given is not None:
        path.write_text(json.dumps({"eos_token_id": given, "top_k": 5}))
    run = chat_run(tmp_path, None, "chatml", marks=["<|im_start|>", "<|im_end|>"], method=method)
    config = json.loads((model / "config.json").read_text())
    before = config["eos_token_id"] if given is None else given
    mark = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("<|im_end|>")
    expected = [mark, *(before if isinstance(before, list) else [] if before is None else [before])]
    places = [latest(run), export(run, tmp_path / "out", merge=method == "lora")]
    for place in places:
        saved = json.loads((place / "generation_config.json").read_text())
        assert saved["eos_token_id"] == expected
        assert given is None or saved["top_k"] == 5
        loaded = outsize.load(place, trainable=False, device="cpu")
        assert loaded.generation_config.eos_token_id == expected
        runner_of(loaded).close()


@pytest.mark.parametrize("template", ["chatml", "plain"])
def test_a_mark_of_several_tokens_is_said(tmp_path, template):
    said: list[str] = []
    chat_run(tmp_path, None, template, announce=said.append)
    assert any("no special token" in line for line in said) == (template == "chatml")


def test_what_was_trained_is_asked_with_the_template_of_training(tmp_path):
    run = chat_run(tmp_path, OWN, "chatml")
    asked = ChatTemplate(AutoTokenizer.from_pretrained(latest(run))).open(ASKED)
    assert asked == "<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n"


def test_a_run_over_text_saves_no_template(tmp_path):
    config = make_run(tmp_path, train={"steps": 1})
    train(config)
    assert template_of(latest(tmp_path / "run")) is None


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_code_of_a_tokenizer_lies_beside_what_was_trained(tmp_path, method):
    config = make_run(tmp_path, train={"steps": 1, "method": method}, model={"trust_remote_code": True})
    model = Path(config.model.path)
    (model / "tokenization_own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\nclass OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    entries = json.loads((model / "tokenizer_config.json").read_text())
    code = {"auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}}
    (model / "tokenizer_config.json").write_text(
        json.dumps({**entries, **code, "tokenizer_class": "OwnTokenizer"})
    )
    train(config)
    for place in (latest(tmp_path / "run"), export(tmp_path / "run", tmp_path / "out")):
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=True)
        assert type(tokenizer).__name__ == "OwnTokenizer"


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("change", ["removed", "edited"])
def test_what_lies_beside_a_model_is_saved_as_it_was_when_the_run_began(tmp_path, method, change):
    """Nobody looks after the directory of a model once a run of days has begun."""
    config = make_run(tmp_path, train={"steps": 2, "method": method})
    model = Path(config.model.path)
    (model / "generation_config.json").write_text('{"temperature": 0.25}')
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = {"default": OWN, "tool_use": OWN + "!"}
    tokenizer.save_pretrained(model)
    before = {path.name: path.read_bytes() for path in model.glob("tokenizer*")}

    def change_it(_: Any) -> None:
        if change == "removed":
            shutil.rmtree(model, ignore_errors=True)
            return
        for path in (*model.glob("tokenizer*"), *model.rglob("*.jinja")):
            path.write_text("{}")

    train(config, progress=change_it)
    saved = latest(tmp_path / "run")
    assert saved is not None
    assert {path.name: path.read_bytes() for path in saved.glob("tokenizer*")} == before
    assert template_of(saved) == tokenizer.chat_template
    assert json.loads((saved / "generation_config.json").read_text()) == {"temperature": 0.25}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("generation_config.json", "[]"),
        ("generation_config.json", "{"),
        ("generation_config.json", '{"early_stopping": "x"}'),
        ("generation_config.json", '{"cache_implementation": "nonsense"}'),
        ("tokenizer_config.json", '{"model_max_length": "x"}'),
    ],
)
def test_files_that_nothing_would_read_beside_what_is_saved_are_refused_before_a_step(tmp_path, name, text):
    config = make_run(tmp_path)
    path = Path(str(config.model.path)) / name
    held = json.loads(path.read_text()) if name == "tokenizer_config.json" else {}
    path.write_text(json.dumps({**held, **json.loads(text)}) if held else text)
    with pytest.raises((CheckpointError, DataError), match=name):
        train(config)
    assert latest(tmp_path / "run") is None
