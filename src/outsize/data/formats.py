"""What a record means: the table of formats, how one is recognised, and the document each record becomes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outsize.data.record_reader import Record
from outsize.errors import DataError

FormatName = Literal["text", "messages", "sharegpt", "prompt_completion", "alpaca", "tokens"]
FORMATS: tuple[str, ...] = ("auto", "text", "messages", "sharegpt", "prompt_completion", "alpaca", "tokens")
DEFAULT_TEXT_FIELD = "text"


@dataclass(frozen=True)
class Document:
    """What is tokenised as one, before special tokens.

    Attributes:
        where: ``file:line``, for errors.
        text: the text, or a prompt and its completion in one.
        trained_from: character of ``text`` where training begins; 0 trains all of it.
        messages: a conversation, instead of ``text``: dicts with ``role`` and ``content``.
        tools: JSON schemas offered to the conversation's template.
        opens: the document begins here (a long text comes in pieces).
        closes: the document ends here.
    """

    where: str
    text: str = ""
    trained_from: int = 0
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    opens: bool = True
    closes: bool = True


def detect_format(record: Record, text_field: str, where: str) -> FormatName:
    """Return the format of a record, by its fields; the first row of the table that fits wins.

    A ``text_field`` other than the default was asked for by name, so it wins over the table.

    Raises:
        DataError: no format fits.
    """
    if text_field != DEFAULT_TEXT_FIELD and text_field in record:
        return "text"
    for name, fields in _REQUIRED_FIELDS.items():
        if all(field in record for field in fields):
            return name
    if text_field in record:
        return "text"
    raise DataError(
        f"{where}: no known format has the fields {_listed(record)}; expected {text_field!r} (text_field), "
        "'messages', 'conversations', 'prompt' and 'completion', or 'instruction' and 'output'"
    )


def to_document(record: Record, format_name: FormatName, text_field: str, where: str) -> Document:
    """Return the document of a record.

    Raises:
        DataError: the record is of another format, or a field is of the wrong type.
    """
    fields = _REQUIRED_FIELDS.get(format_name, (text_field,))
    missing = [field for field in fields if field not in record]
    if missing:
        raise DataError(
            f"{where}: a record of format {format_name!r} needs {_listed(missing)}, found {_listed(record)}; "
            "all records of a data set have one format"
        )
    if format_name == "text":
        return Document(where, _string(record, text_field, where))
    return _BUILDERS[format_name](record, where)


def _prompt_completion(record: Record, where: str) -> Document:
    prompt = _string(record, "prompt", where)
    return Document(where, prompt + _string(record, "completion", where), trained_from=len(prompt))


def _alpaca(record: Record, where: str) -> Document:
    # The prompt of Stanford Alpaca, word for word: what such data was written for.
    instruction, context = _string(record, "instruction", where), record.get("input") or ""
    if not isinstance(context, str):
        raise DataError(f"{where}: field 'input' must be a string, found {type(context).__name__}")
    task = "Below is an instruction that describes a task"
    if context:
        prompt = (
            f"{task}, paired with an input that provides further context. Write a response that "
            f"appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
            f"### Input:\n{context}\n\n### Response:\n"
        )
    else:
        prompt = (
            f"{task}. Write a response that appropriately completes the request.\n\n"
            f"### Instruction:\n{instruction}\n\n### Response:\n"
        )
    return Document(where, prompt + _string(record, "output", where), trained_from=len(prompt))


def _messages(record: Record, where: str) -> Document:
    messages = []
    for message in _turns(record, "messages", where):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise DataError(f"{where}: a message needs a 'role', found the fields {_listed(message)}")
        messages.append({**message, "content": _flat_content(content, where)})
    return Document(where, messages=messages, tools=record.get("tools") or None)


def _sharegpt(record: Record, where: str) -> Document:
    messages = []
    for turn in _turns(record, "conversations", where):
        speaker, value = turn.get("from"), turn.get("value")
        role = _SHAREGPT_ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
        if role is None or not isinstance(value, str):
            raise DataError(
                f"{where}: a turn needs a string 'value' and 'from' out of {_listed(_SHAREGPT_ROLES)}, "
                f"found from={speaker!r} and a value of type {type(value).__name__}"
            )
        messages.append({"role": role, "content": value})
    return Document(where, messages=messages)


def _flat_content(content: object, where: str) -> str:
    """Return a message's content as text: a string, the text parts of a list, or nothing (tool calls)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(p, dict) and isinstance(p.get("text"), str) for p in content
    ):
        return "".join(part["text"] for part in content)
    raise DataError(f"{where}: the 'content' of a message must be text, found {type(content).__name__}")


def _turns(record: Record, field: str, where: str) -> list[dict[str, Any]]:
    turns = record[field]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise DataError(f"{where}: field {field!r} must be a list of at least one object")
    return turns


def _string(record: Record, field: str, where: str) -> str:
    value = record[field]
    if not isinstance(value, str):
        hint = "; use the format 'messages' for conversations" if isinstance(value, list) else ""
        raise DataError(f"{where}: field {field!r} must be a string, found {type(value).__name__}{hint}")
    return value


def _listed(names: Mapping[str, Any] | list[str]) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"


_REQUIRED_FIELDS: dict[FormatName, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}
_BUILDERS: dict[FormatName, Callable[[Record, str], Document]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "prompt_completion": _prompt_completion,
    "alpaca": _alpaca,
}
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
