"""Sources of a data set: their settings, the files a path names, and the bytes of those, decompressed by chunks.

A directory is read recursively, in sorted order, without hidden files. Its kind is that of the suffixes that
say most: of records and prose (``.jsonl``, ``.parquet``, ``.txt``), else of other text (``.md``, ``.py``, ...), else
those that say little (``.json``, ``.csv``, ``.bin``, ...). Where names tell splits, only what is for training is read.
Anything else in a directory is left out and counted.
"""

import bz2
import codecs
import gzip
import itertools
import lzma
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from outsize.choices import TrainOn
from outsize.data.reading.hub_datasets import TO_MEASURE, TO_TRAIN, HubDataset, find_splits, is_saved_dataset
from outsize.errors import DataError
from outsize.files import open_binary

DEFAULT_TEXT_FIELD = "text"
_NUM_KEPT = 3


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """One source of a data set.

    Attributes:
        path: a file or a directory.
        glob: which files of a directory are read; None takes every known kind.
        format: one of `FORMATS`; ``auto`` looks at the first record.
        text_field: field of a record that holds its text.
        columns: our name of a field to the name that the records give to the field.
        roles: name of a speaker in the records to the role that the speaker has.
        train_on: what of a conversation is trained: the replies, the last reply, or everything.
        max_bad_records: records that may be malformed; they are left out and counted.
        weight: how often each sequence is used in an epoch.
        split: share of the sequences that is held out.
        held: whether these are what is held out, and not all the rest.
        measured: whether a model is only measured on it: of a directory with splits, the one for that is read.
    """

    path: str | Path
    glob: str | None = None
    format: str = "auto"
    text_field: str = DEFAULT_TEXT_FIELD
    columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    train_on: TrainOn = "replies"
    max_bad_records: int = 0
    weight: float = 1.0
    split: float = 0.0
    held: bool = False
    measured: bool = False

    def options(self) -> dict[str, object]:
        """Return all that decides over the tokens, besides the files themselves."""
        return {
            "format": self.format,
            "text_field": self.text_field,
            "columns": dict(self.columns),
            "roles": dict(self.roles),
            "train_on": self.train_on,
            "max_bad_records": self.max_bad_records,
        }


class Tolerance:
    """Counts the malformed records of a source, up to a limit. Safe to use from several threads.

    Args:
        limit: malformed records that are left out; one more ends the reading.

    Attributes:
        count: malformed records so far.
        messages: what was wrong with the first of them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.count = 0
        self.messages: list[str] = []

    def forgive(self, error: DataError) -> None:
        """Count a malformed record.

        Raises:
            DataError: ``error``, where the limit is reached.
        """
        with self._lock:
            if self.count >= self._limit:
                if not self._limit:
                    raise DataError(
                        f"{error}; mend the record, or leave up to ten such out with data.max_bad_records=10"
                    ) from error
                raise DataError(
                    f"more than {self._limit} malformed records (data.max_bad_records); the last: {error}"
                ) from error
            self.count += 1
            if len(self.messages) < _NUM_KEPT:
                self.messages.append(str(error))


Container = Literal["text", "json", "csv", "tsv", "parquet", "tokens", "dataset"]
CHUNK_BYTES = 1 << 18

# fmt: off
_TEXT_SUFFIXES = (
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".html", ".htm", ".xml",
    ".yaml", ".yml", ".toml", ".ini", ".cfg", ".py", ".pyi", ".pyx", ".c", ".h", ".cc", ".cpp", ".cxx",
    ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt", ".scala", ".swift", ".js", ".jsx", ".ts", ".tsx",
    ".css", ".sh", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs", ".ml", ".cs", ".cmake", ".proto",
)
# fmt: on
_CONTAINERS: dict[str, Container] = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".npy": "tokens",
    ".bin": "tokens",
    **dict.fromkeys(_TEXT_SUFFIXES, "text"),
}
_VAGUE_SUFFIXES = {".json", ".csv", ".tsv", ".npy", ".bin"}
_COMPRESSIONS = {".gz", ".bz2", ".xz", ".zst"}
# Byte order marks of wide characters; that of UTF-32 begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_LONGEST_MARK = max(map(len, _MARKS))
# How a file begins that stands for one in Git LFS, and how many bytes it has at most.
_POINTER, _MOST_POINTER = b"version https://git-lfs.github.com/spec/", 1 << 10
# How files begin whose bytes may pass for text and are none.
_NO_TEXT = {
    b"%PDF-": "a PDF",
    b"{\\rtf": "RTF",
    b"PK\x03\x04": "a zip archive, as .xlsx, .docx and .epub are",
}
# What the datasets library and the hub write about data.
_ABOUT_DATA = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}


@dataclass(frozen=True)
class SourceFile:
    """One file of the data set; ``container`` is ``None`` where the suffix says nothing."""

    path: Path
    size_bytes: int
    mtime_ns: int
    container: Container | None


@dataclass(frozen=True)
class Sources:
    """The files of a data set, in reading order, all of one container.

    Attributes:
        files: never empty.
        container: ``None`` only for a single file with an unknown suffix.
        num_skipped: files of a directory that were left out, by suffix or because they are not of its kind.
        note: which split of a directory is read, and what is left out; None where there is nothing to say.
    """

    files: tuple[SourceFile, ...]
    container: Container | None
    num_skipped: int = 0
    note: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes on disk, compressed where the files are."""
        return sum(file.size_bytes for file in self.files)


def find_sources(path: Path, glob: str | None = None, *, measured: bool = False) -> Sources:
    """Return the files that ``path`` names: itself, or what a directory holds.

    Args:
        path: file or directory, or a dataset of the hub.
        glob: pattern below a directory, e.g. ``"**/*.py"``; every regular file it matches is read.
        measured: of a directory with splits, take what models are measured on, and not what is for training.

    Raises:
        DataError: nothing there, nothing readable, files of more than one kind, or what stands for a file in git.
    """
    sources = _find(path, glob, measured)
    for file in sources.files:
        if not (file.path.is_file() and (file.container is None or 0 < file.size_bytes <= _MOST_POINTER)):
            continue
        with open_binary(file.path, "r", buffered=False) as opened:
            first = opened.read(len(_POINTER))
        if first == _POINTER and file.size_bytes <= _MOST_POINTER:
            raise DataError(
                f"{file.path} is a pointer of Git LFS, and not the file; get it with git lfs pull"
            )
        if what := next((what for mark, what in _NO_TEXT.items() if first.startswith(mark)), None):
            raise DataError(
                f"{file.path} is {what}, and no text; write its text into .txt, .csv or .jsonl files"
            )
    return sources


def _find(path: Path, glob: str | None, measured: bool) -> Sources:
    if path.is_file():
        file = _source_file(path)
        return Sources((file,), file.container)
    if HubDataset.from_path(path) is not None:
        if measured and "#" not in path.name:
            raise DataError(
                f"{path} is train, on which nothing is measured; name a split, e.g. {path}#validation"
            )
        return Sources((SourceFile(path, 0, 0, "dataset"),), "dataset")
    if not path.is_dir():
        if path.exists():
            raise DataError(f"{path} is neither a regular file nor a directory; data are read more than once")
        raise DataError(f"no such file or directory: {path}")
    if glob is None and is_saved_dataset(path):
        sizes = [(file.stat().st_size, file.stat().st_mtime_ns) for file in path.iterdir()]
        size, newest = sum(size for size, _ in sizes), max(time for _, time in sizes)
        return Sources((SourceFile(path, size, newest, "dataset"),), "dataset")
    return _of_directory(path, measured) if glob is None else _of_pattern(path, glob)


def _of_pattern(path: Path, pattern: str) -> Sources:
    """Return the files of a directory that a pattern names, whatever their suffixes."""
    files = [_source_file(each) for each in sorted(path.glob(pattern)) if each.is_file()]
    return Sources(tuple(files), _one_kind(path, files, f"pattern {pattern!r}, {len(files)} files seen"))


def _of_directory(path: Path, measured: bool) -> Sources:
    """Return the files of a directory that are data, and of these what is for training, or to be ``measured`` on."""
    wanted = TO_MEASURE if measured else TO_TRAIN
    there = [each for each in sorted(path.glob("**/*")) if not _is_hidden(each, path)]
    links = [each.relative_to(path).as_posix() for each in there if each.is_symlink() and each.is_dir()]
    regular = [each for each in there if each.is_file()]
    regular = [each for each in regular if each.name not in _ABOUT_DATA] or regular
    names = {each.relative_to(path).as_posix(): each for each in regular}
    files = {name: file for name, each in names.items() if (file := _source_file(each)).container is not None}
    if any(file.container not in ("text", None) for file in files.values()):
        files = {name: file for name, file in files.items() if file.path.name != "README.md"}
    splits = None
    if any(_has_splits(file) for file in files.values()):
        splits = find_splits(path, list(names))
    files = _strongest(files, [] if splits is None else [n for s in wanted for n in splits.splits.get(s, ())])
    note = None
    if splits is not None and all(_has_splits(file) for file in files.values()):
        chosen, note = splits.choose(list(files), path, wanted)
        files = {name: files[name] for name in chosen}
    links_note = f"links to directories are not followed: {', '.join(links)}" if links else ""
    kind = _one_kind(
        path, list(files.values()), "; ".join(filter(None, [f"{len(regular)} files seen", links_note]))
    )
    note = "; ".join(filter(None, [note, links_note])) or None
    return Sources(tuple(files.values()), kind, len(regular) - len(files), note)


def _strongest(files: dict[str, SourceFile], wanted: Sequence[str]) -> dict[str, SourceFile]:
    """Return the files whose suffixes say most: of records and prose, of other text, then those that say little.

    Those that say little count as records where their names say that they are of a split that is ``wanted``. Text
    other than prose counts where there are no records, and no file is of such a split.
    """
    vague = {name for name, file in files.items() if _suffix(file.path) in _VAGUE_SUFFIXES} - set(wanted)
    first = {name for name, file in files.items() if _has_splits(file)} - vague
    if not any(files[name].container != "text" or name in wanted for name in first):
        first = set(files) - vague
    return {name: file for name, file in files.items() if name in (first or vague)}


def _has_splits(file: SourceFile) -> bool:
    """Return whether names of such files say of which split they are; those of source code say something else."""
    return file.container != "text" or _suffix(file.path) in (".txt", ".text")


def _one_kind(path: Path, files: Sequence[SourceFile], note: str) -> Container | None:
    if not files:
        raise DataError(f"{path}: no data files found ({note}); choose with glob, e.g. glob='**/*.rst'")
    kinds = Counter(file.container for file in files)
    if len(kinds) > 1:
        shown = ", ".join(f"{n} {kind or 'unknown'}" for kind, n in kinds.most_common())
        raise DataError(f"{path}: mixes kinds of files ({shown}); choose with glob, e.g. glob='**/*.jsonl'")
    return files[0].container


def read_chunks(path: Path, on_read: Callable[[int], None] = lambda num_bytes: None) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file in bounded chunks; text that begins with the mark of UTF-16 as UTF-8.

    Args:
        path: plain, ``.gz``, ``.bz2``, ``.xz`` or ``.zst`` (any number of frames).
        on_read: called with the number of bytes as they are read from disk.

    Raises:
        DataError: the file is unreadable, or its compressed stream is damaged or cut short.
    """
    try:
        with open_binary(path, "r", buffered=False) as file:
            if path.suffix == ".zst":
                chunks = _unzstd(file, path, on_read)
            elif path.suffix in _COMPRESSIONS:
                chunks = _unzip(file, path.suffix, on_read)
            else:
                chunks = _plain(file, on_read)
            yield from _as_utf8(chunks, path)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # gzip.BadGzipFile is an OSError
        raise DataError(f"{path}: cannot read: {error}") from error


def _as_utf8(chunks: Iterator[bytes], path: Path) -> Iterator[bytes]:
    """Yield chunks as they are, or as UTF-8 where the first begins with the byte order mark of wider characters."""
    first = next(chunks, b"")
    while len(first) < _LONGEST_MARK and (more := next(chunks, b"")):
        first += more
    encoding = next((name for mark, name in _MARKS.items() if first.startswith(mark)), None)
    everything = itertools.chain([first] if first else [], chunks)
    if encoding is None:
        yield from everything
        return
    try:
        yield from codecs.iterencode(codecs.iterdecode(everything, encoding), "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: begins as {encoding} and goes on as none ({error.reason})") from error


def _plain(file: BinaryIO, on_read: Callable[[int], None], size: int = CHUNK_BYTES) -> Iterator[bytes]:
    while chunk := file.read(size):
        on_read(len(chunk))
        yield chunk


def _unzip(file: BinaryIO, suffix: str, on_read: Callable[[int], None]) -> Iterator[bytes]:
    opened: dict[str, Callable[[BinaryIO], Any]] = {
        ".gz": lambda zipped: gzip.GzipFile(fileobj=zipped),
        ".bz2": bz2.BZ2File,
        ".xz": lzma.LZMAFile,
    }
    with opened[suffix](file) as unzipped:
        position = 0
        while chunk := unzipped.read(CHUNK_BYTES):
            on_read(file.tell() - position)
            position = file.tell()
            yield chunk


def _unzstd(file: BinaryIO, path: Path, on_read: Callable[[int], None]) -> Iterator[bytes]:
    # zstandard's stream_reader ends quietly where a frame is cut short; the object below tells.
    import zstandard

    stream = None
    try:
        for chunk in _plain(file, on_read, size=1 << 14):  # small, because text expands on the way out
            rest = chunk
            while rest:
                stream = stream or zstandard.ZstdDecompressor().decompressobj()
                if data := stream.decompress(rest):
                    yield data
                rest = stream.unused_data if stream.eof else b""
                stream = None if stream.eof else stream
    except zstandard.ZstdError as error:
        raise DataError(f"{path}: damaged zstd stream: {error}") from error
    if stream is not None:
        raise DataError(f"{path}: zstd stream is cut short")


def _source_file(path: Path) -> SourceFile:
    status = path.stat()
    return SourceFile(path, status.st_size, status.st_mtime_ns, _CONTAINERS.get(_suffix(path)))


def _suffix(path: Path) -> str:
    """Return the suffix that names the content: ``.jsonl`` of ``a.jsonl.gz``."""
    return (Path(path.stem).suffix if path.suffix in _COMPRESSIONS else path.suffix).lower()


def _is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(root).parts)
