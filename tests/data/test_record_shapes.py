"""Records as the world writes them, times the formats: exactly what is trained of each, and what is told."""

import json

import pytest

from outsize.data.encode import Encoder
from outsize.data.reading.conversations import read_messages
from outsize.data.reading.corpus_files import Corpus, find_sources
from outsize.data.reading.documents import DocumentReader
from outsize.errors import DataError
from outsize.training.run_data import Conversation, read_prompt

ASKED = [("user", "q1"), ("assistant", "WRONG"), ("user", "q2"), ("assistant", "right")]
TEMPLATE = (
    "{% if tools %}[tools {{ tools | tojson }}]{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}(call {{ call.function | tojson }}){% endfor %}.{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CALL = {"name": "look", "arguments": {"city": "Paris"}}
CALLED = '(call {"name": "look", "arguments": {"city": "Paris"}})'


def messages(turns, marks=None, speaker="role", said="content"):
    """Return turns as dicts; ``marks`` are put on the message that says WRONG."""
    return [{speaker: who, said: text, **(marks or {} if text == "WRONG" else {})} for who, text in turns]


def sharegpt(turns, marks=None):
    names = {"user": "human", "assistant": "gpt", "tool": "observation"}
    return messages([(names.get(who, who), text) for who, text in turns], marks, "from", "value")


# One conversation under every way to write one: from (turns, marks) to a record.
WAYS = {
    "messages": lambda t, m=None: {"messages": messages(t, m)},
    "messages as JSON text": lambda t, m=None: {"messages": json.dumps(messages(t, m))},
    "messages with from and value": lambda t, m=None: {"messages": sharegpt(t, m)},
    "conversations": lambda t, m=None: {"conversations": sharegpt(t, m)},
    "conversations with role and content": lambda t, m=None: {"conversations": messages(t, m)},
    "prompt and completion of messages": lambda t, m=None: {
        "prompt": messages(t[:1], m),
        "completion": messages(t[1:], m),
    },
    "prompt and completion as JSON text": lambda t, m=None: {
        "prompt": json.dumps(messages(t[:1], m)),
        "completion": json.dumps(messages(t[1:], m)),
    },
    "a prompt of text and a completion of messages": lambda t, m=None: {
        "prompt": t[0][1],
        "completion": messages(t[1:], m),
    },
}


@pytest.fixture
def read(tmp_path, make):
    def read(record, **options):
        """Return all text of a record, what of it is trained, and what was told."""
        path = tmp_path / "chats.jsonl"
        path.write_text(json.dumps(record) + "\n")
        reader = DocumentReader(find_sources(path), None, Corpus(path=path, **options))
        masked = reader.detect() != "text"
        tokenizer = make(TEMPLATE)
        (found,) = Encoder(tokenizer, eos=False, masked=masked).encode(list(reader.documents()))
        trained = found.ids if found.trained is None else found.ids[found.trained.astype(bool)]
        return tokenizer.decode(found.ids), tokenizer.decode(trained), reader.notes()

    return read


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_write_a_conversation_is_one_conversation(read, way):
    assert read(WAYS[way](ASKED)) == (
        "[user]q1[assistant]WRONG.[user]q2[assistant]right.",
        "WRONG.right.",
        [],
    )


NO = [
    {name: value}
    for name in ("weight", "train", "training", "trainable", "loss", "loss_weight")
    for value in (0, False, 0.0, "0", "false")
]
YES = [{"weight": 1}, {"train": True}, {"weight": 1.0}, {"loss": "true"}, {"weight": None}, {}]


@pytest.mark.parametrize("way", WAYS)
def test_a_message_that_its_author_does_not_want_trained_is_not(read, way):
    for marks in NO:
        assert read(WAYS[way](ASKED, marks)) == (
            "[user]q1[assistant]WRONG.[user]q2[assistant]right.",
            "right.",
            [],
        ), marks
    for marks in YES:
        assert read(WAYS[way](ASKED, marks))[1] == "WRONG.right.", marks


@pytest.mark.parametrize(
    "marks", [{"weight": 0.5}, {"weight": 2}, {"train": "maybe"}, {"weight": 0, "train": True}, {"loss": [1]}]
)
def test_a_mark_that_is_neither_yes_nor_no_is_refused(read, marks):
    for way in WAYS.values():
        with pytest.raises(DataError, match=r"chats.jsonl:1: a message with .*nothing in between"):
            read(way(ASKED, marks))


def test_marks_and_what_is_asked_for_are_both_kept(read):
    last = [("user", "q"), ("assistant", "fine"), ("user", "q"), ("assistant", "WRONG")]
    record = WAYS["messages"](last, {"weight": 0})
    assert read(WAYS["messages"](ASKED, {"weight": 0}), train_on="last")[1] == "right."
    assert read(record, train_on="replies")[1] == "fine."
    with pytest.raises(DataError, match=r"message 4 is marked as not to be trained, and data.train_on=all"):
        read(record, train_on="all")


def test_marks_on_what_nobody_trains_are_told(read):
    record = {
        "messages": [{"role": "user", "content": "q", "weight": 1}, {"role": "assistant", "content": "a"}]
    }
    assert read(record)[1:] == (
        "a.",
        ["in the records and not used: what says that a message of the user is trained (1 records)"],
    )
    record["messages"][0]["weight"] = 0
    assert read(record)[1:] == ("a.", [])
    record["messages"][1]["train_detail"] = [{"begin_offset": 0, "end_offset": 0, "train": False}]
    assert read(record)[2] == ["in the records and not used: train_detail of a message (1 records)"]


@pytest.mark.parametrize("name", ["system", "system_prompt"])
@pytest.mark.parametrize("way", WAYS)
def test_a_system_prompt_beside_the_conversation_begins_it(read, way, name):
    record = WAYS[way](ASKED[2:])
    assert read({**record, name: "be brief"}) == (
        "[system]be brief[user]q2[assistant]right.",
        "right.",
        [],
    )
    assert read({**record, name: ""}) == read({**record, name: None}) == read(record)
    told = {**WAYS["messages"]([("system", "be brief"), *ASKED[2:]]), name: "be brief"}
    assert read(told)[0] == "[system]be brief[user]q2[assistant]right."
    with pytest.raises(DataError, match=f"another system prompt than field '{name}'"):
        read({**told, name: "be long"})


ALPACA = {"instruction": "i", "input": "", "output": "o"}


@pytest.mark.parametrize(
    ("more", "whole", "trained"),
    [
        ({"system": "s"}, "[system]s[user]i[assistant]o.", "o."),
        ({"history": [["q", "a"]]}, "[user]q[assistant]a.[user]i[assistant]o.", "a.o."),
        (
            {"system": "s", "history": [["q", "a"]], "input": "c"},
            "[system]s[user]q[assistant]a.[user]i\nc[assistant]o.",
            "a.o.",
        ),
    ],
)
def test_alpaca_with_a_system_prompt_or_a_history_is_a_conversation(read, more, whole, trained):
    assert read({**ALPACA, **more}) == (whole, trained, [])
    assert read({**ALPACA, **more}, train_on="last")[1] == "o."


def test_alpaca_without_either_is_written_as_ever(read):
    plain = read(ALPACA)
    assert plain == read({**ALPACA, "system": "", "history": []}) == read({**ALPACA, "system": None})
    assert plain[0].endswith("### Response:\no")
    with pytest.raises(DataError, match="'history' must be a list of pairs of texts"):
        read({**ALPACA, "history": ["q", "a"]})
    with pytest.raises(DataError, match="'history' must be a list of pairs of texts"):
        read({**ALPACA, "history": True})


@pytest.mark.parametrize(
    "tools", [TOOLS, json.dumps(TOOLS), json.dumps(TOOLS[0]), list(map(json.dumps, TOOLS))]
)
@pytest.mark.parametrize("way", [way for way in WAYS if "text" not in way])
def test_tools_beside_a_conversation_are_offered_however_they_are_written(read, way, tools):
    whole, trained, notes = read({**WAYS[way](ASKED[2:]), "tools": tools})
    assert whole.startswith(f"[tools {json.dumps(TOOLS)}][user]")
    assert (trained, notes) == ("right.", [])
    with pytest.raises(
        DataError, match="field 'tools' is a text, and not one of JSON: its quotes are single"
    ):
        read({**WAYS[way](ASKED), "tools": str(TOOLS)})


@pytest.mark.parametrize(
    "value",
    [json.dumps(CALL), json.dumps([CALL]), json.dumps({**CALL, "arguments": json.dumps(CALL["arguments"])})],
)
@pytest.mark.parametrize("speaker", ["function_call", "tool_call"])
def test_a_turn_that_calls_a_function_is_a_call_of_the_assistant(read, value, speaker):
    turns = [("user", "q"), (speaker, value), ("tool", "sunny"), ("assistant", "Sun")]
    for way in ("conversations", "messages"):
        assert read(WAYS[way](turns)) == (
            f"[user]q[assistant]{CALLED}.[tool]sunny[assistant]Sun.",
            f"{CALLED}.Sun.",
            [],
        )
        turns_with_text = [*turns[:1], (speaker, "look it up"), *turns[2:]]
        with pytest.raises(DataError, match="'function_call' is a text, and not one of JSON"):
            read(WAYS[way](turns_with_text))


def test_calls_and_functions_as_openai_had_them_before_tools_are_calls_and_tools(read):
    call = {"name": "look", "arguments": json.dumps(CALL["arguments"])}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "function_call": call}]
    turns.append({"role": "function", "name": "look", "content": "sunny"})
    functions = [TOOLS[0]["function"]]
    assert read({"messages": turns, "functions": functions}) == (
        f"[tools {json.dumps(TOOLS)}][user]q[assistant]{CALLED}.[tool]sunny",
        f"{CALLED}.",
        [],
    )


def test_a_call_as_openai_had_it_before_tools_stands_once_in_its_message():
    turns = [{"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}]
    (message,) = read_messages({"messages": turns}, "messages", "f:1", {})
    assert sorted(message) == ["content", "role", "tool_calls"]


def test_a_text_file_that_holds_records_says_so(tmp_path):
    path = tmp_path / "chats.txt"
    for body, is_told in (
        (json.dumps(ALPACA) + "\n", True),
        ("[\n{}\n]", True),
        ("{ a set }\n", False),
        ("text\n{}", False),
    ):
        path.write_text(body)
        for chosen in ("auto", "text"):
            reader = DocumentReader(find_sources(path), None, Corpus(path=path, format=chosen))
            assert len(list(reader.documents())) == 1
            assert ["set data.format" in note for note in reader.notes()] == [True] * (
                is_told and chosen == "auto"
            )


TEXTS = {
    "text": {"text": "right"},
    "prompt and completion": {"prompt": "q", "completion": "right"},
    "alpaca": ALPACA,
}


@pytest.mark.parametrize("way", [*WAYS, *TEXTS])
def test_fields_that_nothing_reads_are_told_with_their_count_and_bookkeeping_is_not(read, way):
    record = TEXTS[way] if way in TEXTS else WAYS[way](ASKED)
    more = {"id": 7, "source": "x", "Unnamed: 0": 3, "__index_level_0__": 3, "images": [], "mask": None}
    assert read({**record, **more}) == read(record)
    more = {"images": ["a.png"], "label_mask": [0, 1]}
    assert read({**record, **more})[2] == [
        "in the records and not used: images (1 records), label_mask (1 records)"
    ]


def test_what_is_for_a_template_is_told_beside_texts(read):
    more = {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}}
    assert read({"prompt": "q", "completion": "a", **more})[2] == [
        "in the records and not used: tools (1 records), chat_template_kwargs (1 records)"
    ]


@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_texts_under_a_system_prompt_are_a_conversation_wherever_they_are_read(read, name):
    """Preferences: `test_a_system_prompt_makes_conversations_of_all_texts`."""
    record = {"prompt": "q", "completion": "a", name: "s"}
    assert read(record) == ("[system]s[user]q[assistant]a.", "a.", [])
    asked = read_prompt(record, "f:1")
    assert isinstance(asked, Conversation)
    assert [turn["content"] for turn in asked.messages] == ["s", "q"]
    assert read({**record, name: " "}) == read({"prompt": "q", "completion": "a"})
    assert read_prompt({**record, name: " "}, "f:1") == "q"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": "text", "text": "a"}, {"type": "image", "text": ""}], "a part of it is 'image'"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "a part of it is 'image_url'"),
        (
            [{"type": "thinking", "thinking": "h"}, {"type": "text", "text": "a"}],
            "a part of it is 'thinking'",
        ),
        ([7], "a part of it is 'int'"),
    ],
)
def test_a_part_that_is_no_text_is_refused_by_its_kind(read, content, words):
    with pytest.raises(DataError, match=words):
        read({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "b"}]})


@pytest.mark.parametrize(
    "written", [json.dumps, lambda calls: calls[0], lambda calls: list(map(json.dumps, calls))]
)
def test_calls_may_be_json_text_or_one_alone(read, written):
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    asked = {"role": "user", "content": "q"}
    whole = read({"messages": [asked, {"role": "assistant", "content": "", "tool_calls": calls}]})
    assert (
        read({"messages": [asked, {"role": "assistant", "content": "", "tool_calls": written(calls)}]})
        == whole
    )


@pytest.mark.parametrize("calls", ["f(1)", [7], "[1]"])
def test_calls_that_are_none_are_refused(read, calls):
    with pytest.raises(DataError, match="'tool_calls'"):
        read({"messages": [{"role": "assistant", "content": "", "tool_calls": calls}]})


def test_a_refusal_without_content_is_refused_and_not_trained_as_silence(read):
    with pytest.raises(DataError, match="has a 'refusal' and no 'content'"):
        read({"messages": [{"role": "assistant", "content": None, "refusal": "I cannot"}]})


@pytest.mark.parametrize("way", TEXTS)
def test_a_column_of_another_format_that_holds_nothing_decides_nothing(read, way):
    assert read({"messages": None, **TEXTS[way]})[:2] == read(TEXTS[way])[:2]


@pytest.mark.parametrize("key", ["images", "audio", "videos"])
def test_a_message_with_more_than_text_is_refused(read, key):
    with pytest.raises(DataError, match=f"a message of the user has '{key}'"):
        read(
            {
                "messages": [
                    {"role": "user", "content": "q", key: ["a.png"]},
                    {"role": "assistant", "content": "b"},
                ]
            }
        )


@pytest.mark.parametrize("content", ["ab", ["a", "b"], [{"type": "text", "text": "a"}, {"text": "b"}]])
@pytest.mark.parametrize("role", ["user", "tool", "assistant", "system"])
def test_contents_may_be_text_or_parts_of_it_whoever_speaks(read, role, content):
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    whole = read({"messages": [{"role": role, "content": "ab"}, *asked]})
    assert read({"messages": [{"role": role, "content": content}, *asked]}) == whole


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"query": "q", "response": "a"}, "{prompt: query, completion: response}"),
        ({"inputs": "q", "targets": "a"}, "{prompt: inputs, completion: targets}"),
        ({"input": "q", "output": "a"}, "{prompt: input, completion: output}"),
        ({"prompt": "q", "response": "a"}, "{prompt: prompt, completion: response}"),
        ({"instruction": "q", "context": "c", "response": "a"}, "{output: response, input: context}"),
        ({"instruction": "q", "response": "a"}, "{output: response}"),
        ({"ext": "py", "content": "a"}, "{text: content}"),
        (
            {"toxic": False, "conversation": messages([*ASKED[:1], ("assistant", "a")])},
            "{messages: conversation}",
        ),
        ({"id": 1, "dialogue": sharegpt([*ASKED[:1], ("assistant", "a")])}, "{messages: dialogue}"),
        (
            {"conversations": ["q", "a"], "source": "x"},
            "a list of messages, at least one, each an object with its role",
        ),
        (
            {"messages": [{"input": "q", "output": "a"}]},
            "has 'role' and 'content', .*found 'input', 'output'",
        ),
        ({"role": "user", "content": "a"}, "a record is a conversation.*not one message"),
    ],
)
def test_records_under_other_names_are_refused_with_what_to_write(read, record, words):
    with pytest.raises(DataError, match=words):
        read(record)
    if words.startswith("{"):
        columns = dict(pair.split(": ") for pair in words.strip("{}").split(", "))
        assert read(record, columns=columns)[1].rstrip(".") == "a"


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        ({"role": "user", "content": "a", "value": "b"}, "has 'content' and 'value', and they differ"),
        ({"role": "user", "from": "gpt", "value": "b"}, "has 'role' and 'from', and they differ"),
        ({"role": "user", "text": "a"}, "a message of the user has no 'content', found 'role', 'text'"),
        ({"from": "human", "text": "a"}, "a message of the user has no 'content', found 'from', 'text'"),
    ],
)
def test_a_message_whose_words_are_not_known_is_refused(read, turn, words):
    with pytest.raises(DataError, match=words):
        read({"messages": [turn, {"role": "assistant", "content": "a"}]})


def test_a_message_may_have_both_names_of_a_field_where_one_is_empty_as_in_parquet(read):
    turns = [
        {"role": None, "from": "human", "content": None, "value": "q"},
        {"role": "assistant", "from": None, "content": "a", "value": None},
    ]
    assert read({"messages": turns})[0] == "[user]q[assistant]a."


def test_a_history_may_be_json_text_and_a_blank_system_prompt_is_none(read):
    record = {**ALPACA, "history": '[["q", "a"]]', "system": " "}
    assert read(record)[0] == "[user]q[assistant]a.[user]i[assistant]o."
    assert read({**ALPACA, "history": "[]", "system": " "}) == read(ALPACA)


def test_a_conversation_printed_by_python_is_refused_with_what_to_do(read):
    with pytest.raises(DataError, match=r"field 'messages' is a text, and not one of JSON.*json.dumps"):
        read({"messages": str(messages(ASKED))})
