"""Repeating work for a while and timing each repetition."""

import math
import time
from collections.abc import Callable


def sample(
    work: Callable[[], object],
    *,
    seconds: float,
    num_min: int,
    until_s: float = math.inf,
    finish: Callable[[], object] = lambda: None,
) -> list[float]:
    """Return the seconds that ``work()`` took, again and again, after one repetition that does not count.

    Args:
        work: what is timed.
        seconds: no repetition starts later than this, beyond ``num_min`` of them.
        num_min: repetitions at least.
        until_s: of `time.perf_counter`, when the time of the whole part is up: no repetition starts later, beyond one.
        finish: waits for work that was only queued, e.g. ``torch.accelerator.synchronize``.
    """
    work()
    finish()
    samples: list[float] = []
    stop = time.perf_counter() + seconds
    while not samples or ((now := time.perf_counter()) < until_s and (len(samples) < num_min or now < stop)):
        started = time.perf_counter()
        work()
        finish()
        samples.append(time.perf_counter() - started)
    return samples
