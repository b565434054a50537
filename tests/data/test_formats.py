from typing import get_args

import pytest

from outsize.config import DataConfig
from outsize.data.formats import FORMATS, detect_format, to_document
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
    document = to_document({"prompt": "a b", "completion": " c"}, "prompt_completion", "text", WHERE)
    assert (document.text[: document.trained_from], document.text[document.trained_from :]) == ("a b", " c")
    document = to_document({"instruction": "Do", "input": "this", "output": "done"}, "alpaca", "text", WHERE)
    assert document.text[document.trained_from :] == "done"
    assert document.text[: document.trained_from].endswith("### Input:\nthis\n\n### Response:\n")
    document = to_document({"instruction": "Do", "output": "done"}, "alpaca", "text", WHERE)
    assert "Input" not in document.text


def test_conversations_become_messages():
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    assert to_document({"conversations": turns}, "sharegpt", "text", WHERE).messages == CHAT
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    record = {"messages": [{"role": "user", "content": parts}, CHAT[1]], "tools": [{"name": "f"}]}
    document = to_document(record, "messages", "text", WHERE)
    assert document.messages == CHAT
    assert document.tools == [{"name": "f"}]


@pytest.mark.parametrize(
    ("format_name", "record", "message"),
    [
        ("text", {"messages": CHAT}, "a record of format 'text' needs 'text', found 'messages'"),
        ("text", {"text": 3}, "field 'text' must be a string, found int"),
        ("messages", {"messages": []}, "must be a list of at least one object"),
        ("messages", {"messages": [{"content": "a"}]}, "a message needs a 'role'"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "must be text"),
        ("sharegpt", {"conversations": [{"from": "narrator", "value": "a"}]}, "found from='narrator'"),
        ("prompt_completion", {"prompt": CHAT, "completion": CHAT}, "use the format 'messages'"),
        ("alpaca", {"instruction": "a", "input": 1, "output": "b"}, "field 'input' must be a string"),
    ],
)
def test_records_that_do_not_agree_are_located(format_name, record, message):
    with pytest.raises(DataError, match=f"{WHERE}: .*{message}"):
        to_document(record, format_name, "text", WHERE)


def test_a_run_can_be_told_every_format_and_no_other():
    assert sorted(get_args(DataConfig.model_fields["format"].annotation)) == sorted(FORMATS)
