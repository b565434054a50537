from typing import get_args

import pytest

from outsize.config import DataConfig
from outsize.data.reading.corpus_files import Corpus
from outsize.data.reading.formats import FORMATS, detect_format, renamed, to_document
from outsize.errors import DataError

WHERE = "data.jsonl:7"
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize(
    ("record", "text_field", "expected"),
    [
        ({"text": "a", "id": 1}, "text", "text"),
        ({"body": "a"}, "body", "text"),
        ({"body": "a", "messages": CHAT}, "body", "text"),
        ({"text": "a", "messages": CHAT}, "text", "messages"),
        ({"conversations": []}, "text", "sharegpt"),
        ({"prompt": "a", "completion": "b"}, "text", "prompt_completion"),
        ({"instruction": "a", "input": "", "output": "b", "text": "all"}, "text", "alpaca"),
    ],
)
def test_the_fields_decide(record, text_field, expected):
    assert detect_format(record, text_field, WHERE) == expected


def test_unknown_fields_are_named():
    with pytest.raises(
        DataError, match=r"data.jsonl:7: no known format has the fields 'content'; expected 'text'"
    ):
        detect_format({"content": "a"}, "text", WHERE)


def test_prompt_and_alpaca_train_what_follows_the_prompt():
    document = to_document({"prompt": "a b", "completion": " c"}, "prompt_completion", Corpus(path=""), WHERE)
    assert (document.text[: document.trained_from], document.text[document.trained_from :]) == ("a b", " c")
    document = to_document(
        {"instruction": "Do", "input": "this", "output": "done"}, "alpaca", Corpus(path=""), WHERE
    )
    assert document.text[document.trained_from :] == "done"
    assert document.text[: document.trained_from].endswith("### Input:\nthis\n\n### Response:\n")
    document = to_document({"instruction": "Do", "output": "done"}, "alpaca", Corpus(path=""), WHERE)
    assert "Input" not in document.text


def test_conversations_become_messages():
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    assert to_document({"conversations": turns}, "sharegpt", Corpus(path=""), WHERE).messages == CHAT
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    record = {"messages": [{"role": "user", "content": parts}, CHAT[1]], "tools": [{"name": "f"}]}
    document = to_document(record, "messages", Corpus(path=""), WHERE)
    assert document.messages == CHAT
    assert document.tools == [{"name": "f"}]


def test_prompts_and_completions_of_messages_train_what_completes():
    record = {"prompt": [*CHAT, {"role": "user", "content": "more"}], "completion": CHAT[1:]}
    document = to_document(record, "prompt_completion", Corpus(path=""), WHERE)
    assert document.messages == [*CHAT, {"role": "user", "content": "more"}, CHAT[1]]
    assert document.turns == (3,)


@pytest.mark.parametrize("role", ["assistant", "Assistant", "bot", "model", "gpt"])
def test_whoever_answers_is_the_assistant_and_trained(role):
    turns = [{"role": "human", "content": "hi"}, {"role": role, "content": "yes"}]
    document = to_document({"messages": turns}, "messages", Corpus(path=""), WHERE)
    assert (document.messages, document.turns) == (CHAT, (1,))


def test_roles_can_be_named():
    corpus = Corpus(path="", roles={"agent": "assistant"})
    turns = [CHAT[0], {"role": "agent", "content": "yes"}]
    assert to_document({"messages": turns}, "messages", corpus, WHERE).messages == CHAT


@pytest.mark.parametrize(("train_on", "turns"), [("replies", (1, 3)), ("last", (3,)), ("all", None)])
def test_what_of_a_conversation_is_trained_can_be_chosen(train_on, turns):
    corpus = Corpus(path="", train_on=train_on)
    assert to_document({"messages": [*CHAT, *CHAT]}, "messages", corpus, WHERE).turns == turns
    whole = to_document({"prompt": "a", "completion": "b"}, "prompt_completion", corpus, WHERE)
    assert whole.trained_from == (0 if train_on == "all" else 1)


def test_columns_are_read_under_our_names():
    record = {"question": "a", "prompt": "unused", "answer": "b", "id": 3}
    columns = {"prompt": "question", "completion": "answer"}
    assert renamed(record, columns, WHERE) == {"prompt": "a", "completion": "b", "id": 3}
    with pytest.raises(DataError, match=f"{WHERE}: data.columns names 'question', found 'a'"):
        renamed({"a": 1}, {"prompt": "question"}, WHERE)


@pytest.mark.parametrize(
    ("format_name", "record", "message"),
    [
        ("text", {"messages": CHAT}, "a record of format 'text' needs 'text', found 'messages'"),
        ("text", {"text": 3}, "field 'text' must be a string, found int"),
        ("messages", {"messages": []}, "must be a list of messages, at least one"),
        ("messages", {"messages": [{"content": "a"}]}, "a message has 'role' and 'content'"),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "must be text, and a part of it is 'image'",
        ),
        ("sharegpt", {"conversations": [{"from": "narrator", "value": "a"}]}, "unknown role 'narrator'"),
        ("sharegpt", {"conversations": [{"from": "human", "value": 3}]}, "needs a string 'value', found int"),
        (
            "messages",
            {"messages": [{"role": "agent", "content": "a"}]},
            "data.roles say .*{agent: assistant}",
        ),
        ("prompt_completion", {"prompt": CHAT, "completion": 3}, "'completion' must be a list"),
        ("text", {"text": CHAT}, "name the field 'messages' in data.columns"),
        ("alpaca", {"instruction": "a", "input": 1, "output": "b"}, "field 'input' must be a string"),
    ],
)
def test_records_that_do_not_agree_are_located(format_name, record, message):
    with pytest.raises(DataError, match=f"{WHERE}: .*{message}"):
        to_document(record, format_name, Corpus(path=""), WHERE)


def test_a_run_can_be_told_every_format_and_no_other():
    assert sorted(get_args(DataConfig.model_fields["format"].annotation)) == sorted(["auto", *FORMATS])
