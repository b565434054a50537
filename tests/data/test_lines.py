import codecs
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.data.reading import text_records
from outsize.data.reading.text_records import PIECE_CHARS, cut_pieces, decode_chunks, read_lines
from outsize.errors import DataError

WHERE = Path("file.txt")


def chunked(body: bytes, size: int) -> list[bytes]:
    return [body[i : i + size] for i in range(0, len(body), size)]


@given(st.lists(st.binary(max_size=8)), st.integers(1, 9))
def test_lines_do_not_depend_on_chunks(parts, size):
    body = b"\n".join(parts).lstrip(codecs.BOM_UTF8)
    expected = body.removesuffix(b"\n").split(b"\n") if body else []
    assert list(read_lines(chunked(body, size), WHERE)) == [*enumerate(expected, start=1)]
    with_mark = chunked(codecs.BOM_UTF8 + body, size)
    assert [line for _, line in read_lines(with_mark, WHERE)] == (expected or [b""])


def test_a_line_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(text_records, "MAX_LINE_BYTES", 100)
    with pytest.raises(DataError, match=r"file.txt:2.*JSON lines"):
        list(read_lines([b"a\n", b"x" * 60, b"x" * 60], WHERE))


@given(st.text(st.characters(exclude_characters="\0\ufeff", exclude_categories=["Cs"])), st.integers(1, 7))
def test_decoding_does_not_depend_on_chunks(text, size):
    assert "".join(decode_chunks(chunked(text.encode(), size), WHERE)) == text
    assert "".join(decode_chunks(chunked(b"\xef\xbb\xbf" + text.encode(), size), WHERE)) == text


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\0"])
def test_bytes_that_are_no_text_are_located(size, bad):
    with pytest.raises(DataError, match=r"file.txt:3"):
        list(decode_chunks(chunked(b"one\ntwo\n" + bad, size), WHERE))


@given(st.lists(st.sampled_from(["word ", "\n", "\n\n    indented", "x" * 5000, "\ncode = 1"]), max_size=60))
def test_pieces_join_to_the_document(parts):
    pieces = list(cut_pieces(parts))
    text = "".join(parts)
    assert "".join(piece.text for piece in pieces) == text
    assert all(0 < len(piece.text) <= PIECE_CHARS for piece in pieces)
    assert [piece.opens for piece in pieces] == [i == 0 for i in range(len(pieces))]
    assert [piece.closes for piece in pieces] == [i == len(pieces) - 1 for i in range(len(pieces))]
    position = 0
    for piece in pieces:
        assert piece.line == 1 + text.count("\n", 0, position)
        position += len(piece.text)


def test_pieces_begin_at_unindented_lines_where_there_are_any():
    block = "def f():\n    body\n\n    more\n\n"
    pieces = list(cut_pieces([block * 5000]))
    assert len(pieces) > 2
    assert all(piece.text.startswith("def f():") for piece in pieces)
