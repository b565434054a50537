"""Batches made ahead of the step that needs them, on a thread of their own.

How the two threads meet, around one condition:

1. the worker waits until fewer than ``depth`` batches are ready, or it is told to stop;
2. it makes the next batch outside the lock, so that ``next`` never waits behind a disk read that it does not
   need;
3. it appends the batch (or keeps the exception and ends) and notifies;
4. ``next`` waits for a batch or an exception, hands out batches first, in order, and then raises the
   exception, each time it is called;
5. ``close`` sets the flag, notifies and joins: a batch in the making is finished and dropped.
"""

import threading
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from outsize.data.batch import Batch


class BatchSource(Protocol):
    """What a prefetcher draws from: batches as a pure function of the step."""

    def batch(self, step: int, num_sequences: int) -> Batch:
        """Return the batch of ``step``."""


@dataclass(frozen=True)
class PrefetchStatistics:
    """How a prefetcher kept up.

    Attributes:
        num_batches: batches handed out.
        num_waits: calls of ``next`` that found no batch ready. The first call usually does; more than that
            means that the data path is slower than the step.
    """

    num_batches: int
    num_waits: int


class Prefetcher:
    """Context manager that makes batches ``start_step, start_step + 1, ...`` ahead of time.

    Args:
        dataset: where batches come from; only the worker thread calls it.
        num_sequences: sequences per batch.
        start_step: step of the first batch.
        depth: most batches held ready, at least 1.
    """

    def __init__(self, dataset: BatchSource, num_sequences: int, start_step: int = 0, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self._dataset = dataset
        self._num_sequences = num_sequences
        self._next_step = start_step
        self._depth = depth
        self._ready: deque[Batch] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._num_batches = self._num_waits = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="outsize-data", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def next(self) -> Batch:
        """Return the batch of the next step.

        Raises:
            RuntimeError: the prefetcher is not open.
            Exception: whatever the data set raised while this batch was made.
        """
        with self._changed:
            if self._thread is None or self._closed:
                raise RuntimeError("the prefetcher is not open; use it as a context manager")
            self._num_waits += not self._ready
            self._changed.wait_for(lambda: self._ready or self._error or self._closed)
            if self._ready:
                batch = self._ready.popleft()
                self._num_batches += 1
                self._changed.notify_all()
                return batch
            if self._error is not None:
                raise self._error
            raise RuntimeError("the prefetcher was closed while a batch was awaited")

    def statistics(self) -> PrefetchStatistics:
        """Return how the prefetcher kept up so far."""
        with self._changed:
            return PrefetchStatistics(self._num_batches, self._num_waits)

    def close(self) -> None:
        """Stop and join the thread. May be called twice."""
        with self._changed:
            self._closed = True
            self._error = None  # its traceback holds whoever called `next`, who may hold this
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._has_room():
                batch = self._dataset.batch(self._next_step, self._num_sequences)
                self._next_step += 1
                with self._changed:
                    self._ready.append(batch)
                    self._changed.notify_all()
        except BaseException as error:  # whatever it is, it belongs to the thread that trains
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _has_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
            return not self._closed
