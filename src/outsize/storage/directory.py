"""Directories that exist as long as their user."""

import atexit
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from outsize import files
from outsize.storage.prealloc import explain, sync_directory

_TEMPORARY = "outsize-tmp-"
# Those of this process by its id: a forked child has none yet.
_of_processes: dict[int, Path] = {}
_lock = threading.Lock()


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


@contextmanager
def temporary_directory(near: Path | None = None) -> Iterator[Path]:
    """Make a directory for files that nobody looks for later; afterwards remove it and all in it.

    It is locked as long as it is used. A process that is killed leaves it and takes the lock along: the next one that
    makes such a directory beside it removes it.

    Args:
        near: the directory that it lies in; None is the system's for temporary files.

    Raises:
        StorageError: it cannot be made.
    """
    parent = Path(tempfile.gettempdir()) if near is None else near
    try:
        _remove_abandoned(parent)
        path, lock = _make_locked(parent)
    except OSError as error:
        raise explain(error, f"make a directory for temporary files in {parent}") from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def directory_of_process() -> Path:
    """Return a temporary directory of this process, removed when it ends; see `temporary_directory`.

    Raises:
        StorageError: it cannot be made.
    """
    process = os.getpid()
    with _lock:
        if process not in _of_processes:
            stack = ExitStack()
            _of_processes[process] = stack.enter_context(temporary_directory())
            atexit.register(_close_in, process, stack)
        return _of_processes[process]


def _close_in(process: int, stack: ExitStack) -> None:
    """Close ``stack`` at the end of the process that opened it, not of its forked children."""
    if process == os.getpid():
        stack.close()


def _make_locked(parent: Path) -> tuple[Path, int]:
    """Return a new directory and the descriptor that locks it, where the file system has locks of directories."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=parent))
        # Another process may take it for abandoned until it is locked: that one removes it, and this one tries again.
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock), path.stat()):
                    return path, lock
            except (BlockingIOError, FileNotFoundError):
                pass
            except OSError:  # a file system without locks
                return path, lock
            os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    """Remove the temporary directories in ``parent`` that no process has locked."""
    for path in parent.glob(f"{_TEMPORARY}*"):
        with suppress(OSError):  # another user's, gone by now, in use, or on a file system without locks
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
