"""Records of preferences as TRL's trainers take them: a prompt, answers to it, and what is offered beside."""

import json
import math
from collections.abc import Sequence
from typing import Any

from outsize.data.reading.conversations import (
    PARTIAL_FLAGS,
    Message,
    Roles,
    as_messages,
    listed,
    pop_trained,
    read_messages,
    read_tools,
    system_field,
    with_system,
)
from outsize.data.reading.formats import alpaca_prompt
from outsize.data.reading.json_records import Record
from outsize.errors import DataError

Row = dict[str, Any]
CONVERSATIONS = ("messages", "conversations")
_ALPACA = ("instruction", "input", "history")
# Names of a prompt that nothing reads.
_OTHER_PROMPTS = ("question", "query", "input", "problem", "context")


def has_messages(record: Record, answers: Sequence[str]) -> bool:
    """Return whether a prompt or an answer of a record is messages, and not a text."""
    return any(isinstance(record.get(name), list | dict) for name in ("prompt", *answers)) or any(
        record.get(name) for name in CONVERSATIONS
    )


def asks_as_chat(record: Record) -> bool:
    """Return whether a record has what only a conversation has room for: a system prompt, an instruction."""
    return bool(system_field(record) or record.get("instruction"))


def texts_row(record: Record, answers: Sequence[str], where: str) -> Row:
    """Return prompt and answers that are texts.

    Raises:
        DataError: one is no text, an answer is empty, or the prompt has another name.
    """
    prompt = record.get("prompt")
    _check_prompt_is_read(record, answers, where)
    row = {"prompt": prompt, **{name: record[name] for name in answers}}
    for name, value in row.items():
        if not isinstance(value, str) and (name != "prompt" or value is not None):
            raise DataError(
                f"{where}: field {name!r} must be a string or a list of messages, found {type(value).__name__}"
            )
        if name in answers and not str(value).strip():
            raise DataError(
                f"{where}: field {name!r} is empty; leave such records out, or raise data.max_bad_records"
            )
    return {name: value for name, value in row.items() if value is not None}


def _check_prompt_is_read(record: Record, answers: Sequence[str], where: str) -> None:
    """Refuse texts that are answers to nothing, since their prompt has a name that nothing reads."""
    if record.get("prompt") is not None or not all(isinstance(record.get(name), str) for name in answers):
        return
    other = next((name for name in _OTHER_PROMPTS if record.get(name)), None)
    if other is not None:
        raise DataError(
            f"{where}: {listed(answers)} are texts without a prompt, and field {other!r} would be left out; set "
            f"data.columns: {{prompt: {other}}}"
        )


def messages_row(
    record: Record, answers: Sequence[str], roles: Roles, where: str, *, alone: bool
) -> tuple[Row, set[str]]:
    """Return prompt, answers and tools of a conversation, and the names of the fields that were read for it.

    The prompt is `prompt`, or a conversation, or what an Alpaca record asks, or what the answers have in common;
    answers that may stand ``alone`` are conversations of their own where nothing else is the prompt.

    Raises:
        DataError: a field is of the wrong kind, an answer is empty, or does not begin where the prompt ends.
    """
    read = {*answers, "tools", "functions", system_field(record) or ""}
    held = next((name for name in CONVERSATIONS if record.get(name)), None)
    given = {
        name: as_messages(record, name, "assistant", where, roles) for name in answers if record.get(name)
    }
    prompt: list[Message] | None = None
    if record.get("prompt"):
        prompt = as_messages(record, "prompt", "user", where, roles)
        read.add("prompt")
    elif held is not None:
        prompt = read_messages(record, held, where, roles)
        read.add(held)
        if not given:
            prompt, given = prompt[:-1], {answers[0]: prompt[-1:]}
        elif prompt[-1]["role"] == "assistant":
            raise DataError(
                f"{where}: field {held!r} ends with a message of the assistant, and the answers come after it; leave "
                "that message out, or name the prompt 'prompt'"
            )
    elif record.get("instruction"):
        prompt = alpaca_prompt(record, where)
        read.update(_ALPACA)
    if not prompt:
        _check_prompt_is_read(record, answers, where)
    if not prompt and not alone:
        prompt, given = _split_off(given, where)
    if prompt:
        prompt = with_system(prompt, record, where)
    else:
        given = {name: with_system(messages, record, where) for name, messages in given.items()}
    row = {name: _answer(given.get(name, []), prompt, name, where) for name in answers}
    if prompt:
        row = {"prompt": prompt, **row}
    for messages in row.values():
        _without_marks(messages, where)
    tools = read_tools(record, where)
    return {**row, **({} if tools is None else {"tools": json.dumps(tools)})}, read


def finite(value: Any, name: str, where: str) -> float:
    """Return a finite number.

    Raises:
        DataError: it is none.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{where}: field {name!r} is a number, not {value!r}")
    return number


def _split_off(given: dict[str, list[Message]], where: str) -> tuple[list[Message], dict[str, list[Message]]]:
    """Return what two answers begin with alike, and what is left of each, as TRL's ``extract_prompt``."""
    chosen, *_, rejected = [*given.values()] * 2
    pairs = enumerate(zip(chosen, rejected, strict=False))
    length = next((i for i, (one, other) in pairs if one != other), min(len(chosen), len(rejected)) - 1)
    if not length:
        raise DataError(
            f"{where}: {listed(given)} have no message in common that would be the prompt; name it 'prompt'"
        )
    return chosen[:length], {name: messages[length:] for name, messages in given.items()}


def _answer(messages: list[Message], prompt: list[Message] | None, name: str, where: str) -> list[Message]:
    """Return an answer without the prompt, which data sets put before it once more."""
    turns = [message for message in prompt or () if message["role"] != "system"]
    for before in (prompt, turns):
        if before and [_said(message) for message in messages[: len(before)]] == [
            _said(message) for message in before
        ]:
            messages = messages[len(before) :]
            break
    if not messages or not any(
        message["content"].strip() or message.get("tool_calls") for message in messages
    ):
        raise DataError(
            f"{where}: field {name!r} is empty; leave such records out, or raise data.max_bad_records"
        )
    if prompt and messages[0]["role"] != "assistant":
        raise DataError(
            f"{where}: field {name!r} begins with a message of the {messages[0]['role']} that does not end the "
            "prompt; an answer is the assistant's"
        )
    return messages


def _said(message: Message) -> tuple[Any, Any]:
    return message["role"], message["content"]


def _without_marks(messages: list[Message], where: str) -> None:
    """Take out of messages what says that they are trained, which an answer is, and refuse what says otherwise."""
    for message in messages:
        refused = [name for name in PARTIAL_FLAGS if message.get(name) is not None]
        if pop_trained(message, where) is False and message["role"] == "assistant":
            refused.append("a mark that it is not to be trained")
        if refused:
            raise DataError(
                f"{where}: a message has {', '.join(refused)}, and answers are compared as they are; take it out, or "
                "leave such records out"
            )
