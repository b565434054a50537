"""Messages out of records: who speaks, what they say, and which of it its author has marked as not to be learnt.

A message is ``{"role": ..., "content": ...}`` or ``{"from": ..., "value": ...}``; whatever else it holds (tool
calls, a name, reasoning) goes to the chat template. The conventions are those of OpenAI, ShareGPT, LLaMA-Factory,
axolotl and TRL.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outsize.data.reading.text_records import Record
from outsize.errors import DataError

Message = dict[str, Any]
Roles = Mapping[str, str]

# Under each, a message says whether it is trained: of OpenAI and Mistral, axolotl, ms-swift.
_TRAINED_FLAGS = ("weight", "train", "training", "trainable", "loss", "loss_weight")
TRUTHS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
# Parts of a message that its author has marked; nothing here trains parts of messages.
PARTIAL_FLAGS = ("train_detail", "loss_mask", "label_mask", "mask", "masked", "loss_scale")
SYSTEM_FIELDS = ("system", "system_prompt")
# Parts of a content that are text: of transformers and OpenAI, and of its responses.
_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA = ("images", "image", "videos", "video", "audios", "audio", "files")
_NO_MEDIA = "leave such records out, or raise data.max_bad_records"
_CALLS = ("function_call", "tool_call", "tool_calls")
# What data sets call those who speak, and the role that a chat template knows.
ROLES = {
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "ai"), "assistant"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
    **{role: role for role in ("system", "developer", "ipython")},
}


def read_messages(record: Record, field: str, where: str, roles: Roles) -> list[Message]:
    """Return the messages of a field, their roles those that chat templates know, their content text.

    A list may be written as JSON text, as a cell of a table is; one message may stand without a list around it.

    Raises:
        DataError: the field is no list of messages, or a speaker is not known.
    """
    turns = from_json_text(record[field], field, where)
    turns = [turns] if isinstance(turns, dict) else turns
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        is_of_lists = isinstance(turns, list) and turns and all(isinstance(turn, list) for turn in turns)
        hint = "; each conversation of this list of lists is a record of its own" if is_of_lists else ""
        raise DataError(
            f"{where}: field {field!r} must be a list of messages, at least one, each an object with its role{hint}"
        )
    return [_message(turn, where, roles) for turn in turns]


def as_messages(record: Record, field: str, role: str, where: str, roles: Roles) -> list[Message]:
    """Return the messages of a field; a text is one message of ``role``.

    Raises:
        DataError: see `read_messages`.
    """
    value = record[field]
    if isinstance(value, str) and not holds_messages(value):
        return [{"role": role, "content": value}]
    return read_messages(record, field, where, roles)


def holds_messages(value: Any) -> bool:
    """Return whether a prompt or an answer is messages, perhaps as the JSON text of a cell, and not a text."""
    if isinstance(value, str) and value.lstrip().startswith("[") and value.rstrip().endswith("}]"):
        try:
            return is_conversation(json.loads(value))
        except (ValueError, RecursionError):
            return False
    return isinstance(value, list | dict)


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list of messages."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and is_message(turn) for turn in value)
    )


def is_message(turn: Message) -> bool:
    """Return whether an object has the fields of a message."""
    return {"role", "content"} <= set(turn) or {"from", "value"} <= set(turn)


def with_system(messages: list[Message], record: Record, where: str) -> list[Message]:
    """Return a conversation that begins with the system prompt beside it, if there is one.

    Raises:
        DataError: the prompt is no text, or the conversation begins with another one.
    """
    name = system_field(record)
    if name is None:
        return messages
    text = _flat_content(record[name], where, name)
    if messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    if messages[0]["content"] != text:
        raise DataError(
            f"{where}: the conversation begins with another system prompt than field {name!r} holds; keep one of them"
        )
    return messages


def system_field(record: Record) -> str | None:
    """Return the name of the field with a system prompt; None where there is none, or it is blank."""
    return next((name for name in SYSTEM_FIELDS if not is_blank(record.get(name))), None)


def is_blank(value: Any) -> bool:
    """Return whether a value says nothing."""
    return not value.strip() if isinstance(value, str) else value is None or value in ([], {})


def read_tools(record: Record, where: str) -> list[Any] | None:
    """Return the tools that a record offers, None for none; they may be written as JSON text.

    Raises:
        DataError: they are no list.
    """
    tools = from_json_text(record.get("tools") or None, "tools", where)
    if not tools and isinstance(record.get("functions"), list):  # OpenAI's, before tools
        tools = [{"type": "function", "function": function} for function in record["functions"]]
    tools = [tools] if isinstance(tools, dict) else tools
    if isinstance(tools, list):
        tools = [from_json_text(tool, "tools", where) for tool in tools]
    if tools is not None and not isinstance(tools, list):
        raise DataError(
            f"{where}: field 'tools' must be a list of JSON schemas, found {type(tools).__name__}"
        )
    return tools or None


def read_template_arguments(record: Record, where: str) -> dict[str, Any]:
    """Return the variables that a record hands to the chat template beside its messages, as in TRL.

    Raises:
        DataError: they are no object.
    """
    arguments = from_json_text(record.get("chat_template_kwargs"), "chat_template_kwargs", where)
    if arguments is not None and not isinstance(arguments, dict):
        raise DataError(
            f"{where}: field 'chat_template_kwargs' must be an object, found {type(arguments).__name__}"
        )
    return arguments or {}


def from_json_text(value: Any, field: str, where: str) -> Any:
    """Return what a text of JSON says, where a list or an object is needed; other values as they are.

    Raises:
        DataError: the text is no JSON.
    """
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        python = value.lstrip().startswith(("[{'", "{'"))
        why = (
            "its quotes are single, as Python prints a list; write it with json.dumps"
            if python
            else str(error)
        )
        raise DataError(f"{where}: field {field!r} is a text, and not one of JSON: {why}") from error


def pop_trained(message: Message, where: str) -> bool | None:
    """Take out of a message whether its author wants it trained; None where nothing is said.

    Raises:
        DataError: something is said that is neither yes nor no.
    """
    flags = {name: message.pop(name) for name in _TRAINED_FLAGS if name in message}
    flags = {name: value for name, value in flags.items() if value is not None}
    answers = {TRUTHS.get(str(value).lower()) for value in flags.values()}
    if None in answers or len(answers) > 1:
        shown = ", ".join(f"{name}: {value!r}" for name, value in flags.items())
        raise DataError(
            f"{where}: a message with {shown}: 0 or false is not trained, 1 or true is, and nothing in between"
        )
    return next(iter(answers), None)


def listed(names: Mapping[str, Any] | Sequence[str]) -> str:
    """Return names as a list for people."""
    return ", ".join(repr(name) for name in names) or "nothing"


def _message(turn: Message, where: str, roles: Roles) -> Message:
    speaker, name = _one_of(turn, ("role", "from"), where)
    content_key, value = _one_of(turn, ("content", "value"), where)
    rest = {key: value for key, value in turn.items() if key not in ("role", "from", "content", "value")}
    if isinstance(name, str) and name.lower() in _CALLS and name not in roles:
        return {"role": "assistant", "content": "", **rest, "tool_calls": _calls(value, where)}
    if isinstance(rest.get("function_call"), dict) and not rest.get("tool_calls"):  # OpenAI's, before tools
        rest["tool_calls"] = _calls(rest.pop("function_call"), where)
    if calls := _listed_calls(rest.pop("tool_calls", None), where):
        rest["tool_calls"] = calls
    if speaker not in turn:
        raise DataError(
            f"{where}: a message has 'role' and 'content', or 'from' and 'value'; found {listed(turn)}"
        )
    role = _role(name, speaker, where, roles)
    if content_key == "value" and not isinstance(value, str):
        raise DataError(f"{where}: a turn needs a string 'value', found {type(value).__name__}")
    if media := next((key for key in _MEDIA if not is_blank(rest.get(key))), None):
        raise DataError(
            f"{where}: a message of the {role} has {media!r}, and what is trained here is text; {_NO_MEDIA}"
        )
    if content_key not in turn and not rest.get("tool_calls"):
        raise DataError(f"{where}: a message of the {role} has no 'content', found {listed(turn)}")
    if is_blank(value) and not is_blank(rest.get("refusal")):
        raise DataError(
            f"{where}: a message of the {role} has a 'refusal' and no 'content'; put the words there"
        )
    return {**rest, "role": role, "content": _flat_content(value, where, "content")}


def _listed_calls(value: Any, where: str) -> list[Any]:
    """Return the calls of a message, which may be JSON text or one alone."""
    calls = from_json_text(value, "tool_calls", where)
    if is_blank(calls):
        return []
    calls = [
        from_json_text(call, "tool_calls", where) for call in (calls if isinstance(calls, list) else [calls])
    ]
    if not all(isinstance(call, dict) for call in calls):
        raise DataError(f"{where}: field 'tool_calls' must be a list of objects, found {value!r}")
    return calls


def _one_of(turn: Message, names: tuple[str, str], where: str) -> tuple[str, Any]:
    """Return the name and value of the one of two fields that says something; of neither, the one that is there."""
    first, second = names
    present = [name for name in names if turn.get(name) is not None]
    if len(present) == 2 and turn[first] != turn[second]:
        raise DataError(f"{where}: a message has {first!r} and {second!r}, and they differ; keep one of them")
    name = present[0] if present else second if second in turn and first not in turn else first
    return name, turn.get(name)


def _calls(value: Any, where: str) -> list[Message]:
    """Return the calls that a turn of LLaMA-Factory's role ``function_call`` holds as JSON."""
    calls = from_json_text(value, "function_call", where)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise DataError(f"{where}: a call is an object with name and arguments, as JSON, not {value!r}")
    return [
        {
            "type": "function",
            "function": {
                "name": call["name"],
                "arguments": from_json_text(call.get("arguments") or {}, "arguments", where),
            },
        }
        for call in calls
    ]


def _role(speaker: object, field: str, where: str, roles: Roles) -> str:
    """Return the role of a speaker; one that nobody knows is not left untrained in silence."""
    if not isinstance(speaker, str):
        raise DataError(f"{where}: a message needs a string {field!r}, found {type(speaker).__name__}")
    role = roles.get(speaker) or ROLES.get(speaker.lower())
    if role is None:
        raise DataError(
            f"{where}: unknown role {speaker!r}; known are {listed(ROLES)}; write one of them, or for training "
            f"have data.roles say which role the speaker has, e.g. {{{speaker}: assistant}}"
        )
    return role


def _flat_content(content: object, where: str, field: str) -> str:
    """Return a message's content as text: a string, the text parts of a list, or nothing (tool calls)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_text_of(part, where, field) for part in content)
    raise DataError(f"{where}: the {field!r} of a message must be text, found {type(content).__name__}")


def _text_of(part: object, where: str, field: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if isinstance(part, dict) and kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    raise DataError(
        f"{where}: the {field!r} of a message must be text, and a part of it is {kind!r}; {_NO_MEDIA}"
    )
