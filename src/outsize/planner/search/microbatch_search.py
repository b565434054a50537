"""Into how many microbatches a step is cut where nobody says: the numbers worth trying, and the search among them.

One worker moves no more weights for more microbatches, and needs less memory with them; a large one is never slower to
compute. Several workers hand microbatches on to each other: with few of them the filling and draining of stages shows.
Compute is taken to be as fast on small microbatches as on large ones, which flatters the small ones. So a search goes
from the largest microbatch that fits to smaller ones, which have to gain a percent. One that gains less ends nothing:
what a forward may keep of half a microbatch grows by steps, and so does what that spares.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from outsize.errors import InfeasiblePlanError

# Sequences per microbatch that several workers try; one worker tries no more than the last, unless they are short.
SIZES = (1, 2, 4, 8, 16)
# Tokens of the largest microbatch of short ones: layers have long reached their rate, and memory is better spent.
LARGEST_TOKENS = 32768
# Several GPUs get four each at least: with fewer the filling and draining of stages shows. And microbatches are no
# larger than what fills a GPU: on 4 x 2,048 tokens layers run at their rate (the published layer times of
# bench/bench_bubble.py).
PER_GPU, FULL_TOKENS = 4, 8192
# What fewer sequences per microbatch have to gain, as a share of the step.
NEAR = 1.01

T = TypeVar("T")


def cuts_to_try(sequences: int, seq_len: int, num_workers: int) -> Iterator[int]:
    """Yield numbers of microbatches, the largest microbatches first; several workers get microbatches of equal size.

    Args:
        sequences: of a step.
        seq_len: tokens of a sequence.
        num_workers: that share the step.
    """
    if num_workers == 1:
        count, fewest = 1, min(sequences * seq_len / LARGEST_TOKENS, sequences / SIZES[-1])
        while count < sequences:
            if count >= fewest:
                yield count
            count *= 2
        yield sequences
        return
    counts = [sequences // size for size in reversed(SIZES) if sequences % size == 0]
    most = max(1, FULL_TOKENS // seq_len)
    enough = [count for count in counts if count >= PER_GPU * num_workers and sequences <= most * count]
    yield from enough or counts[-1:]


def may_shorten(waiting_s: float, step_s: float, microbatches: int, count: int) -> bool:
    """Return whether ``count`` microbatches could shorten what stages wait for each other by a percent of the step.

    Filling and draining are as long as microbatches are, and smaller ones leave memory for larger stages.

    Args:
        waiting_s: for how long stages wait with ``microbatches``.
        step_s: what a step takes with them.
        microbatches: of the step so far.
        count: more of them.
    """
    return waiting_s * (1 - microbatches / count) >= step_s * (1 - 1 / NEAR)


def search_cuts(
    counts: Iterable[int],
    take: Callable[[int], T],
    is_less: Callable[[T, T], bool],
    *,
    may_gain: Callable[[T, int], bool] = lambda best, count: True,
    is_enough: Callable[[T], bool] = lambda best: False,
    may_fit: Callable[[InfeasiblePlanError], bool] = lambda error: True,
) -> T:
    """Return the best that was made of a number of microbatches.

    Args:
        counts: numbers to try, the largest microbatches first.
        take: makes of a number what is compared; raises InfeasiblePlanError where that does not fit.
        is_less: whether a step of the first takes a percent less than one of the second.
        may_gain: whether a number is worth trying after the best so far; may raise the same.
        is_enough: whether the best so far leaves nothing to gain.
        may_fit: whether smaller microbatches may fit where these do not.

    Raises:
        InfeasiblePlanError: none fits; of the number that is short by the least.
    """
    best: T | None = None
    failures: list[InfeasiblePlanError] = []
    for count in counts:
        try:
            if best is not None and not may_gain(best, count):
                continue
            found = take(count)
        except InfeasiblePlanError as error:
            failures.append(error)
            if not may_fit(error):
                break
            continue
        if best is None or is_less(found, best):
            best = found
        if is_enough(best):
            break
    if best is None:
        raise min(failures, key=lambda error: sum(error.short_by.values()))
    return best
