"""Into how many microbatches a step is cut where nobody says: the numbers worth trying, the best guess first.

One worker moves no more weights for more microbatches, and needs less memory with them; a large one is never slower to
compute. Several workers hand microbatches on to each other: with few of them the filling and draining of stages shows.
"""

from collections.abc import Iterator

# Sequences per microbatch that are simulated.
SIZES = (1, 2, 4, 8, 16)
# Several GPUs get four each at least: with fewer the filling and draining of stages shows. And microbatches are no
# larger than what fills a GPU: on 4 x 2,048 tokens layers run at their rate (the published layer times of
# bench/bench_bubble.py).
PER_GPU, FULL_TOKENS = 4, 8192


def simulated_cuts(sequences: int, seq_len: int, num_workers: int) -> Iterator[int]:
    """Yield numbers of microbatches of equal size, the largest microbatches first.

    Args:
        sequences: of a step.
        seq_len: tokens of a sequence.
        num_workers: that share the step.
    """
    counts = [sequences // size for size in reversed(SIZES) if sequences % size == 0]
    if num_workers == 1:
        yield from counts
        return
    most = max(1, FULL_TOKENS // seq_len)
    enough = [count for count in counts if count >= PER_GPU * num_workers and sequences <= most * count]
    yield from enough or counts[-1:]


def step_cuts(sequences: int, seq_len: int, num_workers: int) -> Iterator[int]:
    """Yield numbers of microbatches to run with, of which the first that fits is taken.

    Args:
        sequences: of a step.
        seq_len: tokens of a sequence.
        num_workers: that share the step.
    """
    if num_workers > 1:
        yield from simulated_cuts(sequences, seq_len, num_workers)
        return
    count = 1
    while count < sequences:
        yield count
        count *= 2
    yield sequences
