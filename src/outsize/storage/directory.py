"""Directories that exist as long as their user."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from outsize import files
from outsize.storage.prealloc import explain, sync_directory


@contextmanager
def needed_directory(path: Path, key: str) -> Iterator[None]:
    """Make ``path`` and its parents; afterwards remove those that were made here and are empty again.

    Raises:
        StorageError: it cannot be made, or not be written.
    """
    absent = [directory for directory in (path, *path.parents) if not directory.exists()]
    try:
        try:
            files.make_directories(path)
            for directory in reversed(absent):  # what will be durable in it must be found again
                sync_directory(directory.parent)
            tempfile.TemporaryFile(dir=path).close()
        except OSError as error:
            raise explain(error, f"write in {path} ({key})") from error
        yield
    finally:
        for directory in absent:
            with suppress(OSError):  # in use, or never made
                files.system().rmdir(directory)
