"""Batches made ahead of the step that needs them, on threads of their own.

How the threads meet, around one condition:

1. a worker waits until fewer than ``depth`` batches are ready or in the making, or it is told to stop, and takes the
   number of the next step;
2. the worker makes the batch outside the lock, so that ``next`` never waits behind a disk read that it does not need;
   a batch is a function of its step, so that several workers may make several at once;
3. the worker puts the batch down under its step (or the exception, after which no batch is begun) and notifies;
4. ``next`` waits for the batch of its step, and so hands batches out in order; an exception it raises, each time it is
   called, once the batches before are handed out;
5. ``close`` sets the flag, notifies and joins: batches in the making are finished and dropped.
"""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from outsize.data.batch import Batch


class BatchSource(Protocol):
    """What a prefetcher draws from: batches as a pure function of the step, made on any thread."""

    def batch(self, step: int, num_sequences: int) -> Batch:
        """Return the batch of ``step``."""


class Prefetcher:
    """Context manager that makes batches ``start_step, start_step + 1, ...`` ahead of time.

    Args:
        source: where batches come from; only the workers call it.
        num_sequences: sequences per batch.
        start_step: step of the first batch.
        depth: most batches held ready or in the making, at least 1.
        num_workers: threads that make batches, at least 1.
        finish: called by a worker with each batch, to give it the form in which it is used.

    Attributes:
        num_waits: calls of `next` that found their batch not ready. The first call usually does; more than that mean
            that batches take longer than steps.
    """

    def __init__(
        self,
        source: BatchSource,
        num_sequences: int,
        start_step: int = 0,
        *,
        depth: int = 2,
        num_workers: int = 1,
        finish: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        if depth < 1 or num_workers < 1:
            raise ValueError(f"depth and num_workers must be at least 1, got {depth} and {num_workers}")
        self._source = source
        self._num_sequences = num_sequences
        self._depth = depth
        self._finish = finish
        self._begun = self._taken = start_step
        self._made: dict[int, Batch | BaseException] = {}
        self._closed = self._failed = False
        self.num_waits = 0
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"outsize-data-{index}", daemon=True)
            for index in range(num_workers)
        ]
        self._opened = False

    def __enter__(self) -> Self:
        self._opened = True
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def next(self) -> Batch:
        """Return the batch of the next step.

        Raises:
            RuntimeError: the prefetcher is not open.
            Exception: whatever the source raised while this batch was made.
        """
        with self._changed:
            if not self._opened or self._closed:
                raise RuntimeError("the prefetcher is not open; use it as a context manager")
            self.num_waits += self._taken not in self._made
            self._changed.wait_for(lambda: self._taken in self._made or self._closed)
            if self._closed:
                raise RuntimeError("the prefetcher was closed while a batch was awaited")
            made = self._made[self._taken]
            if isinstance(made, BaseException):
                raise made
            del self._made[self._taken]
            self._taken += 1
            self._changed.notify_all()
            return made

    def close(self) -> None:
        """Stop and join the threads. May be called twice."""
        with self._changed:
            self._closed = True
            self._made.clear()  # the traceback of an error holds whoever called `next`, who may hold this
            self._changed.notify_all()
        for thread in self._threads if self._opened else ():
            thread.join()

    def _run(self) -> None:
        while (step := self._begin()) is not None:
            made: Batch | BaseException
            try:
                made = self._finish(self._source.batch(step, self._num_sequences))
            except BaseException as error:  # whatever it is, it belongs to the thread that trains
                made = error
            with self._changed:
                self._failed = self._failed or isinstance(made, BaseException)
                if not self._closed:
                    self._made[step] = made
                self._changed.notify_all()

    def _begin(self) -> int | None:
        """Wait until another batch is wanted; returns its step, or None where none will be."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._failed or self._begun < self._taken + self._depth
            )
            if self._closed or self._failed:
                return None
            self._begun += 1
            return self._begun - 1
