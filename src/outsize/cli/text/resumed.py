"""Results of a command, a line of JSON each, that goes on behind the last one when it is given again."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from outsize import files
from outsize.errors import ConfigError

SAY_S = 10.0  # between two lines of progress


def check_made_with(out: Path, made: Mapping[str, str]) -> None:
    """Note beside results what they are made with, and refuse to go on with those made with something else.

    Args:
        out: the results, or where they are to be.
        made: settings.

    Raises:
        ConfigError: they were made with others, or by something else.
    """
    note = out.with_name(out.name + ".made-with.json")
    if note.exists() and files.read_json(note, ConfigError, "choose another --out") != made:
        raise ConfigError(f"{out} was made with other settings, see {note}; choose another --out")
    if not note.exists() and out.exists():
        raise ConfigError(f"{out} exists, and this command has not made it; choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(made), encoding="utf-8")


def size_of(data: Path | None) -> str:
    """Return the bytes of a file, as settings note them; 0 where there is none."""
    return str(data.stat().st_size) if data is not None and data.exists() else "0"


class ResumedLines:
    """Lines of JSON in a file.

    Args:
        out: the file.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._former = list(self._read())
        self.count = len(self._former)

    def former(self) -> Iterator[dict[str, Any]]:
        """Return the lines of a former run, once."""
        former, self._former = self._former, []
        return iter(former)

    def add(self, line: Mapping[str, Any]) -> None:
        """Write a line."""
        with self._out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.count += 1

    def _read(self) -> Iterator[dict[str, Any]]:
        """Return the lines of a former run; what it wrote of a line that is not whole goes."""
        if not self._out.exists():
            return
        try:
            content = files.read_bytes(self._out, files.MOST_TEXT)
        except OSError as error:
            raise ConfigError(f"{self._out} cannot be read: {error}; choose another --out") from error
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            self._out.write_bytes(whole)
        for number, text in enumerate(whole.splitlines(), 1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            if not isinstance(line, dict):
                raise ConfigError(
                    f"{self._out}, line {number}: not what this command writes; choose another --out"
                )
            yield line


def now_and_then(say: Callable[[str], None]) -> Callable[[Callable[[], str]], None]:
    """Return what says how far a command is, at most every `SAY_S` seconds."""
    said = time.monotonic()

    def tell(text: Callable[[], str]) -> None:
        nonlocal said
        if time.monotonic() - said > SAY_S:
            said = time.monotonic()
            say(text())

    return tell
