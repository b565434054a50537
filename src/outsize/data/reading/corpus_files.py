"""Source files: which ones a path names, and their bytes, decompressed, a chunk at a time.

A directory is read recursively, in sorted order, without hidden files. Its kind is that of the suffixes that
say one thing only (``.jsonl``, ``.parquet``, ``.txt``, ``.py``, ...); files whose suffix says little
(``.json``, ``.csv``, ``.bin``, ...) count only where there is nothing else. Anything else in a directory is left
out and counted.
"""

import gzip
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from outsize.data.reading.dataset_records import HubDataset, is_saved_dataset
from outsize.errors import DataError
from outsize.files import open_binary

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
_COMPRESSIONS = {".gz", ".zst"}


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
    """

    files: tuple[SourceFile, ...]
    container: Container | None
    num_skipped: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes on disk, compressed where the files are."""
        return sum(file.size_bytes for file in self.files)


def find_sources(path: Path, glob: str | None = None) -> Sources:
    """Return the files that ``path`` names: itself, or what a directory holds.

    Args:
        path: file or directory, or a dataset of the hub.
        glob: pattern below a directory, e.g. ``"**/*.py"``; every regular file it matches is read.

    Raises:
        DataError: nothing there, nothing readable, or files of more than one kind.
    """
    if path.is_file():
        file = _source_file(path)
        return Sources((file,), file.container)
    if HubDataset.from_path(path) is not None:
        return Sources((SourceFile(path, 0, 0, "dataset"),), "dataset")
    if not path.is_dir():
        raise DataError(f"no such file or directory: {path}")
    if glob is None and is_saved_dataset(path):
        sizes = [(file.stat().st_size, file.stat().st_mtime_ns) for file in path.iterdir()]
        size, newest = sum(size for size, _ in sizes), max(time for _, time in sizes)
        return Sources((SourceFile(path, size, newest, "dataset"),), "dataset")
    pattern = glob or "**/*"
    candidates = [p for p in sorted(path.glob(pattern)) if p.is_file() and (glob or not _is_hidden(p, path))]
    found = [_source_file(p) for p in candidates]
    files = [f for f in found if glob or f.container is not None]
    if not glob and any(_suffix(f.path) not in _VAGUE_SUFFIXES for f in files):
        files = [f for f in files if _suffix(f.path) not in _VAGUE_SUFFIXES]
    if not files:
        raise DataError(
            f"{path}: no data files found (pattern {pattern!r}, {len(found)} files seen); choose with glob, "
            "e.g. glob='**/*.rst'"
        )
    kinds = Counter(f.container for f in files)
    if len(kinds) > 1:
        shown = ", ".join(f"{n} {kind or 'unknown'}" for kind, n in kinds.most_common())
        raise DataError(f"{path}: mixes kinds of files ({shown}); choose with glob, e.g. glob='**/*.jsonl'")
    return Sources(tuple(files), files[0].container, num_skipped=len(found) - len(files))


def read_chunks(path: Path, on_read: Callable[[int], None] = lambda num_bytes: None) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file in bounded chunks.

    Args:
        path: plain, ``.gz`` or ``.zst`` (any number of frames).
        on_read: called with the number of bytes as they are read from disk.

    Raises:
        DataError: the file is unreadable, or its compressed stream is damaged or cut short.
    """
    try:
        with open_binary(path, "r", buffered=False) as file:
            if path.suffix == ".gz":
                yield from _gunzip(file, on_read)
            elif path.suffix == ".zst":
                yield from _unzstd(file, path, on_read)
            else:
                yield from _plain(file, on_read)
    except (OSError, EOFError, zlib.error) as error:  # gzip.BadGzipFile is an OSError
        raise DataError(f"{path}: cannot read: {error}") from error


def _plain(file: BinaryIO, on_read: Callable[[int], None], size: int = CHUNK_BYTES) -> Iterator[bytes]:
    while chunk := file.read(size):
        on_read(len(chunk))
        yield chunk


def _gunzip(file: BinaryIO, on_read: Callable[[int], None]) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as unzipped:
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
