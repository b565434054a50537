"""Parse chunks of bytes into lines, pieces of text and JSON records."""

import codecs
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from outsize.data.reading.corpus_files import read_chunks
from outsize.errors import DataError

MAX_LINE_BYTES = 1 << 26  # a longer record is a wrong file more often than a document
PIECE_CHARS = 1 << 14


@dataclass(frozen=True)
class TextPiece:
    """A bounded part of a document, cut where tokenisers cut anyway.

    Attributes:
        text: at most `PIECE_CHARS` characters.
        line: number of the first line, from 1.
        opens: nothing of the document comes before.
        closes: nothing of the document comes after.
    """

    text: str
    line: int
    opens: bool
    closes: bool


def read_lines(chunks: Iterable[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line without its newline); a byte order mark is dropped.

    Raises:
        DataError: a line longer than `MAX_LINE_BYTES`.
    """
    number, rest = 1, b""
    for chunk in chunks:
        if b"\n" not in chunk:
            rest += chunk
        else:
            first, *lines = chunk.split(b"\n")
            for line in [rest + first, *lines[:-1]]:
                yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                number += 1
            rest = lines[-1]
        if len(rest) > MAX_LINE_BYTES:
            raise DataError(
                f"{path}:{number}: a line of more than {MAX_LINE_BYTES >> 20} MiB; is this JSON lines?"
            )
    if rest:
        yield number, rest.removeprefix(codecs.BOM_UTF8) if number == 1 else rest


def decode_chunks(chunks: Iterable[bytes], path: Path) -> Iterator[str]:
    """Yield the chunks as text, strictly UTF-8; a byte order mark is dropped.

    Raises:
        DataError: with file and line of the first byte that is not text.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    line = 1
    for chunk in chain(chunks, (None,)):
        try:
            text = decoder.decode(chunk or b"", final=chunk is None)
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
            raise DataError(f"{path}:{line}: not UTF-8 text ({error.reason})") from error
        if (nul := text.find("\0")) >= 0:
            raise DataError(
                f"{path}:{line + text.count(chr(10), 0, nul)}: not a text file (it holds NUL bytes); UTF-16 "
                "needs a byte order mark"
            )
        line += text.count("\n")
        if text:
            yield text


def cut_pieces(texts: Iterable[str]) -> Iterator[TextPiece]:
    """Yield the document that ``texts`` are consecutive parts of, in pieces, in constant memory.

    Tokens never span a cut, so cuts fall before a line that starts with a printable character where there is
    one, else before a space, else anywhere: most tokenisers end a token at the first two in any case.
    """
    rest, line, opens = "", 1, True
    for text in texts:
        rest += text
        start = 0
        while len(rest) - start > PIECE_CHARS:
            end = _cut(rest, start)
            yield TextPiece(rest[start:end], line, opens, closes=False)
            line += rest.count("\n", start, end)
            start, opens = end, False
        rest = rest[start:]
    if rest:  # never empty after a piece: the loop above leaves at least one character
        yield TextPiece(rest, line, opens, closes=True)


def _cut(text: str, start: int) -> int:
    """Return where the piece that begins at ``start`` ends, at most `PIECE_CHARS` later."""
    limit = start + PIECE_CHARS
    floor = limit - PIECE_CHARS // 2  # no piece is shorter than half
    newline = text.rfind("\n", floor, limit)
    while newline >= 0 and text[newline + 1].isspace():
        newline = text.rfind("\n", floor, newline)
    if newline >= 0:
        return newline + 1
    space = text.rfind(" ", floor, limit)
    return space if space > start else limit


logger = logging.getLogger(__name__)
Record = dict[str, Any]
Forgive = Callable[[DataError], None]


def refuse(error: DataError) -> None:
    """Raise an error: what forgives nothing."""
    raise error


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# Names under which one object holds all records of a file.
_WRAPPERS = ("data", "records", "rows", "examples", "items", "instances", "train")
# Fields of one record that are lists of objects.
_TURNS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected", "tools")


def read_json(path: Path, on_read: Callable[[int], None], forgive: Forgive) -> Iterator[tuple[int, Record]]:
    """Yield (line from 1, record) of a file of JSON; arguments and errors as of `read_records`.

    Objects may stand on a line each, in arrays, or on several lines each. A file of one object may hold its records
    as a list, ``{"data": [...]}``, or as columns, ``{"text": [...], "label": [...]}``.
    """
    first = _first_line(path)
    if first.startswith("[") or (first.startswith("{") and first.endswith(("{", "[", ",", ":"))):
        records = _read_values(decode_chunks(read_chunks(path, on_read), path), path, forgive)
    else:
        records = _read_lines(path, on_read, forgive)
    if first.startswith("["):
        yield from records
        return
    begin = next(records, None)
    second = next(records, None)
    if begin is not None:
        number, record = begin
        records_of = [record] if second is not None else _unwrapped(record)
        if len(records_of) > 1 or records_of[0] is not record:
            _say_of_columns(path, len(records_of))
        yield from ((number, each) for each in records_of)
    if second is not None:
        yield second
        yield from records


def _read_lines(path: Path, on_read: Callable[[int], None], forgive: Forgive) -> Iterator[tuple[int, Record]]:
    for number, line in read_lines(read_chunks(path, on_read), path):
        if not line.strip():
            continue
        try:
            text = line.decode()
            record = _as_record(json.loads(text), path, number)
            _check_is_text(record, text, f"{path}:{number}")
        except (ValueError, RecursionError) as error:
            forgive(DataError(f"{path}:{number}: not valid JSON: {_explained(error, line)}"))
        except DataError as error:
            forgive(error)
        else:
            yield number, record


def _explained(error: Exception, line: bytes) -> str:
    """Return in words why Python's parser gives up on a line."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text ({error.reason}); convert the file to UTF-8"
    if b"\0" in line:
        return "it holds NUL bytes; if it is UTF-16, convert the file to UTF-8"
    if line.lstrip().startswith((b"{'", b"[{'")):
        return "its quotes are single, as Python prints a dict; write records with json.dumps"
    return str(error)


def _read_values(texts: Iterable[str], path: Path, forgive: Forgive) -> Iterator[tuple[int, Record]]:
    """Parse arrays of objects, and objects, one after the other; the text in hand is one chunk plus one object."""
    source, decoder = iter(texts), json.JSONDecoder()
    text, number, inside = "", 1, False
    while True:
        body = text.lstrip(", \t\r\n" if inside else " \t\r\n")
        number += text.count("\n", 0, len(text) - len(body))
        text = body
        if text[:1] == ("]" if inside else "["):
            text, inside = text[1:], not inside
        elif text:
            if not inside and text[0] != "{":
                raise DataError(f"{path}:{number}: not valid JSON: {text[:1]!r} stands between records")
            try:
                value, end = decoder.raw_decode(text)
            except json.JSONDecodeError as error:
                if len(text) > MAX_LINE_BYTES or (more := next(source, None)) is None:
                    words = _explained(error, text[:3].encode()) if error.pos < 3 else error.msg
                    where = f"{path}:{number + error.lineno - 1}"
                    raise DataError(f"{where}: not valid JSON: {words}") from error
                text += more
                continue
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number}: not valid JSON: {_explained(error, b'')}") from error
            record = _as_record(value, path, number)
            try:
                _check_is_text(record, text[:end], f"{path}:{number}")
                yield number, record
            except DataError as error:
                forgive(error)
            number += text.count("\n", 0, end)
            text = text[end:]
        elif (more := next(source, None)) is not None:
            text = more
        elif inside:
            raise DataError(f"{path}:{number}: the JSON array is cut short")
        else:
            return


def _as_record(value: object, path: Path, number: int) -> Record:
    if not isinstance(value, dict):
        raise DataError(f"{path}:{number}: expected a JSON object, found {type(value).__name__}")
    return value


def _check_is_text(record: Record, text: str, where: str) -> None:
    """Refuse half a character, which JSON can write and no encoding can; ``text`` that escapes none holds none."""
    if not _SURROGATE.search(text):
        return
    for name, value in record.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise DataError(
                f"{where}: field {name!a} holds half a character ({ascii(half)[1:-1]}, a surrogate without the "
                "other), which is no text; write it whole, or raise data.max_bad_records"
            ) from error


@cache
def _say_of_columns(path: Path, count: int) -> None:
    """Say once how a file of one object is read: libraries read one record of lists."""
    logger.warning("%s: one JSON object that holds lists is read as the records in them (%d)", path, count)


def _unwrapped(record: Record) -> list[Record]:
    """Return the records that the only object of a file holds: as a list, as columns, or itself."""
    lists = [name for name in record if name in _WRAPPERS and _is_list_of(record[name], dict)]
    others = [value for name, value in record.items() if name not in lists]
    if len(lists) == 1 and not any(isinstance(value, list | dict) for value in others):
        return list(record[lists[0]])
    values = list(record.values())
    if values and all(isinstance(value, dict) and value for value in values):  # DataFrame.to_json()
        keys = list(values[0])
        if all(list(value) == keys for value in values) and all(key.isdigit() for key in keys):
            return [{name: value[key] for name, value in record.items()} for key in keys]
    if values and all(isinstance(value, list) and value for value in values):
        objects = {name for name, value in record.items() if _is_list_of(value, dict)}
        one_of_lists = len(record) == 1 and set(record) <= set(_TURNS) and _is_list_of(values[0], list)
        if (
            not one_of_lists
            and objects < set(record)
            and not objects & set(_TURNS)
            and len({len(value) for value in values}) == 1
        ):
            return [dict(zip(record, row, strict=True)) for row in zip(*values, strict=True)]
    return [record]


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, kind) for each in value)


def _first_line(path: Path) -> str:
    """Return the first line that is not blank, bare; of one longer than a chunk whether it begins an array."""
    rest = b""
    for chunk in read_chunks(path):
        rest = (rest + chunk).removeprefix(codecs.BOM_UTF8).lstrip()
        if rest:
            line, newline, _ = rest.partition(b"\n")
            return (line.strip() if newline else rest[:1].strip(b"{")).decode(errors="replace")
    return ""
