"""Storages, the memory of tensors: which one a tensor lies in, and how many lie in one, as torch counts them."""

import torch
from torch import Tensor


def num_holders(storage: torch.UntypedStorage) -> int:
    """Return how many tensors lie in ``storage``: views count one by one, and so do arrays of numpy over it."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that ``storage`` has to itself as long as it lives."""
    return int(storage._cdata)


def memory_key(tensor: Tensor) -> int:
    """Return the `storage_key` of what ``tensor`` lies in: that of all its views."""
    return int(tensor.untyped_storage()._cdata)
