"""Files of fixed size: creation, lock, direct I/O, and the threads that keep requests in flight.

Plain threads are enough: ``os.preadv`` and ``os.pwritev`` release the GIL for the whole of a request, and a
request of some MiB takes a hundred times longer than handing it over.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import queue
import re
import shutil
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from outsize import files
from outsize.errors import FREE_SPACE, Closing, OutsizeError, StorageError, explain
from outsize.units import format_bytes

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
            f" {format_bytes(free.free)} are free; {FREE_SPACE}"
        )


def _lock(descriptor: int, path: Path) -> None:
    try:
        is_ours = files.lock(descriptor)
    except OSError as error:
        raise explain(error, f"lock {path}") from error
    if not is_ours:
        raise StorageError(f"{path} is in use by another run; give this one another directory")


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


DEFAULT_THREADS = 4


class _Batch:
    """Requests of one caller: what is not yet started, how many have not ended, and the first error."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self._waiting = deque(calls)
        self._num_left = len(calls)
        self._lock = threading.Lock()
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def work(self) -> None:
        """Run requests, each thread that comes here the next one, until none is waiting."""
        while True:
            try:
                call = self._waiting.popleft()
            except IndexError:
                return
            try:
                if self.error is None:
                    call()
            except BaseException as error:
                self.error = self.error or error
            with self._lock:
                self._num_left -= 1
                if self._num_left == 0:
                    self.ended.set()


class IOPool(Closing):
    """Runs the requests of any number of callers, each caller helped by ``num_threads`` shared threads.

    Args:
        num_threads: threads; that many requests are in flight, and one more per caller.
        name: prefix of the threads' names.
    """

    def __init__(self, num_threads: int = DEFAULT_THREADS, *, name: str = "outsize-io") -> None:
        if num_threads < 1:
            raise ValueError(f"a pool needs at least one thread, not {num_threads}")
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        # Daemons, so that an owner who forgot to close cannot keep the interpreter from ending.
        self._threads = [
            threading.Thread(target=_work, args=(self._queue,), name=f"{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        # An owner who let go without closing: idle threads hold the queue alone.
        weakref.finalize(self, _end, self._queue, num_threads).atexit = False

    @property
    def num_threads(self) -> int:
        """Threads that help the callers."""
        return len(self._threads)

    def run(self, calls: Sequence[Callable[[], object]]) -> None:
        """Run all calls, in any order and together, and return when the last has ended.

        The caller, who would only wait, works too: its first request needs no other thread to wake up.

        The first exception is raised here, after all calls have ended; calls that had not started by then are
        left out. So when this returns or raises, no request touches the caller's buffers any more.

        Raises:
            ValueError: the pool is closed.
        """
        batch = _Batch(calls)
        with self._lock:
            if self._closed:
                raise ValueError("this I/O pool is closed")
            for _ in range(min(len(calls) - 1, len(self._threads))):
                self._queue.put(batch)
        if not calls:
            return
        batch.work()
        try:
            batch.ended.wait()
        finally:
            batch.ended.wait()  # Ctrl-C ends the first wait, not the requests
        if batch.error is not None:
            try:
                raise batch.error
            finally:
                batch.error = None  # else error and frame hold each other, and the buffers with them

    def close(self) -> None:
        """End the threads once the queue is empty, and join them; a second call does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                _end(self._queue, len(self._threads))
        for thread in self._threads:
            thread.join()


def _end(batches: "queue.SimpleQueue[_Batch | None]", num_threads: int) -> None:
    for _ in range(num_threads):
        batches.put(None)


def _work(batches: "queue.SimpleQueue[_Batch | None]") -> None:
    """Help with batches until told to stop. Holds no reference to a buffer while it waits."""
    while (batch := batches.get()) is not None:
        batch.work()
        del batch
