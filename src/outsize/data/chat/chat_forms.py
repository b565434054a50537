"""The forms of a conversation: one record, written as one or another chat template reads it.

Arguments of a tool call are an object (transformers) or that object as text (OpenAI). Contents are text, or a list of
parts, which templates of models that also see read. A template that expects the one fails at the other, or is silent.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from outsize.data.chat.reply_spans import Message

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


def is_misread(messages: Sequence[Message], text: str) -> bool:
    """Return whether a template has written a form as what it is: JSON text as a string, parts as a list."""
    if any(isinstance(message["content"], list) for message in messages) and _PART.search(text):
        return True
    said = [_arguments(call) for message in messages for call in message.get("tool_calls") or ()]
    return any(
        isinstance(arguments, str)
        and '"' in arguments
        and arguments not in text
        and any(json.dumps(arguments, ensure_ascii=each) in text for each in (False, True))
        for arguments in said
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
