"""Read documents from files: the records of each kind of file, and the format that the first one decides."""

import csv
import importlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outsize.choices import DataFormat
from outsize.data.reading.corpus_files import Container, Corpus, Sources, Tolerance, read_chunks
from outsize.data.reading.formats import Document, blank_replies, detect_format, renamed, to_document
from outsize.data.reading.hub_datasets import read_dataset, without_nulls
from outsize.data.reading.text_records import (
    MAX_LINE_BYTES,
    Forgive,
    Record,
    cut_pieces,
    decode_chunks,
    read_json,
    refuse,
)
from outsize.errors import DataError


def read_records(
    path: Path, container: Container, on_read: Callable[[int], None], forgive: Forgive = refuse
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


logger = logging.getLogger(__name__)

# Lines that are no record before the first that is one, in search of the format.
_MOST_BEFORE_A_RECORD = 100


@dataclass
class DocumentReader:
    """Reads the documents of a data set, in order, in bounded memory.

    Attributes:
        sources: the files.
        format: as given, or as detected once a record was seen.
        corpus: how records are read.
        bad: counts the malformed records.
        fields: fields of the first record.
        num_files: files read so far.
        num_skipped_files: files of a directory left out so far.
        num_empty: records without text so far.
        num_conversations: documents that are conversations, so far.
        num_texts: documents that are not.
        num_blank: replies that are trained and say nothing, so far.
        bytes_read: bytes of the files read so far, as they are on disk.
    """

    sources: Sources
    format: DataFormat | None
    corpus: Corpus
    bad: Tolerance = field(init=False)
    fields: tuple[str, ...] = ()
    num_files: int = 0
    num_skipped_files: int = field(init=False)
    num_empty: int = 0
    num_conversations: int = 0
    num_texts: int = 0
    num_blank: int = 0
    bytes_read: int = 0
    _unused: Counter[str] = field(default_factory=Counter)
    _of_records: list[Path] = field(default_factory=list)
    _first_blank: str = ""

    def __post_init__(self) -> None:
        self.num_skipped_files = self.sources.num_skipped
        self.bad = Tolerance(self.corpus.max_bad_records)
        if self._is_plain_text():
            self.format = "text"

    def detect(self) -> DataFormat:
        """Return the format, from the first record where it was not given.

        Lines that are no record say nothing of the others: they are for `documents` to refuse or to count.

        Raises:
            DataError: there is no record, or its format is not known.
        """
        if self.format is None:
            before: list[DataError] = []

            def skip(error: DataError) -> None:
                before.append(error)
                if len(before) > max(self.corpus.max_bad_records, _MOST_BEFORE_A_RECORD):
                    raise before[0]

            for _ in self._records(skip):
                break
            self.bytes_read = 0
            if self.format is None and before:
                raise before[0]
        if self.format is None:
            raise DataError(f"{self.sources.files[0].path}: the data set is empty; name one with text in it")
        return self.format

    def documents(self) -> Iterator[Document]:
        """Yield the documents, long texts in pieces.

        Raises:
            DataError: a file or record that cannot be read, or is of another format, with file and line.
        """
        self.num_files = self.num_empty = self.num_conversations = self.num_texts = self.num_blank = (
            self.bytes_read
        ) = 0
        self.bad = Tolerance(self.corpus.max_bad_records)
        self._unused.clear()
        self._of_records.clear()
        return self._texts() if self._is_plain_text() else self._structured()

    def forgive(self, error: DataError) -> None:
        """Count a malformed record, see `Tolerance`."""
        self.bad.forgive(error)

    def notes(self) -> list[str]:
        """Return what of the files and records read so far was not used."""
        notes = [] if self.sources.note is None else [self.sources.note]
        if self._of_records:
            notes.append(
                f"{self._of_records[0]} begins with a JSON object and is read as text, as {len(self._of_records):,} "
                "files are; for its records name it .jsonl, or set data.format"
            )
        if self.num_blank:
            replies = "1 reply is" if self.num_blank == 1 else f"{self.num_blank:,} replies are"
            notes.append(
                f"{replies} empty, the first in {self._first_blank}: the model is trained to end at once there"
            )
        if self.num_conversations and self.num_texts:
            notes.append(
                f"{self.num_conversations:,} records are conversations under the chat template, as they have messages, "
                f"a system prompt or a history, and {self.num_texts:,} are texts without it; have all of one form"
            )
        if self._unused:
            counts = (f"{name} ({count:,} records)" for name, count in self._unused.most_common())
            notes.append(f"in the records and not used: {', '.join(counts)}")
        return notes

    def _is_plain_text(self) -> bool:
        return self.sources.container in ("text", None) and self.format in ("text", None)

    def _texts(self) -> Iterator[Document]:
        for file in self.sources.files:
            if len(self.sources.files) > 1 and not _is_text(file.path):
                self.num_skipped_files += 1
                logger.warning("%s is not UTF-8 text; left out", file.path)
                continue
            self.num_files += 1
            pieces = cut_pieces(decode_chunks(read_chunks(file.path, self._count), file.path))
            for piece in pieces:
                if piece.opens and self.corpus.format == "auto" and _begins_with_record(piece.text):
                    self._of_records.append(file.path)
                where = f"{file.path}:{piece.line}"
                yield Document(where, piece.text, opens=piece.opens, closes=piece.closes)

    def _structured(self) -> Iterator[Document]:
        for where, record in self._records(self.forgive):
            assert self.format is not None
            try:
                document = to_document(record, self.format, self.corpus, where)
            except DataError as error:
                self.forgive(error)
                continue
            self._unused.update(document.unused)
            self.num_conversations += document.messages is not None
            self.num_texts += document.messages is None
            if blank := blank_replies(document):
                self._first_blank = self._first_blank if self.num_blank else where
                self.num_blank += blank
            if not document.text and document.messages is None:
                self.num_empty += 1
            elif self.format == "text":  # a record may hold a book
                for piece in cut_pieces([document.text]):
                    yield replace(document, text=piece.text, opens=piece.opens, closes=piece.closes)
            else:
                yield document

    def _records(self, forgive: Forgive) -> Iterator[tuple[str, Record]]:
        for file in self.sources.files:
            self.num_files += 1
            container = self.sources.container or "json"
            for number, item in read_records(file.path, container, self._count, forgive):
                where = f"{file.path}:{number}"
                if not self.fields:
                    self.fields = tuple(item)
                try:
                    record = renamed(item, self.corpus.columns, where)
                    if self.format is None:
                        self.format = detect_format(record, self.corpus.text_field, where)
                except DataError as error:
                    self.forgive(error)
                    continue
                yield where, record

    def _count(self, num_bytes: int) -> None:
        self.bytes_read += num_bytes


def _begins_with_record(text: str) -> bool:
    """Return whether the first line of a text is an object of JSON, or begins an array of them."""
    line = text.lstrip().partition("\n")[0].strip()
    if not line.startswith(("{", "[")):
        return False
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return line in ("[", "[{")
    return isinstance(value, dict) or (
        isinstance(value, list) and all(isinstance(each, dict) for each in value)
    )


def _is_text(path: Path) -> bool:
    """Return whether a file decodes; read once more, so that no half of a broken file is trained on."""
    try:
        for _ in decode_chunks(read_chunks(path), path):
            pass
    except DataError:
        return False
    return True
