import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outsize.optim.split_masters import join_low, split_low


def of_bits(bits: list[int]) -> Tensor:
    return torch.from_numpy(np.array(bits, np.uint32).view(np.float32).copy())


def again(master: Tensor, weights: Tensor) -> Tensor:
    low, positions, bits = split_low(master, weights)
    assert (low.dtype, positions.dtype, bits.dtype) == (torch.int16, torch.int64, torch.int32)
    found = join_low(weights, low)
    found.view(torch.int32)[positions] = bits
    return found


def same_values(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50), st.data())
def test_every_master_comes_back_whatever_its_weight_is(bits: list[int], data: st.DataObject):
    """Also beside weights that are not its own rounding: then all of it is kept."""
    master = of_bits(bits)
    assert same_values(again(master, master.to(torch.bfloat16)), master)
    others = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=len(bits), max_size=len(bits)))
    assert same_values(again(master, of_bits(others).to(torch.bfloat16)), master)


@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_only_ties_that_were_rounded_down_are_kept_one_by_one(low: int):
    """Every upper half that is a number, with the lower halves around the places where rounding changes."""
    numbers = [high for high in range(1 << 16) if high & 0x7F80 != 0x7F80]
    master = of_bits([high << 16 | low for high in numbers])
    weights = master.to(torch.bfloat16)
    assert same_values(again(master, weights), master)
    _, positions, _ = split_low(master, weights)
    down = [index for index, high in enumerate(numbers) if low == 0x8000 and high % 2 == 0]
    assert positions.tolist() == down
