"""A few threads that keep several disk requests in flight.

Plain threads are enough: ``os.preadv`` and ``os.pwritev`` release the GIL for the whole of a request, and a
request of some MiB takes a hundred times longer than handing it over.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

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


class IOPool:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _end(batches: "queue.SimpleQueue[_Batch | None]", num_threads: int) -> None:
    for _ in range(num_threads):
        batches.put(None)


def _work(batches: "queue.SimpleQueue[_Batch | None]") -> None:
    """Help with batches until told to stop. Holds no reference to a buffer while it waits."""
    while (batch := batches.get()) is not None:
        batch.work()
        del batch
