"""Records out of structured files: JSON lines, a JSON array, Parquet. Each comes with where it stands."""

import importlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from outsize.data.corpus_files import Container, read_chunks
from outsize.data.lines import MAX_LINE_BYTES, decode_chunks, read_lines
from outsize.errors import DataError

Record = dict[str, Any]


def read_records(
    path: Path, container: Container, on_read: Callable[[int], None]
) -> Iterator[tuple[int, Record]]:
    """Yield (line or row number from 1, record) of a JSON lines, JSON array or Parquet file.

    Raises:
        DataError: with file and line of what is not a record.
    """
    if container == "parquet":
        return _read_parquet(path, on_read)
    if _first_byte(path) == b"[":
        return _read_array(decode_chunks(read_chunks(path, on_read), path), path)
    return _read_json_lines(path, on_read)


def _read_json_lines(path: Path, on_read: Callable[[int], None]) -> Iterator[tuple[int, Record]]:
    for number, line in read_lines(read_chunks(path, on_read), path):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{path}:{number}: not valid JSON: {error}") from error
        yield number, _as_record(value, path, number)


def _read_array(texts: Iterable[str], path: Path) -> Iterator[tuple[int, Record]]:
    """Parse ``[{...}, {...}]`` object by object; the text in hand is one chunk plus one object."""
    source = iter(texts)
    decoder = json.JSONDecoder()
    text, number, separators = "", 1, "[ \t\r\n"
    while True:
        body = text.lstrip(separators)
        number += text.count("\n", 0, len(text) - len(body))
        text = body
        if text.startswith("]"):
            return
        value = None
        if text:
            separators = ", \t\r\n"
            try:
                value, end = decoder.raw_decode(text)
            except json.JSONDecodeError as error:
                if len(text) > MAX_LINE_BYTES or (more := next(source, None)) is None:
                    raise DataError(
                        f"{path}:{number + error.lineno - 1}: not valid JSON: {error.msg}"
                    ) from error
                text += more
                continue
            yield number, _as_record(value, path, number)
            number += text.count("\n", 0, end)
            text = text[end:]
        elif (more := next(source, None)) is None:
            raise DataError(f"{path}:{number}: the JSON array is cut short")
        else:
            text = more


def _read_parquet(path: Path, on_read: Callable[[int], None]) -> Iterator[tuple[int, Record]]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow; pip install 'outsize[parquet]'") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            num_rows = max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=256):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
                on_read(path.stat().st_size * batch.num_rows // num_rows)
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these two
        raise DataError(f"{path}: cannot read as Parquet: {error}") from error


def _as_record(value: object, path: Path, number: int) -> Record:
    if not isinstance(value, dict):
        raise DataError(f"{path}:{number}: expected a JSON object, found {type(value).__name__}")
    return value


def _first_byte(path: Path) -> bytes:
    """Return the first byte that is neither white space nor a byte order mark, or nothing."""
    for chunk in read_chunks(path):
        if body := chunk.removeprefix(b"\xef\xbb\xbf").lstrip():
            return body[:1]
    return b""
