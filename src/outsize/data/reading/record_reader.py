"""Records out of structured files: JSON lines, a JSON array, CSV, TSV, Parquet, datasets, each with where it stands."""

import csv
import importlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from outsize.data.reading.corpus_files import Container, read_chunks
from outsize.data.reading.hub_datasets import read_dataset, without_nulls
from outsize.data.reading.text_records import MAX_LINE_BYTES, Forgive, Record, decode_chunks, read_json
from outsize.errors import DataError


def _refuse(error: DataError) -> None:
    raise error


def read_records(
    path: Path, container: Container, on_read: Callable[[int], None], forgive: Forgive = _refuse
) -> Iterator[tuple[int, Record]]:
    """Yield (line or row number from 1, record) of a JSON lines, JSON array, CSV, TSV or Parquet file, or a dataset.

    Args:
        path: the file.
        container: what kind of file it is.
        on_read: called with the number of bytes as they are read from disk.
        forgive: called with the error of a line that is no record; the line is left out if the call returns.

    Raises:
        DataError: with file and line of what is not a record.
    """
    if container == "dataset":
        return read_dataset(path, on_read)
    if container == "parquet":
        return _read_parquet(path, on_read)
    if container in ("csv", "tsv"):
        return _read_table(path, "," if container == "csv" else "\t", on_read, forgive)
    return read_json(path, on_read, forgive)


def _read_table(
    path: Path, delimiter: str, on_read: Callable[[int], None], forgive: Forgive
) -> Iterator[tuple[int, Record]]:
    """Yield the rows of a table whose first row names the columns; cells are text, and may hold lines when quoted."""
    csv.field_size_limit(MAX_LINE_BYTES)
    rows = csv.reader(
        _text_lines(decode_chunks(read_chunks(path, on_read), path)), delimiter=delimiter, strict=True
    )
    names: list[str] = []
    while True:
        number = rows.line_num + 1
        try:
            row = next(rows, None)
            if row is None:
                return
            if not row:
                continue
            if not names:
                names = _column_names(row, path)
            elif len(row) != len(names):
                raise DataError(
                    f"{path}:{number}: {len(row)} cells, but the first row names {len(names)} columns"
                )
            else:
                yield number, dict(zip(names, row, strict=True))
        except csv.Error as error:  # where the next row begins is not known
            raise DataError(
                f"{path}:{number}: not valid {'CSV' if delimiter == ',' else 'TSV'}: {error}"
            ) from error
        except DataError as error:
            if not names:
                raise
            forgive(error)


def _column_names(row: list[str], path: Path) -> list[str]:
    names = [name.strip() for name in row]
    if not names[0] and len(names) > 1:  # as pandas writes an index, and what pandas calls it on reading
        names[0] = "Unnamed: 0"
    other = next((other for other in ";\t|" if len(names) == 1 and other in names[0]), None)
    if other is not None:
        raise DataError(
            f"{path}:1: the first row names one column, {names[0]!r}; if {other!r} stands between the cells, write "
            "the table with commas, or with tabs as .tsv"
        )
    if len(set(names)) < len(names) or not all(names):
        raise DataError(
            f"{path}:1: the first row of a table names its columns, each once, but it is {', '.join(map(repr, row))}"
        )
    return names


def _text_lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield lines with their newlines; a table may hold other separators of lines within a cell."""
    rest = ""
    for text in texts:
        *lines, rest = (rest + text).split("\n")
        yield from (line + "\n" for line in lines)
    if rest:
        yield rest


def _read_parquet(path: Path, on_read: Callable[[int], None]) -> Iterator[tuple[int, Record]]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow; pip install pyarrow") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            num_rows = max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=256):
                for record in batch.to_pylist():
                    number += 1
                    yield number, without_nulls(record)
                on_read(path.stat().st_size * batch.num_rows // num_rows)
    except Exception as error:  # pyarrow's errors derive from a dozen kinds
        raise DataError(f"{path}: cannot read as Parquet: {error}") from error
