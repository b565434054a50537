"""Preferences as the world writes them: what each becomes, and what TRL's own trainer makes of the same records."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.conftest import make_tokenizer
from objectives.test_objectives import make_run
from outsize.data.chat import ChatTemplate
from outsize.errors import DataError
from outsize.objectives.objective_records import as_dataset, as_read, as_texts, begun_once, read_rows
from outsize.objectives.recipes import RECIPES

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("default")  # those of TRL are its own

Row = dict[str, Any]


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> Row:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "s"}
PAIR = {"prompt": [user("q")], "chosen": [said("good")], "rejected": [said("bad")]}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def calls(**arguments: Any) -> list[Row]:
    return [{"type": "function", "function": {"name": "look", "arguments": arguments}}]


@pytest.fixture
def read(tmp_path: Path):
    def read(objective: str, *records: Row, **options: Any) -> tuple[list[Row], list[str]]:
        config = make_run(tmp_path, objective)
        path = Path(config.data.path).with_suffix(".jsonl")
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        data = config.data.model_copy(update={"path": str(path), **options})
        notes: list[str] = []
        rows = read_rows(
            config.model_copy(update={"data": data}), objective, RECIPES[objective], notes.append
        )
        return rows, notes

    return read


SHAPES = {
    "messages": PAIR,
    "one message without a list": {**PAIR, "chosen": said("good"), "rejected": said("bad")},
    "messages as JSON text": {
        "messages": json.dumps([user("q")]),
        "chosen": [said("good")],
        "rejected": [said("bad")],
    },
    "cells of JSON text": {
        "prompt": json.dumps([user("q")]),
        "chosen": json.dumps([said("good")]),
        "rejected": json.dumps([said("bad")]),
    },
    "no prompt": {"chosen": [user("q"), said("good")], "rejected": [user("q"), said("bad")]},
    "the prompt once more": {
        **PAIR,
        "chosen": [user("q"), said("good")],
        "rejected": [user("q"), said("bad")],
    },
    "a prompt of text, once more": {
        "prompt": "q",
        "chosen": [user("q"), said("good")],
        "rejected": [user("q"), said("bad")],
    },
    "a prompt of text": {"prompt": "q", "chosen": [said("good")], "rejected": [said("bad")]},
    "answers of text": {"prompt": [user("q")], "chosen": "good", "rejected": "bad"},
    "a conversation of ShareGPT": {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "good"},
        "rejected": {"from": "gpt", "value": "bad"},
    },
    "answers of ShareGPT": {
        "prompt": [{"from": "human", "value": "q"}],
        "chosen": [{"from": "gpt", "value": "good"}],
        "rejected": [{"from": "gpt", "value": "bad"}],
    },
    "a conversation beside texts": {"messages": [user("q")], "chosen": "good", "rejected": "bad"},
    "Alpaca": {"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"},
}


@pytest.mark.parametrize("objective", ["dpo", "orpo", "reward"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_way_to_write_a_preference_is_one_preference(read, objective: str, shape: str):
    rows, notes = read(objective, SHAPES[shape])
    want = SHAPES["no prompt"] if objective == "reward" and shape == "no prompt" else PAIR
    assert (rows, notes) == ([want], [])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_system_prompt_beside_a_preference_begins_its_prompt(read, shape: str):
    rows, notes = read("dpo", {**SHAPES[shape], "system": "s"})
    assert (rows, notes) == ([{**PAIR, "prompt": [SYSTEM, user("q")]}], [])


def test_a_system_prompt_makes_conversations_of_all_texts(read):
    pair = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    assert read("dpo", pair)[0] == [pair]
    assert read("dpo", {**pair, "system": "s"}, {**pair, "system": ""})[0] == [
        {**PAIR, "prompt": [SYSTEM, user("q")]},
        PAIR,
    ]


def test_alpaca_keeps_its_input_and_history(read):
    record = {"instruction": "i", "input": "c", "history": [["a", "b"]], "chosen": "good", "rejected": "bad"}
    assert read("dpo", record)[0][0]["prompt"] == [user("a"), said("b"), user("i\nc")]


KTO = {
    "prompt and completion": {"prompt": [user("q")], "completion": [said("a")], "label": True},
    "a conversation": {"messages": [user("q"), said("a")], "label": True},
    "a conversation of ShareGPT": {
        "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
        "kto_tag": True,
    },
    "a completion that begins with the prompt": {"completion": [user("q"), said("a")], "label": "true"},
    "Alpaca": {"instruction": "q", "output": "a", "kto_tag": True},
    "texts with a message": {"prompt": "q", "completion": said("a"), "label": 1},
}


@pytest.mark.parametrize("shape", KTO)
def test_every_way_to_write_a_judged_answer_is_one(read, shape: str):
    assert read("kto", KTO[shape]) == ([KTO["prompt and completion"]], [])


@pytest.mark.parametrize("objective", ["dpo", "kto", "reward"])
def test_calls_tools_and_arguments_of_the_template_are_kept(read, objective: str):
    more = {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}}
    call = said("", tool_calls=calls(city="Paris"))
    record = {"prompt": [user("q")], "chosen": [{**call, "content": None}], "rejected": [said("bad")], **more}
    if objective == "kto":
        record = {"prompt": [user("q")], "completion": [{**call, "content": None}], "label": True, **more}
    (row,), notes = read(objective, record)
    assert row["completion" if objective == "kto" else "chosen"] == [call]
    assert json.loads(row["tools"]) == TOOLS
    assert row["chat_template_kwargs"] == {"enable_thinking": False}
    assert notes == []
    rows, _ = read(objective, record, {**record, "tools": json.dumps(TOOLS)}, {**record, "tools": None})
    assert [row["tools"] for row in rows] == [json.dumps(TOOLS)] * 2 + [None]


def test_messages_come_out_of_a_dataset_as_they_went_in():
    rows = [
        {**PAIR, "chosen": [said("", tool_calls=calls(city="Paris"))]},
        {**PAIR, "chosen": [said("", tool_calls=calls(days=3, unit={"name": "C"}))]},
        {**PAIR, "chosen": [said("", tool_calls=calls(days="three", unit="C"))]},
    ]
    assert list(as_dataset(rows)) == rows
    options = ({}, {"enable_thinking": False}, {"effort": "high", "python_tools": [{"a": 1}, "b"]})
    rows = [{**row, "chat_template_kwargs": each} for row, each in zip(rows, options, strict=True)]
    assert list(as_dataset(rows)) == rows


def test_records_without_arguments_of_the_template_have_none_beside_others(read):
    options = {"enable_thinking": False}
    rows, _ = read("dpo", {**PAIR, "chat_template_kwargs": options}, PAIR)
    assert [row["chat_template_kwargs"] for row in rows] == [options, {}]


def test_what_a_template_does_not_read_of_a_preference_is_told_or_refused(read, caplog):
    chat = ChatTemplate(
        make_tokenizer("{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}")
    )
    (row,), _ = read("dpo", {**PAIR, "tools": TOOLS, "chat_template_kwargs": {"effort": "high"}})
    assert as_read(chat, row, "f") == row
    told = ("reads no effort", "leaves out the tools that a record offers")
    assert [part in line for part, line in zip(told, caplog.messages, strict=True)] == [True, True]
    with pytest.raises(DataError, match="sets add_generation_prompt, which training decides"):
        as_read(chat, {**row, "chat_template_kwargs": {"add_generation_prompt": True}}, "f")


def test_fields_of_messages_that_a_template_does_not_read_are_told_without_tools_as_well(read, caplog):
    chat = ChatTemplate(
        make_tokenizer("{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}")
    )
    thought = said("good", reasoning_content="so it is")
    (row,), _ = read("dpo", {**PAIR, "prompt": [{**user("q"), "name": "Ann"}], "chosen": [thought]})
    assert as_read(chat, row, "f") == row
    told = ("leaves out the reasoning of replies", "leaves out the field 'name' of messages of the role user")
    assert [part in line for part, line in zip(told, caplog.messages, strict=True)] == [True, True]


def test_calls_and_tools_become_the_tokens_that_trl_makes_of_the_same_records(read):
    tokenizer = make_tokenizer((Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text())
    call = {"role": "assistant", "content": None, "tool_calls": calls(city="PARIS")}
    record = {**PAIR, "chosen": [call], "tools": TOOLS}
    rows, _ = read("dpo", *[record] * 3)
    options = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    ours, theirs = (
        trl.DPOTrainer._prepare_dataset(
            SimpleNamespace(_tokenizer=tokenizer), each, tokenizer, options, "train"
        )
        for each in (as_dataset(rows), datasets.Dataset.from_list([record] * 3))
    )
    for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
        assert list(ours[name]) == list(theirs[name])
    assert "PARIS" in tokenizer.decode(ours[0]["chosen_ids"])
    assert '"look"' in tokenizer.decode(ours[0]["prompt_ids"])


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "glm4moe"])
def test_arguments_as_text_become_what_the_template_reads(read, name: str):
    path = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    chat = ChatTemplate(make_tokenizer(path.read_text()))
    written = []
    for arguments in ({"city": "PARIS"}, json.dumps({"city": "PARIS"})):
        call = said("", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": arguments}}])
        (row,), _ = read("dpo", {**PAIR, "chosen": [call], "tools": TOOLS})
        row = as_read(chat, row, "f")
        asked, tools = [*row["prompt"], *row["chosen"]], json.loads(row["tools"])
        written.append(
            make_tokenizer(path.read_text()).apply_chat_template(asked, tools=tools, tokenize=False)
        )
        assert row["rejected"] == [said("bad")]
    assert written[0].replace(" ", "") == written[1].replace(" ", "")
    assert "PARIS" in written[0]


def test_no_tools_are_none_however_they_are_written(read):
    for tools in ("[]", "null", "", [], None):
        assert read("dpo", {**PAIR, "tools": tools}) == ([PAIR], [])


def test_orpo_offers_tools_and_takes_arguments_of_the_template(read):
    tokenizer = make_tokenizer((Path(trl.__file__).parent / "chat_templates" / "glm4moe.jinja").read_text())
    more = {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}}
    rows, notes = read("orpo", {**PAIR, **more}, PAIR)
    assert notes == []
    with_tools, plain = as_texts(rows, tokenizer)
    assert '"look"' in with_tools["prompt"]
    assert "q/nothink" in with_tools["prompt"]
    assert plain == trl.apply_chat_template(PAIR, tokenizer)


@pytest.mark.parametrize("objective", ["dpo", "kto", "reward", "orpo"])
def test_a_text_that_begins_as_the_tokenizer_begins_texts_has_that_once(objective: str, read):
    tokenizer = make_tokenizer(bos=True)
    pair = {"prompt": "q", "chosen": "good", "rejected": "bad", "completion": "good", "label": True}
    (row,), _ = read(objective, {**pair, "prompt": "<s>q"})
    assert begun_once([row], tokenizer)[0]["prompt"] == "q"
    assert begun_once([row], make_tokenizer())[0]["prompt"] == "<s>q"
    if objective == "reward":
        (row,), _ = read(objective, {"chosen": "<s>good", "rejected": "bad"})
        assert begun_once([row], tokenizer) == [{"chosen": "good", "rejected": "bad"}]


def test_the_margin_of_a_pair_counts_for_a_reward_and_is_told_elsewhere(read):
    pair = {"chosen": "good", "rejected": "bad", "margin": 0.5}
    assert read("reward", pair) == ([pair], [])
    assert "not used: margin (1 records)" in read("dpo", {**pair, "prompt": "q"})[1][0]
    with pytest.raises(DataError, match="'margin' is a number, not 'much'"):
        read("reward", {**pair, "margin": "much"})


@pytest.mark.parametrize("objective", ["dpo", "classify"])
def test_fields_that_nothing_reads_are_told_with_their_count(read, objective: str):
    record = PAIR if objective == "dpo" else {"text": "a", "label": 1}
    more = {"images": ["a.png"], "id": 3, "score_chosen": 2.0}
    assert read(objective, {**record, **more}, record)[1][0].endswith(
        "in the records and not used: images (1 records), score_chosen (1 records)"
    )


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            {"question": "q", "chosen": "a", "rejected": "b"},
            r"'question' would be left out.*\{prompt: question\}",
        ),
        (
            {"system": "s", "question": "q", "chosen": "a", "rejected": "b"},
            r"'question' would be left out.*\{prompt: question\}",
        ),
        (
            {"trajectory": [{"from": "user", "value": "q"}], "chosen": "a", "rejected": "b"},
            r"'trajectory' would be left out.*\{prompt: trajectory\}",
        ),
        (
            {"messages": [user("q"), said("a")], "chosen": [said("a")], "rejected": [said("b")]},
            "'messages' ends with a message of the assistant",
        ),
        ({**PAIR, "chosen": [said("good", weight=0)]}, "a mark that it is not to be trained"),
        ({**PAIR, "chosen": [said("good", train_detail=[])]}, "a message has train_detail"),
        ({**PAIR, "chosen": [said("")]}, "field 'chosen' is empty"),
        ({**PAIR, "chosen": [user("other"), said("good")]}, "'chosen' begins with a message of the user"),
        ({"chosen": [said("good")], "rejected": [said("bad")]}, "no message in common"),
        (
            {"prompt": "q", "responses": ["a", "b"], "ranks": [1, 2]},
            "takes records with 'chosen', 'rejected', and found",
        ),
        ({**PAIR, "tools": "look"}, "field 'tools' is a text, and not one of JSON"),
        ({**PAIR, "chat_template_kwargs": [1]}, "'chat_template_kwargs' must be an object"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(read, record: Row, words: str):
    with pytest.raises(DataError, match=words):
        read("dpo", record)
