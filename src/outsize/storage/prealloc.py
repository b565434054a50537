"""Making a file of fixed size, or none: creation, lock, allocation, direct I/O, and errors that help."""

import contextlib
import errno
import fcntl
import mmap
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from outsize import files
from outsize.errors import OutsizeError, StorageError
from outsize.units import format_bytes

_SPACE = "free some space or choose another directory"
_RIGHTS = "choose a directory that you may write to"
_REMEDY = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EFBIG: "raise the file size limit (ulimit -f) or choose another file system",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: _RIGHTS,
    errno.ENOENT: "create the directory first",
    errno.EEXIST: "choose a path that is not a file",
    errno.ENOTDIR: "choose a directory",
    errno.EISDIR: "choose a path that is not a directory",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EIO: "the device reports a fault; look at the kernel log (dmesg) and use another disk",
}


# What says that a disk, a file system or a share fails, and not that a file is another than was thought.
_OF_DISKS = frozenset(
    {
        *(
            errno.EIO,
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EROFS,
            errno.ENODEV,
            errno.ENXIO,
            errno.EMFILE,
            errno.ENFILE,
        ),
        *(errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.EREMOTEIO, errno.EUCLEAN),
    }
)


# How libraries write the number of an error of the system into the text of one of their own: Rust, Arrow.
_NUMBER = re.compile(r"(?:os error|[Ee]rrno:?) (\d+)")
_MOST_SAID = 200


def explain(error: OSError, action: str) -> StorageError:
    """Return the `StorageError` for ``error``; ``action`` is what failed, e.g. ``"create x"``."""
    remedy = _REMEDY.get(error.errno or 0)
    return StorageError(f"cannot {action}: {error.strerror or error}" + (f"; {remedy}" if remedy else ""))


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """Have what a disk or its file system fails with be a `StorageError`, whichever call it was; other errors stay.

    So it is where a library has caught the error of the system and raised another: errors of ours, which were
    written for files that are wrong, keep what they say is wrong, and not what they say to try.

    Raises:
        StorageError: the body raised such an `OSError`, or an error that follows from one.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        fault = _fault_behind(error)
        if fault is None:
            raise
        if isinstance(error, OutsizeError):
            # What to try was written for a file that is wrong: to remove or to download one that a disk does not read
            # would lose it.
            what = str(error).partition(";")[0]
            raise StorageError(f"{what} ({explain(fault, 'use its disk')})") from error
        raise explain(fault, f"use {fault.filename}" if fault.filename else "use a disk") from error


def _fault_behind(error: BaseException | None) -> OSError | None:
    """Return the fault of a disk that ``error`` is or follows from."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _OF_DISKS:
            return error
        number = _NUMBER.search(str(error))
        if number is not None and int(number[1]) in _OF_DISKS:
            return OSError(int(number[1]), f"{os.strerror(int(number[1]))} ({str(error)[:_MOST_SAID]})")
        # What comes of our own mistakes while an error is handled is no fault of a disk, and keeps its traceback.
        follows = isinstance(error, (OSError, OutsizeError))
        error = error.__cause__ or (error.__context__ if follows else None)
    return None


def preallocate(path: Path, num_bytes: int) -> int:
    """Create ``path`` with ``num_bytes`` zero bytes, allocated and locked; return its descriptor.

    A file that is there already is emptied, unless another process holds it. After an error no file is left.

    Raises:
        StorageError: disk full, not writable, or in use.
    """
    _check_free_space(path, num_bytes)
    try:
        descriptor = files.system().open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise explain(error, f"create {path}") from error
    try:
        _lock(descriptor, path)
    except BaseException:
        files.system().close(descriptor)
        raise
    try:
        files.system().truncate(descriptor, 0)
        # Before direct I/O is switched on: where the file system cannot allocate, libc writes single bytes.
        files.system().allocate(descriptor, num_bytes)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            files.system().unlink(path)
        with contextlib.suppress(OSError):
            files.system().close(descriptor)
        if isinstance(error, OSError):
            raise explain(error, f"allocate {format_bytes(num_bytes)} for {path}") from error
        raise
    return descriptor


def open_again(path: Path, num_bytes: int) -> int:
    """Open and lock ``path``, which holds ``num_bytes`` bytes, and leave them as they are; return its descriptor.

    Raises:
        StorageError: it is not there, of another size, not writable, or in use.
    """
    try:
        descriptor = files.system().open(path, os.O_RDWR)
    except OSError as error:
        raise explain(error, f"open {path}") from error
    try:
        _lock(descriptor, path)
        size = os.fstat(descriptor).st_size
        if size != num_bytes:
            raise StorageError(f"{path} has {size} bytes, not {num_bytes}: it was truncated, or is another's")
    except BaseException:
        files.system().close(descriptor)
        raise
    return descriptor


def sync_directory(path: Path) -> None:
    """Make the names in a directory outlast a loss of power, see `files.sync`.

    Raises:
        StorageError: the disk could not.
    """
    try:
        files.sync(path)
    except OSError as error:
        raise explain(error, f"make {path} durable") from error


def _check_free_space(path: Path, num_bytes: int) -> None:
    """Refuse what cannot fit before any of it is taken from others on that disk."""
    try:
        free = shutil.disk_usage(path.parent)
    except OSError:
        return  # creating the file will say what is wrong
    held = path.stat().st_blocks * 512 if path.is_file() else 0
    if free.total and free.free + held < num_bytes:
        raise StorageError(
            f"cannot allocate {format_bytes(num_bytes)} for {path}:"
            f" {format_bytes(free.free)} are free; {_SPACE}"
        )


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StorageError(f"{path} is in use by another run; give this one another directory") from error
    except OSError:
        return  # a file system without locks: nothing to check


def enable_direct(descriptor: int, sector_bytes: int) -> OSError | None:
    """Switch direct I/O on; return why not where the file system refuses, and leave the file buffered.

    Some file systems accept the flag and refuse the first request, so one sector is read to be sure.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    page = mmap.mmap(-1, sector_bytes)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        with memoryview(page) as view:
            files.system().pread(descriptor, view, 0)
    except OSError as error:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return error
    finally:
        page.close()
    return None
