"""What a model is asked: prompts of the command line, of a file, of standard input, and a conversation line by line."""

import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from outsize import files
from outsize.errors import DataError
from outsize.training.run_data import Conversation, read_prompt, unread_of

Prompt = str | Conversation

_log = logging.getLogger(__name__)


def read_prompts(
    given: Sequence[str], file: Path | None, *, chat: bool = False, system: str | None = None
) -> list[Prompt]:
    """Return the prompts, in order.

    Args:
        given: on the command line.
        file: with one on each line, or as ``.jsonl`` a record (`read_prompt`); ``-`` is standard input.
        chat: whether a text is the message of a user.
        system: message that such a conversation begins with.

    Raises:
        DataError: the file cannot be read, or a line of it is no prompt; says where.
    """
    prompts: list[Prompt] = [_spoken(text) if chat else text for text in given]
    where = ["--prompt"] * len(prompts)
    if file is not None:
        lines = [(line, f"{file}:{number}") for number, line in enumerate(_lines(file), 1) if line.strip()]
        where += [at for _, at in lines]
        if file.suffix == ".jsonl":
            records = [_record(line, at) for line, at in lines]
            prompts += [
                read_prompt(record, at, chat=chat) for record, (_, at) in zip(records, lines, strict=True)
            ]
            tell_unread((name for record in records for name in unread_of(record)), file)
        else:
            prompts += [_spoken(line) if chat else line for line, _ in lines]
    if system is None:
        return prompts
    return [_with_system(prompt, system, at) for prompt, at in zip(prompts, where, strict=True)]


def read_records(file: Path) -> list[tuple[dict[str, Any], str]]:
    """Return the records of a ``.jsonl`` and where each stands.

    Raises:
        DataError: the file cannot be read, or a line of it is no JSON; says where.
    """
    lines = ((line, f"{file}:{number}") for number, line in enumerate(_lines(file), 1) if line.strip())
    return [(_record(line, where), where) for line, where in lines]


def conversation(
    reply: Callable[[Conversation], str], system: str | None, lines: Iterable[str], say: Callable[[str], None]
) -> None:
    """Answer line by line, each with all that was said before; ends with the lines.

    Args:
        reply: answers a conversation.
        system: message that it begins with.
        lines: of the user.
        say: told how to end it.
    """
    say("one message per line; end with Ctrl-D")
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    for line in lines:
        if line.strip():
            messages.append({"role": "user", "content": line.strip()})
            messages.append({"role": "assistant", "content": reply(Conversation(messages))})


def _lines(file: Path) -> list[str]:
    """Return the lines of a file in UTF-8: they end at a line feed, and at nothing else that may be in a text."""
    return [line.removesuffix("\r") for line in read_text(file).split("\n")]


def read_text(file: Path) -> str:
    """Return the text of a file; ``-`` is standard input.

    Raises:
        DataError: it cannot be read, or is not UTF-8.
    """
    try:
        if str(file) == "-":
            piped = getattr(sys.stdin, "buffer", None)  # of bytes: the locale has no say in what they are
            return sys.stdin.read() if piped is None else str(piped.read(), "utf-8-sig")
        return files.read_bytes(file, files.MOST_TEXT).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as text: {error}; name a file in UTF-8") from error


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON: {error}") from error
    return record if isinstance(record, dict) else {}


def tell_unread(unread: Iterable[str], file: Path) -> None:
    """Say which fields of the records of a file are not read, and how many have them."""
    counts = Counter(unread)
    if counts:
        named = ", ".join(f"{name} ({count})" for name, count in counts.items())
        _log.warning("%s: these fields are not read (records that have them): %s", file, named)


def _spoken(text: str) -> Conversation:
    return Conversation([{"role": "user", "content": text}])


def _with_system(prompt: Prompt, system: str, where: str) -> Prompt:
    """Return a conversation that begins with the system message of the command; a text stays as it is."""
    if isinstance(prompt, str):
        return prompt
    first = prompt.messages[0]
    if first["role"] not in ("system", "developer"):
        return Conversation(
            [{"role": "system", "content": system}, *prompt.messages], prompt.tools, prompt.options
        )
    if first["content"] != system:
        raise DataError(
            f"{where}: the conversation has a system message, and --system says another; leave one out"
        )
    return prompt
