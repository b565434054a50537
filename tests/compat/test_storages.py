"""Holders of a storage, as torch counts them."""

import torch

from outsize.compat.torch_private import num_holders


def test_tensors_views_and_arrays_hold_a_storage_until_they_are_gone():
    tensor = torch.zeros(4)
    storage = tensor.untyped_storage()
    assert num_holders(storage) == 1
    view = tensor[1:]
    assert num_holders(storage) == 2
    array = tensor.detach().numpy()
    assert num_holders(storage) == 3
    del view, array, tensor
    assert num_holders(storage) == 0
