import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from optim.test_step import in_24_bits, torch_ops
from outsize.compat.torch_private import allocations
from outsize.optim import split_masters
from outsize.optim.planes import chance_key
from outsize.optim.split_masters import join_master, split_master, ties_bytes
from outsize.planner.memory.memory_table import UPDATE_TEMPORARY_BYTES
from threads import num_threads

EVERY_UPPER_HALF = np.arange(1 << 16, dtype=np.uint32) << 16
# Where rounding changes, and a few between.
LOWER_HALVES = (0x0000, 0x0001, 0x1234, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xABCD, 0xFFFE, 0xFFFF)


def of_bits(bits) -> Tensor:
    return torch.from_numpy(np.asarray(bits, np.uint32).view(np.float32).copy())


def same_values(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def split(master: Tensor, *, ties: bool = True, noise: int = 0):
    planes = [torch.empty(master.numel(), dtype=kind) for kind in (torch.bfloat16, torch.int16)]
    bits = torch.full((ties_bytes(master.numel()),), noise, dtype=torch.uint8) if ties else None
    split_master(master, *planes, bits)
    return *planes, bits


def joined(hi: Tensor, lo: Tensor, ties: Tensor | None) -> Tensor:
    master = torch.empty(hi.numel())
    join_master(hi, lo, ties, master)
    return master


@pytest.mark.parametrize("low", LOWER_HALVES)
def test_every_upper_half_comes_back_bit_for_bit(low, use_native):
    """NaN, infinity, subnormals and -0 among them; whatever the plane of ties held before."""
    master = of_bits(EVERY_UPPER_HALF | low)
    for noise in (0x00, 0xFF):
        assert same_values(joined(*split(master, noise=noise)), master)


def test_a_comb_through_all_numbers_comes_back(use_native):
    """4 million of the 2^32 patterns, evenly spread with a stride that no power of two divides."""
    master = of_bits((np.arange(1 << 22, dtype=np.uint64) * 1021 % 2**32).astype(np.uint32))
    assert same_values(joined(*split(master)), master)


@pytest.mark.parametrize("low", LOWER_HALVES)
def test_the_weight_is_what_torch_rounds_to(low, use_native):
    master = of_bits(EVERY_UPPER_HALF | low)
    hi, *_ = split(master)
    expected = master.to(torch.bfloat16)
    assert torch.equal(hi.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(hi.view(torch.int16)[number], expected.view(torch.int16)[number])


def test_ties_are_told_apart_by_their_bit_alone(use_native):
    down, up = of_bits([0x3F808000]), of_bits([0x3F7F8000])
    assert [part.item() for part in split(down)] == [1.0, -32768, 1]
    assert [part.item() for part in split(up)] == [1.0, -32768, 0]
    odd = of_bits([0x3F818000])  # to an odd weight nothing ties
    assert [part.item() for part in split(odd, noise=0xFF)] == [1.015625, -32768, 0xFE]


def test_where_nothing_ties_the_bits_are_left_alone(use_native):
    master = torch.randn(10_000).view(torch.int32).bitwise_and_(~0x8000).view(torch.float32)
    *_, ties = split(master, noise=0xA5)
    assert (ties == 0xA5).all()


@pytest.mark.parametrize("low", LOWER_HALVES)
def test_without_ties_one_number_of_131072_loses_one_unit_in_the_last_place(low, use_native):
    numbers = EVERY_UPPER_HALF[(EVERY_UPPER_HALF & 0x7F800000) != 0x7F800000] | low
    hi, lo, _ = split(of_bits(numbers), ties=False)
    lost = numbers.astype(np.int64) - joined(hi, lo, None).numpy().view(np.uint32)
    tied = (numbers & 0xFFFF == 0x8000) & (numbers >> 16 & 1 == 0)
    assert (lost == tied).all()


def split24(master: Tensor, first: int = 0, key: int | None = None):
    planes = [torch.empty(master.numel(), dtype=kind) for kind in (torch.bfloat16, torch.int8)]
    split_master(master, *planes, None, first, key)
    return *planes, None


NUMBERS = EVERY_UPPER_HALF[(EVERY_UPPER_HALF & 0x7F800000) != 0x7F800000]


@pytest.mark.parametrize("key", [None, 7, 2**32 - 5])
@pytest.mark.parametrize("low", [*LOWER_HALVES, 0x7F00, 0x8100])
def test_of_24_bits_none_is_lost_and_the_rest_goes_by_chance(low, key, use_native):
    numbers = NUMBERS | low
    hi, lo, _ = split24(of_bits(numbers), 4096, key)
    kept = in_24_bits(numbers, 4096, key)
    assert same_values(joined(hi, lo, None), of_bits(kept))
    rounded, nearest = hi.double(), of_bits(kept).bfloat16().double()
    finite = rounded.isfinite() & nearest.isfinite()
    far, least = ((each - of_bits(kept))[finite].abs() for each in (rounded, nearest))
    assert torch.equal(far, least)  # the weight is as near as torch's own, ties aside the same


def test_of_24_bits_pieces_are_as_the_whole(use_native):
    master = torch.randn(5000)
    whole = split24(master, 64, 3)
    parts = [split24(master[at : at + 1024], 64 + at, 3) for at in range(0, 5000, 1024)]
    for plane, pieces in zip(whole[:2], list(zip(*parts, strict=True))[:2], strict=True):
        assert torch.equal(plane, torch.cat(pieces))


def test_of_24_bits_infinities_stay_and_nans_are_nans(use_native):
    master = of_bits([0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7FC12345, 0x80000000])
    back = joined(*split24(master, 0, 1))
    assert torch.equal(back.isnan(), master.isnan())
    assert same_values(back[[0, 1, 5]], master[[0, 1, 5]])


def test_the_mean_of_many_roundings_to_24_bits_is_the_number(use_native):
    """Moved by an eighth of a step four hundred times, ten thousand masters have moved by fifty."""
    master, step = torch.ones(10_000), 2.0**-15
    planes = split24(master)
    for number in range(400):
        split_master(joined(*planes) + step / 8, *planes, 0, chance_key(0, 0, number))
    assert ((joined(*planes) - 1).double().mean() / step).item() == pytest.approx(50, rel=0.005)


@given(
    st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([0x3F808000, 0x7FFFFFFF, 0x7F800001]), max_size=70)
)
def test_all_forms_write_the_same_planes(bits):
    master = of_bits(bits)
    for ties in (True, False):
        forms = [split(master, ties=ties, noise=0x5A)]
    with torch_ops():
        forms.append(split(master, ties=ties, noise=0x5A))
        for one, other in zip(*forms, strict=True):
            assert one is other is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_several_threads_write_what_one_writes():
    master = of_bits(np.arange(3 << 17, dtype=np.uint32) << 15)  # every other one is a tie
    forms = []
    for count in (1, 3):
        with num_threads(count):
            forms.append(split(master))
    for one, other in zip(*forms, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lo": torch.zeros(9, dtype=torch.int16)}, r"lo: need contiguous torch.int16 \[10\]"),
        ({"lo": torch.zeros(10, dtype=torch.int8)}, r"lo: need contiguous torch.int16 \[10\]"),
        ({"hi": torch.zeros(10)}, r"hi: need contiguous torch.bfloat16"),
        ({"ties": torch.zeros(1, dtype=torch.uint8)}, r"ties: need contiguous torch.uint8 \[2\]"),
        ({"master": torch.zeros(20)[::2]}, "master: need contiguous"),
    ],
)
def test_planes_that_do_not_fit_are_refused(change, message):
    planes = {
        "master": torch.zeros(10),
        "hi": torch.zeros(10, dtype=torch.bfloat16),
        "lo": torch.zeros(10, dtype=torch.int16),
        "ties": torch.zeros(2, dtype=torch.uint8),
    } | change
    with pytest.raises(ValueError, match=message):
        split_master(**planes)


def test_torch_s_ops_make_no_more_than_the_planner_counts(monkeypatch):
    """Beside the gradient and the master, of which the table tells."""
    monkeypatch.setattr(split_masters.native, "available", lambda: False)
    planes = [torch.empty(2**16, dtype=kind) for kind in (torch.bfloat16, torch.int16)]
    master, ties = torch.randn(2**16), torch.zeros(2**13, dtype=torch.uint8)
    for call in (lambda: split_master(master, *planes, ties), lambda: join_master(*planes, ties, master)):
        _, sizes = allocations(call)
        assert max(itertools.accumulate(sizes)) <= (UPDATE_TEMPORARY_BYTES - 8) * master.numel()
