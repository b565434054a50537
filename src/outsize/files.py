"""Calls to the file system, all in one place, over a seam under which a test can put faults.

Whatever a run keeps goes through here: the home, scratch files, checkpoints, tokens, the heartbeat. A `System` makes
the calls themselves; a test puts another one in its place that counts them, records them and lets them fail. What the
functions below raise is the `OSError` of the system, for the caller to explain.
"""

import contextlib
import errno
import fcntl
import functools
import io
import json
import logging
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

# What a file is called that is not whole yet ends so.
PARTIAL = ".partial"
_COPY_BYTES = 2**20
# More than any config, template, index or report has, all of which are read at once.
_MOST_AT_ONCE = 2**28
# The same for texts that a user gives a command.
MOST_TEXT = 2**34
# What a shell names a pipe that it has made for a command: ``<(echo ...)``.
_PIPES = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin")
_LAST_STREAM = 2
# What a disk or a share says that fails; others say that there is no such file, or that it is something else.
_FAILING = (errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.EUCLEAN, errno.ENOTCONN)
# What a file system without locks says of them.
_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)
_MODES = {
    "r": os.O_RDONLY,
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "a": os.O_WRONLY | os.O_CREAT,
}


@contextlib.contextmanager
def _naming(descriptor: int) -> Iterator[None]:
    """Have an error of a call that is given a descriptor name the file, as those of calls that are given a path do."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            with contextlib.suppress(OSError):
                error.filename = os.readlink(f"/proc/self/fd/{descriptor}")
        raise


class System:
    """The calls that the operating system makes; arguments and errors are those of `os`, which all name their file."""

    def open(self, path: Path, flags: int, mode: int = 0o666) -> int:
        """Open a file or directory, not for child processes; return its descriptor.

        Never that of stdin, stdout or stderr where one is closed: any library that says something would write over it.
        """
        descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
        if descriptor > _LAST_STREAM:
            return descriptor
        try:
            return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _LAST_STREAM + 1)
        finally:
            os.close(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def pread(self, descriptor: int, into: memoryview, offset: int) -> int:
        """Read at most ``len(into)`` bytes from ``offset``; return how many."""
        with _naming(descriptor):
            return os.preadv(descriptor, [into], offset)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write at most all of ``data`` at ``offset``; return how much."""
        with _naming(descriptor):
            return os.pwritev(descriptor, [data], offset)

    def fsync(self, descriptor: int) -> None:
        """Wait until a file or directory is on the disk."""
        with _naming(descriptor):
            os.fsync(descriptor)

    def fdatasync(self, descriptor: int) -> None:
        """The same for the bytes of a file alone."""
        with _naming(descriptor):
            os.fdatasync(descriptor)

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        """Take the space that a file of ``num_bytes`` needs."""
        with _naming(descriptor):
            os.posix_fallocate(descriptor, 0, num_bytes)

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        """Cut a file, or lengthen it with zeros."""
        with _naming(descriptor):
            os.ftruncate(descriptor, num_bytes)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or directory another name, at once; a file of that name is replaced."""
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name."""
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        """Make a directory."""
        os.mkdir(path)

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and all below it as far as can be; what cannot stays."""
        shutil.rmtree(path, ignore_errors=True)


_system = System()


@contextlib.contextmanager
def replaced(system: System) -> Iterator[None]:
    """Have ``system`` make the calls of all threads while the context lasts."""
    global _system  # noqa: PLW0603
    before = _system
    _system = system
    try:
        yield
    finally:
        _system = before


def system() -> System:
    """Return what makes the calls now."""
    return _system


def _open_regular(path: Path) -> int:
    """Open a regular file for reading; a named pipe would be waited for, and a device has no end."""
    descriptor = _system.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    _system.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def _open_writable(path: Path, flags: int) -> int:
    """Open a file for writing; a named pipe that nobody reads is an error, and not waited for."""
    descriptor = _system.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


class RawFile(io.RawIOBase):
    """A file whose bytes move by `System.pread` and `System.pwrite`; to be wrapped in a buffer."""

    def __init__(self, path: Path, mode: str) -> None:
        super().__init__()
        self._descriptor = -1  # should opening fail, closing has nothing to do
        self.name, self._mode = str(path), mode
        self._descriptor = _open_regular(path) if mode == "r" else _open_writable(path, _MODES[mode])
        self._position = os.fstat(self._descriptor).st_size if mode == "a" else 0

    def readable(self) -> bool:
        """Whether it was opened for reading."""
        return self._mode == "r"

    def writable(self) -> bool:
        """Whether it was opened for writing."""
        return self._mode != "r"

    def seekable(self) -> bool:
        """Always."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Read what there is, at most as much as ``buffer`` holds."""
        done = _system.pread(self._descriptor, memoryview(buffer).cast("B"), self._position)
        self._position += done
        return done

    def write(self, data: "ReadableBuffer") -> int:
        """Write ``data``, or the part that the system takes."""
        done = _system.pwrite(self._descriptor, memoryview(data).cast("B"), self._position)
        self._position += done
        return done

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position}
        size = os.fstat(self._descriptor).st_size if whence == os.SEEK_END else 0
        self._position = base.get(whence, size) + offset
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if not self.closed:
            super().close()
            if self._descriptor >= 0:
                _system.close(self._descriptor)


def open_binary(path: Path, mode: str, *, buffered: bool = True) -> BinaryIO:
    """Open a file of bytes; ``mode`` is r, w or a."""
    raw = RawFile(path, mode)
    if not buffered:
        return cast(BinaryIO, raw)
    return io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)


def open_text(path: Path, mode: str) -> TextIO:
    """Open a file of UTF-8 text; ``mode`` is r, w or a."""
    return io.TextIOWrapper(open_binary(path, mode), encoding="utf-8")


def read_bytes(path: Path, most: int = _MOST_AT_ONCE) -> bytes:
    """Return the content of a file that is read at once, whoever wrote it: no reading waits or fills the memory.

    A pipe that the shell has made for the command is read to its end.

    Raises:
        OSError: as the system says; or no regular file; or one of more than ``most`` bytes.
    """
    with path.open("rb") if str(path).startswith(_PIPES) else open_binary(path, "r") as file:
        size, pieces = os.fstat(file.fileno()).st_size, []
        # One read of all would take `most` of memory.
        while size <= most and (piece := file.read(_COPY_BYTES)):
            pieces.append(piece)
            size = max(size, len(pieces) * _COPY_BYTES - _COPY_BYTES + len(piece))
    if size > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
    return b"".join(pieces)


def read_text(path: Path, encoding: str = "utf-8", most: int = _MOST_AT_ONCE) -> str:
    """Return the text of a file as `read_bytes` reads it, its ends of lines as line feeds."""
    return io.TextIOWrapper(io.BytesIO(read_bytes(path, most)), encoding=encoding).read()


def read_json(path: Path, error: Callable[[str], Exception], remedy: str) -> dict[str, Any]:
    """Return the fields of a file that holds a JSON object, whoever wrote it, read as by `read_bytes`.

    Raises:
        Exception: what ``error`` makes of the file, what is wrong with it, and ``remedy``.
    """
    try:
        fields = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as cause:
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else cause
        raise error(f"{path} cannot be read as JSON: {reason}; {remedy}") from cause
    if not isinstance(fields, dict):
        raise error(f"{path} cannot be read as JSON: it holds no object; {remedy}")
    return fields


def json_or_empty(path: Path) -> dict[str, Any]:
    """Return what `read_json` does; nothing where there is no such file, or it is something else.

    Raises:
        OSError: its disk or share fails.
    """
    try:
        return read_json(path, ValueError, "")
    except ValueError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _FAILING:
            raise error.__cause__ from None
        return {}


def write_text(path: Path, text: str, *, sync: bool = False) -> None:
    """Write a file of text; with ``sync`` it is on the disk when this returns."""
    with open_text(path, "w") as file:
        file.write(text)
        file.flush()
        if sync:
            _system.fsync(file.fileno())


def write_whole(path: Path, text: str, *, shared: bool = False) -> None:
    """Write a file of text that is there whole or not at all, after a loss of power too.

    What was there before still is, where it cannot be written. With ``shared`` several processes may write it at once.

    Raises:
        OSError: as the system says; or ``path`` is a device, a pipe or a socket, which a file would take the place of.
    """
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}" if shared else path.name + PARTIAL)
    try:
        write_text(partial, text, sync=True)
        _system.rename(partial, path)
        sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            _system.unlink(partial)


def copy(source: Path, target: Path) -> None:
    """Copy the bytes of a file."""
    with open_binary(source, "r") as readable, open_binary(target, "w") as writable:
        shutil.copyfileobj(readable, writable, _COPY_BYTES)


def cut(path: Path, num_bytes: int) -> None:
    """Cut a file behind its first bytes, for good; these are never without their place."""
    descriptor = _system.open(path, os.O_WRONLY)
    try:
        _system.truncate(descriptor, num_bytes)
    finally:
        _system.close(descriptor)
    sync(path)


def sync(path: Path) -> None:
    """Wait until ``path``, a file or a directory, is on the disk; some file systems do that of no directory."""
    descriptor = _system.open(path, os.O_RDONLY)
    try:
        _system.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        _system.close(descriptor)


def lock(descriptor: int, *, without_locks: bool = True) -> bool:
    """Lock an open file or directory until it is closed; return False where another process has locked it.

    On a file system without locks nobody is kept out, which is told once, and ``without_locks`` is returned; other
    errors are raised as the system says.
    """
    try:
        with _naming(descriptor):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _tell_of_no_locks(os.fstat(descriptor).st_dev, error.strerror)
        return without_locks
    return True


@functools.cache
def _tell_of_no_locks(_device: int, error: str) -> None:
    logging.getLogger(__name__).warning("no locks on this file system (%s): have one writer", error)


def free_bytes(path: Path) -> int:
    """Return what is free where ``path`` lies, or would; more than any need where the file system does not say."""
    place = next(p for p in (path, *path.absolute().parents) if p.exists())
    usage = shutil.disk_usage(place)
    return usage.free if usage.total else sys.maxsize  # of /proc and the like


def make_directories(path: Path) -> None:
    """Make a directory and its parents; an existing directory is no error."""
    if path.is_dir():
        return
    # What is there but no directory is for mkdir to tell.
    if path.parent != path and not path.parent.exists():
        make_directories(path.parent)
    try:
        _system.mkdir(path)
    except FileExistsError:
        if not path.is_dir():
            raise
