"""A preallocated file that is read and written around the page cache, many requests in flight.

Direct I/O moves bytes between the disk and the caller's buffer without a copy: it costs a third of the CPU of
buffered reads, and the page cache cannot grow beyond the budget behind our back. The price is that addresses,
offsets and lengths are multiples of `SECTOR_BYTES`. Where a file system refuses direct I/O the file falls
back to buffered I/O and asks the kernel to drop the pages after each transfer; that is logged and counted.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from outsize import files
from outsize.errors import Closing, StorageError, explain
from outsize.storage.ledger import Ledger
from outsize.storage.prealloc import IOPool, enable_direct, open_again, preallocate
from outsize.units import align_up

SECTOR_BYTES = 4096
# Of 256 KiB to 8 MiB, see bench/bench_disk.py: reads gain up to 2 MiB and writes up to 4 MiB; with still
# larger requests a buffer is too few of them to keep the threads busy.
DEFAULT_REQUEST_BYTES = 4 * 2**20

_log = logging.getLogger(__name__)

Span = tuple[Tensor, int]
"""A uint8 buffer and the file offset that it is read from or written to."""

Inspect = Callable[[memoryview, int], None]
"""Sees the bytes of each request of a span and their offset in it: before they are written, or after they were read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """What a file has moved since it was opened.

    Attributes:
        bytes_read: bytes of finished reads.
        bytes_written: bytes of finished writes.
        read_s: seconds that callers waited for reads, summed over callers.
        write_s: the same for writes.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    read_s: float = 0.0
    write_s: float = 0.0


class Tally(threading.local):
    """Bytes moved for the calling thread; every thread sees its own counts.

    Attributes:
        read_bytes: of finished reads.
        written_bytes: of finished writes.
    """

    read_bytes = 0
    written_bytes = 0


class DirectFile(Closing):
    """A file of fixed size that reads as zeros until written; may be used from any thread.

    Calls that touch the same bytes must not overlap in time; all others may.

    Args:
        path: the file; it is created, or emptied where it exists, and locked against other processes.
        num_bytes: its size, rounded up to whole sectors and allocated at once.
        pool: threads that move the requests; shared, and closed by whoever made it.
        request_bytes: largest single request, a multiple of `SECTOR_BYTES`.
        direct: False asks for buffered I/O from the start.
        temporary: remove the name at once, so that the space is freed when the process ends, however it ends.
        ledger: where the bytes are reserved, in tier ``disk``; None reserves nothing.
        existing: open a file that is there, of exactly this size, and keep what it holds.

    Attributes:
        tally: bytes moved for the thread that asks.
        is_refused: whether the file system refused direct I/O.

    Raises:
        StorageError: disk full, not writable, in use by another run; no file is left behind.
        BudgetExceededError: the ledger has too little left.
    """

    def __init__(
        self,
        path: str | Path,
        num_bytes: int,
        *,
        pool: IOPool,
        request_bytes: int = DEFAULT_REQUEST_BYTES,
        direct: bool = True,
        temporary: bool = False,
        ledger: Ledger | None = None,
        existing: bool = False,
    ) -> None:
        if num_bytes <= 0 or request_bytes <= 0 or request_bytes % SECTOR_BYTES:
            raise ValueError(
                f"file of {num_bytes} bytes, requests of {request_bytes}: need whole sectors of 4096"
            )
        self.path = Path(path)
        self.num_bytes = align_up(num_bytes, SECTOR_BYTES)
        self._pool = pool
        self._request_bytes = request_bytes
        self._reservation = ledger.reserve("disk", str(path), self.num_bytes) if ledger else None
        try:
            self._descriptor = (open_again if existing else preallocate)(self.path, self.num_bytes)
        except BaseException:
            self._release()
            raise
        # Also of an owner who let go without closing.
        self._end = weakref.finalize(self, _close, self._descriptor)
        self._end.atexit = False
        refusal = enable_direct(self._descriptor, SECTOR_BYTES) if direct else None
        self.is_refused = refusal is not None
        self._buffered = not direct or self.is_refused
        if refusal is not None:
            _log.warning("%s: no direct I/O here (%s); buffered I/O costs more CPU", path, refusal)
        if temporary:
            self._forget_name()
        self._idle = threading.Condition()
        self._num_active = 0
        self._closed = False
        self._statistics = Transfers()
        self.tally = Tally()

    def read_into(self, buffer: Tensor, offset: int) -> None:
        """Fill ``buffer`` from ``offset``, see `read_spans`."""
        self.read_spans([(buffer, offset)])

    def write_from(self, buffer: Tensor, offset: int) -> None:
        """Write ``buffer`` at ``offset``, see `write_spans`."""
        self.write_spans([(buffer, offset)])

    def read_spans(self, spans: Sequence[Span], inspect: Sequence[Inspect] = ()) -> None:
        """Fill several buffers, all their requests in flight together.

        Args:
            spans: contiguous uint8 CPU tensors and file offsets; address, length and offset multiples of
                4096.
            inspect: one for each span; runs in the thread that moved the bytes, and may raise.

        Raises:
            StorageError: a request failed; the buffers hold nothing useful.
            ValueError: misaligned, outside the file, or the file is closed.
        """
        views = [(_bytes_of(buffer, offset, self.num_bytes), offset) for buffer, offset in spans]
        started = time.perf_counter()
        self._transfer(views, inspect, written=False)
        self._count(sum(len(view) for view, _ in views), 0, time.perf_counter() - started, 0.0)

    def write_spans(self, spans: Sequence[Span], inspect: Sequence[Inspect] = ()) -> None:
        """Write several buffers together; arguments and errors as in `read_spans`.

        After an error the spans hold a mixture of old and new bytes. Data has left the page cache when this
        returns, but not necessarily the disk's own cache.
        """
        views = [(_bytes_of(buffer, offset, self.num_bytes), offset) for buffer, offset in spans]
        started = time.perf_counter()
        self._transfer(views, inspect, written=True)
        self._count(0, sum(len(view) for view, _ in views), 0.0, time.perf_counter() - started)

    def read_request(self, view: memoryview, offset: int) -> None:
        """Fill one aligned view in this thread; uncounted, for code that runs in the pool itself."""
        self._move(files.system().pread, "read", view, offset)

    def write_request(self, view: memoryview, offset: int) -> None:
        """Write one aligned view in this thread; uncounted, for code that runs in the pool itself."""
        self._move(files.system().pwrite, "write", view, offset)

    def run(self, calls: Sequence[Callable[[], object]]) -> None:
        """Run calls of `read_request` and `write_request` in the pool; the file stays open meanwhile."""
        with self._idle:
            if self._closed:
                raise ValueError(f"{self.path} is closed")
            self._num_active += 1
        try:
            self._pool.run(calls)
        finally:
            with self._idle:
                self._num_active -= 1
                self._idle.notify_all()

    def sync(self) -> None:
        """Return when everything written so far will outlast a loss of power.

        Raises:
            StorageError: the disk could not; what was written since the last sync may be gone.
        """
        try:
            files.system().fdatasync(self._descriptor)
        except OSError as error:
            raise explain(error, f"make {self.path} durable") from error

    def statistics(self) -> Transfers:
        """Return the transfers since the file was opened."""
        return self._statistics

    def close(self) -> None:
        """Wait for transfers under way, then close; the file keeps its bytes. A second call does nothing."""
        with self._idle:
            first = not self._closed
            self._closed = True
            self._idle.wait_for(lambda: self._num_active == 0)
        if first:
            self._end()
            self._release()

    def _transfer(
        self, views: Sequence[tuple[memoryview, int]], inspect: Sequence[Inspect], *, written: bool
    ) -> None:
        size = self._request_bytes
        request = self.write_request if written else self.read_request

        def inspected(inspect: Inspect, view: memoryview, offset: int, start: int) -> None:
            piece = view[start : start + size]
            if written:
                inspect(piece, start)
            request(piece, offset + start)
            if not written:
                inspect(piece, start)

        calls: list[Callable[[], object]] = []
        for number, (view, offset) in enumerate(views):
            for start in range(0, len(view), size):
                if inspect:
                    calls.append(partial(inspected, inspect[number], view, offset, start))
                else:
                    calls.append(partial(request, view[start : start + size], offset + start))
        self.run(calls)
        if self._buffered:
            self._drop_cache(views, written=written)

    def _move(
        self, call: Callable[[int, memoryview, int], int], verb: str, view: memoryview, offset: int
    ) -> None:
        """Move one request, going on where the kernel moves less than asked."""
        done = 0
        while done < len(view):
            try:
                moved = call(self._descriptor, view[done:], offset + done)
            except OSError as error:
                action = f"{verb} {len(view)} bytes at offset {offset} of {self.path}"
                raise explain(error, action) from error
            if done + moved < len(view):
                moved -= moved % SECTOR_BYTES  # direct I/O can only go on from a whole sector
            if moved <= 0:
                raise StorageError(
                    f"short {verb} at offset {offset + done} of {self.path}: {len(view) - done} bytes missed;"
                    " the file was truncated or the disk is full"
                )
            done += moved

    def _drop_cache(self, views: Sequence[tuple[memoryview, int]], *, written: bool) -> None:
        """Keep the page cache small: only clean pages can be dropped, so written ones go to disk first."""
        if written:
            try:
                files.system().fdatasync(self._descriptor)
            except OSError as error:
                raise explain(error, f"write {self.path} out of the page cache") from error
        for view, offset in views:
            os.posix_fadvise(self._descriptor, offset, len(view), os.POSIX_FADV_DONTNEED)

    def _count(self, bytes_read: int, bytes_written: int, read_s: float, write_s: float) -> None:
        self.tally.read_bytes += bytes_read
        self.tally.written_bytes += bytes_written
        with self._idle:
            before = self._statistics
            self._statistics = Transfers(
                bytes_read=before.bytes_read + bytes_read,
                bytes_written=before.bytes_written + bytes_written,
                read_s=before.read_s + read_s,
                write_s=before.write_s + write_s,
            )

    def _forget_name(self) -> None:
        try:
            files.system().unlink(self.path)
        except OSError as error:
            self._end()
            self._release()
            raise explain(error, f"remove the name of {self.path}") from error

    def _release(self) -> None:
        if self._reservation:
            self._reservation.release()


def _close(descriptor: int) -> None:
    files.system().close(descriptor)


def _bytes_of(buffer: Tensor, offset: int, num_bytes: int) -> memoryview:
    """Return a view of the buffer's memory after checking what direct I/O asks for."""
    if buffer.dtype != torch.uint8 or buffer.device.type != "cpu" or not buffer.is_contiguous():
        raise ValueError(f"need a contiguous uint8 CPU tensor, not {buffer.dtype} on {buffer.device}")
    address, length = buffer.data_ptr(), buffer.numel()
    if (address | offset | length) % SECTOR_BYTES:
        raise ValueError(
            f"direct I/O needs multiples of {SECTOR_BYTES}: address {address:#x}, offset {offset},"
            f" length {length}; take the buffer from outsize.storage.ledger"
        )
    if offset < 0 or offset + length > num_bytes:
        raise ValueError(f"bytes {offset}..{offset + length} lie outside the file of {num_bytes}")
    return buffer.reshape(-1).numpy().data
