"""What a model is asked: prompts of the command line, of a file, of standard input, and a conversation line by line."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from outsize.errors import DataError

Messages = list[dict[str, Any]]
Prompt = str | Messages


def read_prompts(
    given: Sequence[str], file: Path | None, *, chat: bool = False, system: str | None = None
) -> list[Prompt]:
    """Return the prompts, in order.

    Args:
        given: on the command line.
        file: with one on each line, or as ``.jsonl`` a record with ``prompt`` or ``messages``; ``-`` is standard input.
        chat: whether a text is the message of a user.
        system: message that such a conversation begins with.

    Raises:
        DataError: the file cannot be read, or a line of it is no prompt; says where.
    """
    prompts: list[Prompt] = list(given)
    if file is not None:
        lines = ((number, line) for number, line in enumerate(_lines(file), 1) if line.strip())
        is_records = file.suffix == ".jsonl"
        prompts += [_of_record(line, f"{file}:{number}") if is_records else line for number, line in lines]
    if not chat:
        return prompts
    first: Messages = [] if system is None else [{"role": "system", "content": system}]
    return [[*first, *_as_messages(prompt)] for prompt in prompts]


def conversation(
    reply: Callable[[Messages], str], system: str | None, lines: Iterable[str], say: Callable[[str], None]
) -> None:
    """Answer line by line, each with all that was said before; ends with the lines.

    Args:
        reply: answers a conversation.
        system: message that it begins with.
        lines: of the user.
        say: told how to end it.
    """
    say("one message per line; end with Ctrl-D")
    messages: Messages = [] if system is None else [{"role": "system", "content": system}]
    for line in lines:
        if line.strip():
            messages.append({"role": "user", "content": line.strip()})
            messages.append({"role": "assistant", "content": reply(messages)})


def _lines(file: Path) -> list[str]:
    """Return the lines of a file in UTF-8: they end at a line feed, and at nothing else that may be in a text."""
    try:
        if str(file) == "-":
            piped = getattr(sys.stdin, "buffer", None)  # of bytes: the locale has no say in what they are
            text = sys.stdin.read() if piped is None else piped.read().decode("utf-8-sig")
        else:
            text = file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file} cannot be read as text: {error}; name a file in UTF-8 with a prompt on each line"
        ) from error
    return [line.removesuffix("\r") for line in text.split("\n")]


def _of_record(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON: {error}") from error
    found = (record.get("messages") or record.get("prompt")) if isinstance(record, dict) else None
    if isinstance(found, str) or (isinstance(found, list) and all(isinstance(m, dict) for m in found)):
        return found
    raise DataError(f"{where}: a record needs 'prompt', a text, or 'messages', a list of objects")


def _as_messages(prompt: Prompt) -> Messages:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
