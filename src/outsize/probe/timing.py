"""Repeating work for a while and timing each repetition."""

import time
from collections.abc import Callable


def sample(
    work: Callable[[], object],
    *,
    seconds: float,
    num_min: int,
    finish: Callable[[], object] = lambda: None,
) -> list[float]:
    """Return the seconds that ``work()`` took, again and again, after one repetition that does not count.

    Args:
        work: what is timed.
        seconds: no repetition starts later than this, beyond ``num_min`` of them.
        num_min: repetitions at least.
        finish: waits for work that was only queued, e.g. ``torch.cuda.synchronize``.
    """
    work()
    finish()
    samples: list[float] = []
    stop = time.perf_counter() + seconds
    while len(samples) < num_min or time.perf_counter() < stop:
        started = time.perf_counter()
        work()
        finish()
        samples.append(time.perf_counter() - started)
    return samples
