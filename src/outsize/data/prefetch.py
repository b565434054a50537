"""Make batches ahead of the step on threads, take the rows of one rank, and time the threads."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, Protocol, Self

from outsize.data.batch import Batch
from outsize.errors import Closing


class BatchSource(Protocol):
    """What a prefetcher draws from: batches as a pure function of the step, made on any thread."""

    def batch(self, step: int, num_sequences: int) -> Batch:
        """Return the batch of ``step``."""


class Prefetcher(Closing):
    """Context manager that makes batches ``start_step, start_step + 1, ...`` ahead of time.

    Threads of its own make them:

    1. As many batches as ``depth`` are given to the threads, as futures in the order of their steps; a batch is a
       function of its step, so that several threads may make several at once;
    2. ``next`` waits for the first of them, hands it out, and gives the threads another; an exception it raises, each
       time it is called, once the batches before are handed out, and no batch is asked for any more;
    3. ``close`` wakes whoever waits; batches in the making are finished and dropped, the others never begun.

    Args:
        source: where batches come from; only the threads call it.
        num_sequences: sequences per batch.
        start_step: step of the first batch.
        depth: most batches held ready or in the making, at least 1.
        num_workers: threads that make batches, at least 1.
        finish: called by a thread with each batch, to give it the form in which it is used.
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
        self._make = lambda step: finish(source.batch(step, num_sequences))
        self._steps = count(start_step)
        self._depth = depth
        self._threads = ThreadPoolExecutor(num_workers, "outsize-data")
        self._made: deque[Future[Batch]] = deque()
        self._closed: Future[None] = Future()

    def __enter__(self) -> Self:
        for _ in range(self._depth):
            self._begin()
        return self

    def next(self) -> Batch:
        """Return the batch of the next step.

        Raises:
            RuntimeError: the prefetcher is not open, or is closed meanwhile.
            BaseException: what making the batch raised.
        """
        if not self._made or self._closed.done():
            raise RuntimeError("the prefetcher is not open; use it as a context manager")
        first = self._made[0]
        ends: tuple[Future[Any], ...] = first, self._closed
        wait(ends, return_when=FIRST_COMPLETED)
        if self._closed.done():
            raise RuntimeError("the prefetcher was closed while a batch was awaited")
        batch = first.result()
        self._made.popleft()
        self._begin()
        return batch

    def close(self) -> None:
        """Stop and join the threads. May be called twice."""
        with suppress(InvalidStateError):
            self._closed.set_result(None)
        self._made.clear()  # the traceback of an error holds whoever called `next`, who may hold this
        self._threads.shutdown(cancel_futures=True)

    def _begin(self) -> None:
        self._made.append(self._threads.submit(self._make, next(self._steps)))


class SharedData:
    """Batches of one rank.

    The batch of a step is the same whatever the number of ranks, and rank r of N takes the r-th of N runs of its rows.
    So nothing is trained twice and nothing left out, and a run goes on with another N after the last step that was
    taken, with no state to save. A rank reads the tokens of the others too, 4 bytes each, so that it knows what the
    loss is a mean over without asking; beside training a token that is nothing.

    Args:
        source: of whole batches.
        rank: of this process, from 0.
        size: how many ranks train together.
    """

    def __init__(self, source: BatchSource, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}: ranks are numbered from 0")
        self._source = source
        self._rank = rank
        self._size = size

    def batch(self, step: int, num_sequences: int) -> Batch:
        """Return this rank's share of the batch of ``step``, which has ``num_sequences`` in all.

        Raises:
            ConfigError: fewer sequences than ranks.
        """
        return self._source.batch(step, num_sequences).share(self._rank, self._size)


# Rates that lie so near are as good as each other: threads that gain no more are not worth having.
NEAR = 0.1
_WORKERS = (1, 2, 4)
_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class LoaderRate:
    """How fast batches come.

    Attributes:
        workers: threads that make them.
        tokens_per_s: padding included.
    """

    workers: int
    tokens_per_s: float

    def to_dict(self) -> dict[str, float]:
        """Return both, ready for JSON."""
        return asdict(self)


def sweep_loader(
    source: BatchSource, num_sequences: int, seq_len: int, num_batches: int, depth: int
) -> list[LoaderRate]:
    """Measure one, two and four threads, each for a third of a second or for all of a run's batches.

    Args:
        source: the data.
        num_sequences: sequences of a batch.
        seq_len: tokens of a sequence.
        num_batches: of the run.
        depth: batches made ahead; as many as there are threads where that is more.

    Raises:
        DataError: a file changed while it was in use.
    """
    rates = []
    for workers in _WORKERS:
        with Prefetcher(source, num_sequences, depth=max(depth, workers), num_workers=workers) as prefetcher:
            prefetcher.next()  # what is read first is cold
            started, num_tokens = time.perf_counter(), 0
            while num_tokens < num_batches and (not num_tokens or time.perf_counter() - started < _SECONDS):
                prefetcher.next()
                num_tokens += 1
            seconds = time.perf_counter() - started
        rates.append(LoaderRate(workers, num_tokens * num_sequences * seq_len / seconds))
    return rates


def enough_workers(rates: Sequence[LoaderRate]) -> int:
    """Return the fewest threads that come within `NEAR` of the fastest."""
    fastest = max(rate.tokens_per_s for rate in rates)
    return min(rate.workers for rate in rates if rate.tokens_per_s >= (1 - NEAR) * fastest)
