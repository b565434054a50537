"""One rank's part of the data: its rows of each batch that all ranks train together.

The batch of a step is the same whatever the number of ranks, and rank r of N takes the r-th of N runs of its rows. So
nothing is trained twice and nothing left out, and a run goes on with another N after the last step that was taken, with
no state to save. A rank reads the tokens of the others too, 4 bytes each, so that it knows what the loss is a mean over
without asking; beside training a token that is nothing.
"""

from outsize.data.batch import Batch
from outsize.data.prefetch import BatchSource


class SharedData:
    """Batches of one rank.

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
