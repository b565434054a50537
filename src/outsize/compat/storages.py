"""How many tensors lie in a storage, which torch counts for itself."""

import torch


def num_holders(storage: torch.UntypedStorage) -> int:
    """Return how many tensors lie in ``storage``: views count one by one, and so do arrays of numpy over it."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1
