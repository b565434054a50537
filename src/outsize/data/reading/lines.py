"""Text out of chunks of bytes: lines with their numbers, and pieces of a document of bounded size."""

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

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
    for chunk in _with_end(chunks):
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


def _with_end(chunks: Iterable[bytes]) -> Iterator[bytes | None]:
    yield from chunks
    yield None


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
