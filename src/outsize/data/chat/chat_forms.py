"""Fit conversations to a chat template: forms of a message, fields the template ignores, and its generation marks.

Arguments of a tool call are an object (transformers) or that object as text (OpenAI). Contents are text, or a list of
parts, which templates of models that also see read. A template that expects the one fails at the other, or is silent.

transformers tells it by tokens, which runs on to the end where a mark ends in white space that the tokenizer drops. So
the tags get characters of their own into what they enclose, which are read and taken out again.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from outsize.data.chat.reply_spans import REASONING_FIELDS, Message, Reading, Span
from outsize.errors import DataError

_WORD = "\N{CURRENCY SIGN}"  # which no template writes
_PART = re.compile(r"""(['"])type\1: ?(['"])text\2""")


def forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield a conversation as it is, and in the other forms that say the same."""
    written = [list(messages)]
    for change in (_parsed, _as_text):
        changed = [_with_arguments(message, change) for message in messages]
        if changed != written[0]:
            written.append(changed)
    yield from written
    for form in written:
        yield [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in form]


def check_reasoning(messages: Sequence[Message], where: str) -> None:
    """Check that a message has its reasoning under one name, or the same under several: a template reads one of them.

    Raises:
        DataError: it says two things.
    """
    for number, message in enumerate(messages, 1):
        values = {name: message[name] for name in REASONING_FIELDS if message.get(name)}
        if any(value != next(iter(values.values())) for value in values.values()):
            raise DataError(
                f"{where}: message {number} has {' and '.join(map(repr, values))}, and they differ; keep one of them"
            )


def is_misread(messages: Sequence[Message], text: str) -> bool:
    """Return whether a template has written a form as what it is: JSON text as a string, parts as a list."""
    if any(isinstance(message["content"], list) for message in messages) and _PART.search(text):
        return True
    calls = [_arguments(call) for message in messages for call in message.get("tool_calls") or ()]
    return any(
        isinstance(arguments, str)
        and '"' in arguments
        and arguments not in text
        and any(json.dumps(arguments, ensure_ascii=each) in text for each in (False, True))
        for arguments in calls
    )


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_changed(call, change) for call in calls]} if calls else message


def _changed(call: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _changed(call["function"], change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call


def _arguments(call: Any) -> Any:
    body = call.get("function", call) if isinstance(call, dict) else None
    return body.get("arguments") if isinstance(body, dict) else None


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


# What is looked after elsewhere, of an assistant; and what says nothing that a model would learn.
_LOOKED_AFTER = {"assistant": {"tool_calls", *REASONING_FIELDS}, "tool": {"name"}}
# fmt: off
_BOOKKEEPING = {
    "role", "content", "id", "tool_call_id", "call_id", "uuid", "message_id", "parent_id", "parent", "index", "idx",
    "turn", "created", "created_at", "timestamp", "time", "date", "lang", "language", "model", "source", "metadata",
    "tokens", "num_tokens", "token_count", "finish_reason", "usage", "annotations", "status", "type",
}
# fmt: on


class UnreadFields:
    """Finds fields that change nothing of what templates write; each is looked at once for a template and a role."""

    def __init__(self) -> None:
        self._looked_at: set[tuple[str, ...]] = set()

    def of(
        self,
        messages: Sequence[Message],
        given: Mapping[str, Any],
        text: str,
        template: str,
        render: Callable[..., str],
    ) -> Iterator[tuple[int, str]]:
        """Yield the numbers of messages and what a template does not read of them.

        Args:
            messages: a conversation.
            given: to the template beside it; its tools are looked at as well.
            text: the conversation, rendered.
            template: of the conversation.
            render: renders messages by the template, with ``given`` or what is given instead.
        """
        for number, message in enumerate(messages):
            looked_after = _BOOKKEEPING | _LOOKED_AFTER.get(message["role"], set())
            for name, value in message.items():
                if name in looked_after or value in (None, "", [], {}):
                    continue
                if not self._is_new(template, message["role"], name):
                    continue
                without = {key: value for key, value in message.items() if key != name}
                if _is_same(text, render, [*messages[:number], without, *messages[number + 1 :]], given):
                    yield number, f"the field {name!r} of messages of the role {message['role']}"
        if (
            given.get("tools")
            and self._is_new(template, "tools")
            and _is_same(text, render, messages, {**given, "tools": None})
        ):
            yield 0, "the tools that a record offers"

    def _is_new(self, *what: str) -> bool:
        is_new = what not in self._looked_at
        self._looked_at.add(what)
        return is_new


def _is_same(
    text: str, render: Callable[..., str], messages: Sequence[Message], given: Mapping[str, Any]
) -> bool:
    try:
        return render(messages, given=given) == text
    except DataError:  # the template needs it
        return False


MARKED = re.compile(r"{%-?\s*generation\s*-?%}")
_BEGIN = re.compile(r"({%-?\s*generation\s*)(-?%})")
_END = re.compile(r"({%-?)(\s*endgeneration\s*-?%})")
_OPENS, _CLOSES = "\U000323ae", "\U000323af"
_BORDER = re.compile(f"[{_OPENS}{_CLOSES}]")


def mark(template: str) -> str:
    """Return a template that writes a character at each end of what it marks, and is the same otherwise."""
    template = _BEGIN.sub(rf'\1%}}{{{{ "{_OPENS}" }}}}{{% if true %}}{{% endif \2', template)
    return _END.sub(rf'\1 if true %}}{{% endif %}}{{{{ "{_CLOSES}" }}}}{{%\2', template)


def marked_spans(rendered: str) -> tuple[str, list[Span]]:
    """Return what a template of `mark` has rendered without those characters, and what they enclose."""
    pieces, spans, length, begin, start = [], [], 0, 0, 0
    for border in _BORDER.finditer(rendered):
        pieces.append(rendered[begin : border.start()])
        length, begin = length + len(pieces[-1]), border.end()
        if border[0] == _OPENS:
            start = length
        else:
            spans.append((start, length))
    return "".join([*pieces, rendered[begin:]]), spans


def spans_of(
    spans: list[Span], messages: Sequence[Message], turns: Sequence[int], reading: Reading | None, where: str
) -> list[Span]:
    """Return the spans of some replies out of those of all.

    Args:
        spans: in order.
        messages: the conversation.
        turns: numbers of the replies.
        reading: of the conversation, where the template can be read.
        where: ``file:line``, for errors.

    Raises:
        DataError: the marks enclose words of others, or it cannot be told whose a span is.
    """
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    owners: list[int | None] = [None] * len(spans)
    for block in reading.blocks if reading else ():
        for n, (start, end) in enumerate(spans):
            if block.start < end and start < block.end:
                if block.message not in replies:
                    raise DataError(
                        f"{where}: the chat template marks message {block.message + 1} with {{% generation %}}, which "
                        f"is one of the role {messages[block.message]['role']}"
                    )
                owners[n] = block.message
    if len(turns) == len(replies):
        return spans
    if len(spans) == len(replies):
        owners = list(replies)
    for n, owner in enumerate(owners):  # a mark of no words goes on with the reply before, e.g. with its end
        owners[n] = owners[n - 1] if owner is None and n else owner
    if reading is None and len(spans) != len(replies):
        raise DataError(
            f"{where}: the chat template marks {len(spans)} parts as the assistant's, but the conversation has "
            f"{len(replies)} of its messages, so they cannot be trained apart; use data.train_on=replies"
        )
    return [span for span, owner in zip(spans, owners, strict=True) if owner in turns]


def reply_end(render: Callable[..., tuple[str, list[Span]]]) -> str:
    """Return what a template writes behind the words of a reply and has trained with them; or nothing."""
    question, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": _WORD}
    try:
        text, spans = render([question, answer], (1,), None, "the template")
    except DataError:
        return ""
    _, word, end = text[: spans[-1][1]].rpartition(_WORD) if spans else ("", "", "")
    return end.strip() if word else ""
