"""Arrays whose memory is used again once nobody holds them.

A batch of fresh memory costs a page fault for every 4 KiB, more than reading its tokens does. So the memory of a
batch comes back, and a run of equal batches walks round a ring of as many blocks as are alive at once:

1. `take` hands out an array over a free block, or over a new one;
2. the array is held by the tensor made of it, and by every view of that;
3. when the last of them is gone, and no earlier, the block is free again.

Nobody has to give anything back, and nobody can be handed memory that somebody still reads.
"""

import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

# Blocks that are kept: what a prefetcher has ready, the batch of the step, and the one in the making.
_NUM_FREE_MAX = 8


class RecycledArrays:
    """Hands out int64 arrays. Safe to use from several threads."""

    def __init__(self) -> None:
        self._free: deque[NDArray[np.int64]] = deque(maxlen=_NUM_FREE_MAX)

    def take(self, num_rows: int, num_columns: int) -> NDArray[np.int64]:
        """Return an array ``[num_rows, num_columns]``; what it holds is left over from others."""
        count = num_rows * num_columns
        try:
            block = self._free.pop()  # the one that was used last is in the cache, if any is
        except IndexError:
            block = np.empty(count, np.int64)
        if len(block) < count:
            block = np.empty(count, np.int64)
        # A view of a view has the first one as its base, so this object lives exactly as long as any of them.
        root = np.frombuffer(block.data, np.int64, count)
        weakref.finalize(root, self._free.append, block).atexit = False
        return root.reshape(num_rows, num_columns)
