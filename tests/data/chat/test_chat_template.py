"""Which template a conversation is written with, in which form, and how a conversation is refused."""

import json
import logging
from pathlib import Path

import pytest

from data.chat.families import MARKED, chatml, without_marks
from data.chat.shapes import TEXT_CALL, TOOLS, Message, call, result, said, system, user
from outsize.data.chat import ChatTemplate
from outsize.data.encode import Encoder
from outsize.data.reading.corpus_files import Corpus, find_sources
from outsize.data.reading.documents import DocumentReader
from outsize.data.reading.formats import Document
from outsize.errors import DataError

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
WITH_TOOLS = "{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}" + PLAIN


def trained(tokenizer, messages: list[Message], tools: list[Message] | None = None) -> str:
    turns = tuple(n for n, message in enumerate(messages) if message["role"] == "assistant")
    text, spans = ChatTemplate(tokenizer).render(messages, turns, tools, "f:7")
    return "|".join(text[start:end] for start, end in spans)


def test_tools_are_written_by_the_template_for_them(make):
    tokenizer = make({"default": PLAIN, "tool_use": WITH_TOOLS})
    messages = [user("q"), said("a")]
    for tools in (None, TOOLS):
        theirs = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        assert ChatTemplate(tokenizer).render(messages, (1,), tools, "f:7")[0] == theirs


def test_named_templates_without_a_default_are_refused_by_name(make):
    tokenizer = make({"rag": PLAIN, "tool_use": WITH_TOOLS})
    with pytest.raises(
        DataError, match=r"f:7: the tokenizer has the chat templates rag, tool_use .* data.template"
    ):
        trained(tokenizer, [user("q"), said("a")])
    assert trained(tokenizer, [user("q"), said("a")], TOOLS) == "a</s>"
    text, _ = ChatTemplate(tokenizer, "rag").render([user("q"), said("a")], (1,), TOOLS, "f:7")
    assert text == "<user>q</s><assistant>a</s>"


def test_every_named_template_is_part_of_what_identifies_tokens(make):
    def fingerprint(tool_use):
        tokenizer = make({"default": PLAIN, "tool_use": tool_use})
        return Encoder(tokenizer, eos=True, masked=True).fingerprint()

    assert fingerprint(PLAIN) != fingerprint(WITH_TOOLS)


@pytest.mark.parametrize("marked", [True, False])
def test_arguments_are_an_object_or_text_whichever_the_template_reads(make, marked):
    reads_objects = MARKED["mistral v7"]  # would write a JSON string within JSON
    reads_text = chatml().replace(
        "(f.arguments if f.arguments is string else f.arguments | tojson)", "f.arguments"
    )
    as_object, as_text = call(at="AARG1"), TEXT_CALL
    for template in (reads_objects, reads_text):
        tokenizer = make(template if marked else without_marks(template), bos_token="<s>")
        one, other = (
            trained(tokenizer, [user("q"), said("", tool_calls=[each])]) for each in (as_object, as_text)
        )
        assert one == other
        assert '{"at": "AARG1"}' in one


def test_contents_are_parts_under_a_template_that_reads_parts(make):
    template = (
        "{% for m in messages %}<{{ m.role }}>{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}"
        "</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = make(template)
    assert trained(tokenizer, [user("q"), said("a")]) == "a</s>"
    assert ChatTemplate(tokenizer).open([user("q")]) == "<user>q</s><assistant>"


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (PLAIN, [user("q"), said("", tool_calls=[call(at="x")])], "message 2 .* leaves out the tool calls"),
        (PLAIN.replace("m.content", "m.content + m.content"), [user("q"), said("a")], "message 2 .* twice"),
        (
            PLAIN.replace("m.content", "m.content[:2]"),
            [user("q"), said("abc")],
            "message 2 .* a part of the text",
        ),
        (PLAIN.replace("m.content", "m.content | length"), [user("q"), said("abc")], "leaves out the text"),
        (
            PLAIN.replace("m.content", "m.content | md5"),
            [user("q"), said("abc")],
            "refuses this conversation",
        ),
        (
            "{% for m in messages %}{% if m.content == 'abc' %}!{% endif %}{{ m.content }}{% endfor %}",
            [user("q"), said("abc")],
            "decides by its words",
        ),
        (
            without_marks(MARKED["glm 4"]),
            [user("q"), said("text", tool_calls=[call(at="x")]), result("r")],
            "message 2 .* leaves out the text",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_with_what_the_template_does(make, template, messages, reason):
    with pytest.raises(DataError, match=f"^f:7: .*{reason}"):
        trained(make(template), messages)


def test_marks_around_the_words_of_another_are_refused(make):
    template = "{% for m in messages %}{% generation %}{{ m.content }}</s>{% endgeneration %}{% endfor %}"
    with pytest.raises(
        DataError, match=r"marks message 1 with {% generation %}, which is one of the role user"
    ):
        trained(make(template), [user("question"), said("answer")])


MARKS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' %}WORDS</s>{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
ALL = "{% generation %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endgeneration %}"


@pytest.mark.parametrize(
    ("words", "messages", "is_told"),
    [
        (ALL, [user("q"), said("a", tool_calls=[call(city="Paris")]), user("q"), said("b")], False),
        (
            "{% generation %}{{ m.content[:2] }}{% endgeneration %}{{ m.content[2:] }}",
            [user("q"), said("hello")],
            True,
        ),
        (
            ALL.replace("{% endgeneration %}", "").replace("{{ m.tool", "{% endgeneration %}{{ m.tool"),
            [user("q"), said("a", tool_calls=[call(city="Paris")])],
            True,
        ),
        (
            "{% if loop.last %}" + ALL + "{% else %}{{ m.content }}{% endif %}",
            [user("q"), said("a"), user("q"), said("b")],
            True,
        ),
    ],
)
def test_marks_that_leave_out_words_of_replies_are_told_once(make, words, messages, is_told, caplog):
    template = ChatTemplate(make(MARKS.replace("WORDS", words)))
    turns = tuple(n for n, message in enumerate(messages) if message["role"] == "assistant")
    for _ in range(2):
        template.render(messages, turns, None, "f:7")
    told = [line for line in caplog.messages if "does not enclose all that replies say" in line]
    assert len(told) == is_told


@pytest.mark.parametrize("end", ["</s>", ""])
def test_marks_that_end_before_the_reply_does_are_told_once(make, end, caplog):
    marked = MARKS.replace("WORDS", ALL.replace("{% endgeneration %}", end + "{% endgeneration %}"))
    template = ChatTemplate(make(marked.replace("</s>{% else", "{% else" if end else "</s>{% else")))
    for _ in range(2):
        text, spans = template.render([user("q"), said("a"), user("r"), said("b")], (1, 3), None, "f:7")
    assert text == "<user>q<assistant>a</s><user>r<assistant>b</s>"
    assert [text[start:stop] for start, stop in spans] == ["a" + end, "b" + end]
    told = (
        "f:7: {% generation %} of the chat template ends before '</s>', which ends a reply and is not trained"
    )
    assert caplog.messages == [told] * (not end)


def test_what_a_template_leaves_out_beside_replies_is_told_once(make, caplog):
    template = without_marks(MARKED["deepseek r1"]).replace("{% else %}{{ m.content }}", "")
    chat = ChatTemplate(make(template, bos_token="<s>"))
    messages = [system("be brief"), user("q"), said("<think>why</think>a")]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            text, ((start, end),) = chat.render(messages, (2,), None, "f:7")
    assert text[start:end] == "a<｜end▁of▁sentence｜>"
    said_of = [record.getMessage() for record in caplog.records]
    assert len(said_of) == 2
    assert "leaves out messages of the role system (here message 1)" in said_of[0]
    assert "leaves out the reasoning of replies (here message 3)" in said_of[1]


THINKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<off>{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_variables_of_a_record_reach_the_template_as_in_transformers(make, options, caplog):
    tokenizer = make(THINKS)
    messages = [user("q"), said("a")]
    text, spans = ChatTemplate(tokenizer).render(messages, (1,), None, "f:7", options)
    assert text == tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert [text[start:end] for start, end in spans] == [
        "a</s>" + "<off>" * (options.get("enable_thinking") is False)
    ]
    assert not caplog.messages


def test_variables_that_a_template_cannot_have_are_refused_and_those_that_it_does_not_read_are_told(
    make, caplog
):
    template = ChatTemplate(make(THINKS))
    with pytest.raises(DataError, match="f:7: field 'chat_template_kwargs' sets add_generation_prompt"):
        template.render([user("q"), said("a")], (1,), None, "f:7", {"add_generation_prompt": True})
    for _ in range(2):
        template.render([user("q"), said("a")], (1,), None, "f:7", {"reasoning_effort": "high"})
    assert caplog.messages == [
        "f:7: the chat template reads no reasoning_effort, which chat_template_kwargs sets"
    ]


NAMED = "{% for m in messages %}<{{ m.name or m.role }}>{{ m.content }}</s>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message", "told"),
    [
        (PLAIN, said("a", refusal="I cannot"), "the field 'refusal' of messages of the role assistant"),
        (PLAIN, said("a", refusal=None), None),
        (PLAIN + "{{ messages[0].refusal or '' }}", said("a", refusal="I cannot"), None),
        (PLAIN, {**user("q"), "name": "Ann"}, "the field 'name' of messages of the role user"),
        (NAMED, {**user("q"), "name": "Ann"}, None),
        (
            without_marks(chatml()),
            said("a", name="Ann"),
            "the field 'name' of messages of the role assistant",
        ),
        (PLAIN, result("r"), None),
        (PLAIN, said("a", id="7", timestamp=7), None),
        (WITH_TOOLS, {**system("s"), "tools": TOOLS}, "the field 'tools' of messages of the role system"),
        (PLAIN, {**user("q"), "tool_calls": [call()]}, "the field 'tool_calls' of messages of the role user"),
    ],
)
def test_fields_of_messages_that_a_template_does_not_write_are_told_once(
    make, template, message, told, caplog
):
    written = ChatTemplate(make(template))
    for _ in range(2):
        written.render([message, user("q"), said("a")], (2,), None, "f:7")
    assert [line.partition("leaves out ")[2].partition(" (")[0] for line in caplog.messages] == [told] * bool(
        told
    )


@pytest.mark.parametrize(("template", "is_told"), [(PLAIN, True), (WITH_TOOLS, False)])
def test_tools_that_a_template_does_not_write_are_told(make, template, is_told, caplog):
    ChatTemplate(make(template)).render([user("q"), said("a")], (1,), TOOLS, "f:7")
    assert ["leaves out the tools that a record offers" in line for line in caplog.messages] == [
        True
    ] * is_told


def test_marks_that_end_in_white_space_do_not_run_on(make):
    template = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content + '\n' }}"
        "{% endgeneration %}{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
    )
    text, spans = ChatTemplate(make(template)).render(
        [user("q"), said("a"), user("r"), said("b")], (1, 3), None, "f:7"
    )
    assert [text[start:end] for start, end in spans] == ["a\n", "b\n"]


def test_words_that_look_like_sentinels_are_words(make):
    tokenizer = make(chatml().replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    rare = "".join(map(chr, range(0x20000, 0x20040)))
    assert (
        trained(tokenizer, [user(f"{rare} q"), said(f"a 𠮷 {rare[::-1]}")])
        == f"a 𠮷 {rare[::-1]}<|im_end|>\n"
    )


@pytest.mark.parametrize("in_parquet", [True, False])
def test_a_null_in_a_struct_of_parquet_is_no_field_and_one_in_json_is(make, tmp_path: Path, in_parquet):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    calls = [call(at="AARG1", unit=None), call(2, at=None, unit="AARG2")]
    record = {"messages": [user("q"), said("", tool_calls=calls), result("r"), said("done")], "tools": TOOLS}
    if in_parquet:
        path = tmp_path / "chat.parquet"
        parquet.write_table(arrow.Table.from_pylist([record]), path)
    else:
        path = tmp_path / "chat.jsonl"
        path.write_text(json.dumps(record) + "\n")
    reader = DocumentReader(find_sources(path), None, Corpus(path=path))
    reader.detect()
    (document,) = reader.documents()
    assert isinstance(document, Document)
    text, _ = ChatTemplate(make(chatml())).render(document.messages, document.turns, document.tools, "f:7")
    assert ("null" in text) == (not in_parquet)
    assert '"at": "AARG1"' in text


@pytest.mark.parametrize("standard", ["", "<|im_start|>system\nBe kind.<|im_end|>\n"])
def test_an_end_that_only_a_next_message_or_a_question_brings_is_the_reply_s(make, standard):
    """As of Qwen 1.5, with a system prompt of the template's own, in which something has ended before."""
    template = (
        "{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ standard }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% if add_generation_prompt or not loop.last %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'assistant' %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ).replace("standard", repr(standard))
    turns = [
        {"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)
    ]
    assert trained(make(template), turns) == "b<|im_end|>\n|d"
    turns[1]["content"] = " 'b'\n\n"
    assert trained(make(template), turns) == " 'b'\n\n<|im_end|>\n|d"


def test_reasoning_under_two_names_that_differ_is_refused(make):
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
        "{% endif %}{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    chat = ChatTemplate(make(template))
    for other in ("reasoning", "thinking"):
        with pytest.raises(
            DataError, match=f"f:7: message 2 has 'reasoning_content' and '{other}', and they differ"
        ):
            chat.render([user("q"), said("a", reasoning_content="one", **{other: "two"})], (1,), None, "f:7")
        text, ((start, end),) = chat.render(
            [user("q"), said("a", reasoning_content="one", **{other: "one"})], (1,), None, "f:7"
        )
        assert text[start:end] == "<think>one</think>a</s>"


def test_an_end_that_is_written_where_a_user_follows_ends_calls_as_it_ends_words(make):
    template = (
        "{% set ns = namespace(open=false) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% if ns.open %}</a>{% endif %}<u>{{ m.content }}</u>{% set ns.open = false %}"
        "{% else %}{% if not ns.open %}<a>{% endif %}{% set ns.open = true %}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}<t>{{ call.function.arguments | tojson }}</t>{% endfor %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": "here"}}}]
    for words in ("", "look"):
        messages = [user("q"), said(words, tool_calls=calls), user("p"), said("b")]
        text, spans = ChatTemplate(make(template)).render(messages, (1, 3), None, "f:7")
        assert [text[start:end] for start, end in spans] == [words + '<t>{"x": "here"}</t></a>', "b"]
