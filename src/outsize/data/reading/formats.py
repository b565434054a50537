"""What a record means: the table of formats, how one is recognised, and the document each record becomes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from outsize.data.reading.corpus import DEFAULT_TEXT_FIELD, Corpus, TrainOn
from outsize.data.reading.json_records import Record
from outsize.errors import DataError

FormatName = Literal["text", "messages", "sharegpt", "prompt_completion", "alpaca", "tokens"]
FORMATS: tuple[str, ...] = ("auto", "text", "messages", "sharegpt", "prompt_completion", "alpaca", "tokens")


@dataclass(frozen=True)
class Document:
    """What is tokenised as one, before special tokens.

    Attributes:
        where: ``file:line``, for errors.
        text: the text, or a prompt and its completion in one.
        trained_from: character of ``text`` where training begins; 0 trains all of it.
        messages: a conversation, instead of ``text``: dicts with ``role`` and ``content``.
        turns: numbers of the messages that are trained; None trains every token.
        tools: JSON schemas offered to the conversation's template.
        opens: the document begins here (a long text comes in pieces).
        closes: the document ends here.
    """

    where: str
    text: str = ""
    trained_from: int = 0
    messages: list[dict[str, Any]] | None = None
    turns: tuple[int, ...] | None = None
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
        "'messages', 'conversations', 'prompt' and 'completion', or 'instruction' and 'output'; "
        "data.columns maps these to other names, e.g. {prompt: question, completion: answer}"
    )


def renamed(record: Record, columns: Mapping[str, str], where: str) -> Record:
    """Return a record with its fields under our names.

    Raises:
        DataError: the record lacks a field that ``columns`` names.
    """
    missing = [theirs for theirs in columns.values() if theirs not in record]
    if missing:
        raise DataError(f"{where}: data.columns names {_listed(missing)}, found {_listed(record)}")
    rest = {name: value for name, value in record.items() if name not in columns.values()}
    return {**rest, **{ours: record[theirs] for ours, theirs in columns.items()}}


def to_document(record: Record, format_name: FormatName, corpus: Corpus, where: str) -> Document:
    """Return the document of a record.

    Args:
        record: its fields under our names.
        format_name: of the data set.
        corpus: names of the text field and of roles, and what is trained.
        where: ``file:line``, for errors.

    Raises:
        DataError: the record is of another format, or a field is of the wrong type.
    """
    text_field = corpus.text_field
    fields = _REQUIRED_FIELDS.get(format_name, (text_field,))
    missing = [field for field in fields if field not in record]
    if missing:
        raise DataError(
            f"{where}: a record of format {format_name!r} needs {_listed(missing)}, found {_listed(record)}; "
            "all records of a data set have one format"
        )
    if format_name == "text":
        return Document(where, _string(record, text_field, where))
    return _restricted(_BUILDERS[format_name](record, where, corpus.roles), corpus.train_on)


def _restricted(document: Document, train_on: TrainOn) -> Document:
    """Return a document of which as much is trained as is asked for, where a builder has marked all replies."""
    if train_on == "all":
        return replace(document, trained_from=0, turns=None)
    if train_on == "last" and document.turns:
        return replace(document, turns=document.turns[-1:])
    return document


def _prompt_completion(record: Record, where: str, roles: Mapping[str, str]) -> Document:
    """Return a prompt and its completion: two texts, or the two parts of a conversation."""
    parts = [record["prompt"], record["completion"]]
    if any(isinstance(part, list) for part in parts):
        asked, given = (read_messages(record, name, where, roles) for name in ("prompt", "completion"))
        return _conversation([*asked, *given], record, where, first=len(asked))
    prompt = _string(record, "prompt", where)
    return Document(where, prompt + _string(record, "completion", where), trained_from=len(prompt))


def _alpaca(record: Record, where: str, _: Mapping[str, str]) -> Document:
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


def _messages(record: Record, where: str, roles: Mapping[str, str]) -> Document:
    return _conversation(read_messages(record, "messages", where, roles), record, where)


def _sharegpt(record: Record, where: str, roles: Mapping[str, str]) -> Document:
    messages = []
    for turn in _turns(record, "conversations", where):
        value = turn.get("value")
        if not isinstance(value, str):
            raise DataError(f"{where}: a turn needs a string 'value', found {type(value).__name__}")
        messages.append({"role": _role(turn.get("from"), "from", where, roles), "content": value})
    return _conversation(messages, record, where)


def _conversation(messages: list[dict[str, Any]], record: Record, where: str, first: int = 0) -> Document:
    """Return a conversation of which the assistant's messages from number ``first`` on are trained."""
    turns = tuple(i for i, message in enumerate(messages) if i >= first and _is_trained(message))
    return Document(where, messages=messages, turns=turns, tools=record.get("tools") or None)


def _is_trained(message: Mapping[str, Any]) -> bool:
    """Return whether a message is one that is learnt; any subset of the assistant's can be."""
    return bool(message["role"] == "assistant")


def read_messages(record: Record, field: str, where: str, roles: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the messages of a field, their roles those that chat templates know, their content text.

    Raises:
        DataError: the field is no list of messages, or a speaker is not known.
    """
    return [
        {
            **message,
            "role": _role(message.get("role"), "role", where, roles),
            "content": _flat_content(message.get("content"), where),
        }
        for message in _turns(record, field, where)
    ]


def _role(speaker: object, field: str, where: str, roles: Mapping[str, str]) -> str:
    """Return the role of a speaker; one that nobody knows is not left untrained in silence."""
    if not isinstance(speaker, str):
        raise DataError(f"{where}: a message needs a string {field!r}, found {type(speaker).__name__}")
    role = roles.get(speaker) or _ROLES.get(speaker.lower())
    if role is None:
        raise DataError(
            f"{where}: unknown role {speaker!r}; known are {_listed(_ROLES)}; data.roles says which role a speaker "
            f"has, e.g. {{{speaker}: assistant}}"
        )
    return role


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
        hint = "; name the field 'messages' in data.columns" if isinstance(value, list) else ""
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
_BUILDERS: dict[FormatName, Callable[[Record, str, Mapping[str, str]], Document]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "prompt_completion": _prompt_completion,
    "alpaca": _alpaca,
}
# What data sets call those who speak, and the role that a chat template knows.
_ROLES = {
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "ai"), "assistant"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
    **{role: role for role in ("system", "developer", "ipython")},
}
