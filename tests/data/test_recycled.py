import gc

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from outsize.data.batch import RecycledArrays


def test_memory_comes_back_when_the_last_view_is_gone():
    arrays = RecycledArrays()
    first = torch.from_numpy(arrays.take(4, 8))
    address, view = first.data_ptr(), first.tensor_split(2)[1]
    del first
    assert torch.from_numpy(arrays.take(4, 8)).data_ptr() != address, "somebody still reads it"
    del view
    gc.collect()
    assert torch.from_numpy(arrays.take(2, 3)).data_ptr() == address


@given(sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans()), max_size=30))
def test_no_two_live_arrays_share_memory(sizes):
    arrays, held = RecycledArrays(), []
    for value, (rows, columns, keep) in enumerate(sizes):
        array = arrays.take(rows, columns)
        assert array.shape == (rows, columns)
        array.fill(value)
        if keep:
            held.append((value, array))
    for value, array in held:
        assert np.all(array == value)


def test_arrays_outlive_the_pool():
    array = RecycledArrays().take(2, 2)
    array.fill(7)
    gc.collect()
    assert array.sum() == 28
