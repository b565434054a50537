"""Conversations that a model is to answer, read as those that it is trained on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outsize.data.chat import ChatTemplate
from outsize.data.reading.conversations import (
    SYSTEM_FIELDS,
    as_messages,
    is_blank,
    read_messages,
    read_template_arguments,
    read_tools,
    with_system,
)
from outsize.data.reading.formats import unread_fields
from outsize.errors import DataError

# Of fields that hold a conversation the first that a record has counts.
_MESSAGES = ("messages", "conversations", "prompt")
_BESIDE = (*SYSTEM_FIELDS, "tools", "functions", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, to be answered by the assistant.

    Attributes:
        messages: dicts with ``role`` and ``content``, and what else a chat template reads.
        tools: JSON schemas that are offered to the template; None for none.
        options: further variables of the template, e.g. ``enable_thinking``.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def read_prompt(record: Mapping[str, Any], where: str, *, chat: bool = False) -> str | Conversation:
    """Return what a record asks for: a text to go on from, or a conversation to answer.

    Args:
        record: with ``prompt``, a text, or a conversation under ``messages``, ``conversations`` or ``prompt``; beside a
            conversation ``system``, ``tools`` and ``chat_template_kwargs`` count, as in data that are trained on.
        where: ``file:line``, for errors.
        chat: whether a text is the message of a user.

    Raises:
        DataError: it asks for nothing, or says of a conversation what a text does not have.
    """
    name = _field_of(record)
    if not name or not isinstance(record[name], str | list | dict):
        raise DataError(f"{where}: a record needs 'prompt', a text, or 'messages', a list of objects")
    text = record[name]
    if name == "prompt" and isinstance(text, str) and not chat:
        beside = [each for each in _BESIDE if not is_blank(record.get(each))]
        if beside:
            raise DataError(
                f"{where}: {', '.join(beside)}: beside a 'prompt' that is a text to go on from; for a conversation say "
                "--chat, or write 'messages'"
            )
        return text
    if name == "prompt":
        messages = as_messages(dict(record), name, "user", where, {})
    else:
        messages = read_messages(dict(record), name, where, {})
    messages = with_system(messages, dict(record), where)
    return Conversation(
        messages, read_tools(dict(record), where), read_template_arguments(dict(record), where)
    )


def unread_of(record: Mapping[str, Any]) -> list[str]:
    """Return the fields of a record to be answered that hold something and are not read."""
    return unread_fields(dict(record), {_field_of(record), *_BESIDE})


def _field_of(record: Mapping[str, Any]) -> str:
    return next((name for name in _MESSAGES if record.get(name) not in (None, "", [], {})), "")


def chat_text(tokenizer: Any, asked: Conversation) -> str:
    """Return a conversation as text, by the template of its tokenizer, up to where the reply begins.

    Raises:
        DataError: the template refuses the conversation.
    """
    return ChatTemplate(tokenizer).open(asked.messages, asked.tools, asked.options)
