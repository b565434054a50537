"""How fast batches come with one thread that makes them and with several, measured on the data of a run."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from outsize.data.prefetch import BatchSource, Prefetcher

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
            started, taken = time.perf_counter(), 0
            while taken < num_batches and (not taken or time.perf_counter() - started < _SECONDS):
                prefetcher.next()
                taken += 1
            seconds = time.perf_counter() - started
        rates.append(LoaderRate(workers, taken * num_sequences * seq_len / seconds))
    return rates


def enough_workers(rates: Sequence[LoaderRate]) -> int:
    """Return the fewest threads that come within `NEAR` of the fastest."""
    fastest = max(rate.tokens_per_s for rate in rates)
    return min(rate.workers for rate in rates if rate.tokens_per_s >= (1 - NEAR) * fastest)
