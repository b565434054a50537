import numpy as np
import pytest
import torch

from outsize.optim.optimizer_spec import BLOCK_ELEMENTS
from outsize.optim.planes import chance_key
from outsize.optim.split_masters import (
    EXP_AVG_FORM,
    EXP_AVG_SQ_FORM,
    chances,
    from_codes,
    halves,
    to_bf16,
    to_codes,
)


def coded(values: torch.Tensor, form, chance: int | torch.Tensor = 0) -> torch.Tensor:
    """Return values after a trip through codes of 8 bits, with the same chance for all or one for each."""
    codes = torch.empty(values.numel(), dtype=torch.uint8)
    tops = torch.empty(-(-values.numel() // BLOCK_ELEMENTS), dtype=torch.uint8)
    spread = (
        chance
        if isinstance(chance, torch.Tensor)
        else torch.full((values.numel(),), chance, dtype=torch.int32)
    )
    to_codes(values, spread, form, codes, tops)
    return from_codes(codes, tops, form)


def test_chances_depend_on_place_and_key_and_nothing_else():
    whole = chances(0, 77, 4096)
    assert torch.equal(whole[1024:], chances(1024, 77, 3072))
    assert not torch.equal(whole, chances(0, 78, 4096))
    assert len({chance_key(*which) for which in ((0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 2))}) == 4


@pytest.mark.parametrize("which", [0, 1])
def test_chances_are_even(which):
    part = halves(chances(0, 5, 1 << 16))[which].double()
    assert abs(part.mean().item() / 32767.5 - 1) < 0.01
    counts = torch.histc(part, 16, 0, 65536)
    assert (counts / 4096 - 1).abs().max() < 0.1


@pytest.mark.parametrize("form", [EXP_AVG_FORM, EXP_AVG_SQ_FORM])
def test_what_the_codes_hold_comes_back_whatever_the_chance(form):
    """Every code of a block whose largest has exponent 0."""
    mantissa, sign = form
    octaves = (128 if sign else 256) >> mantissa
    numbers = [
        (1 + part / 2**mantissa) * 2.0 ** (octave - octaves + 1)
        for octave in range(octaves)
        for part in range(2**mantissa)
    ]
    numbers[0] = 0.0  # the least code is zero
    for start in range(0, len(numbers), 32):
        block = torch.tensor(numbers[start : start + 32] + [numbers[-1]] * 32)
        block[33:48] *= -1 if sign else 1
        for chance in (0, 0xFFFF):
            assert torch.equal(coded(block, form, chance), block)


@pytest.mark.parametrize("form", [EXP_AVG_FORM, EXP_AVG_SQ_FORM])
def test_codes_are_off_by_less_than_a_step(form):
    values = torch.randn(1 << 14).exp_()  # within a few octaves
    if form[1]:
        values[::2] *= -1
    for chance in (0, 0x8000, 0xFFFF):
        error = (coded(values, form, chance) - values).abs() / values.abs()
        assert error.max() < 2.0 ** -form[0]


@pytest.mark.parametrize("form", [EXP_AVG_FORM, EXP_AVG_SQ_FORM])
def test_the_mean_of_all_chances_is_the_number(form):
    value = torch.tensor([0.3, 1.0])  # the second sets the exponent of the block
    every = torch.arange(1 << 16, dtype=torch.int32)
    total = sum(coded(value, form, torch.stack([chance, chance]))[0].double() for chance in every[:: 1 << 8])
    assert abs(total / 256 - 0.3) < 0.3 * 2.0**-9


def test_a_small_first_moment_is_lost_by_chance_alone():
    """Below the least code it becomes that or zero, with the right mean."""
    least = (1 + 1 / 8) * 2.0**-15
    values = torch.full((BLOCK_ELEMENTS,), 0.25 * least)
    values[0] = 1.0
    total = torch.zeros(())
    for chance in range(0, 1 << 16, 1 << 8):
        total += coded(values, EXP_AVG_FORM, chance)[1]
    assert total.item() / 256 == pytest.approx(0.25 * least)


def test_a_second_moment_that_is_not_zero_stays_so():
    values = torch.full((BLOCK_ELEMENTS,), 1e-30)
    values[0], values[1] = 1.0, 0.0
    for chance in (0, 0xFFFF):
        back = coded(values, EXP_AVG_SQ_FORM, chance)
        assert (back[2:] == (1 + 1 / 8) * 2.0**-31).all()
        assert back[1] == 0.0


@pytest.mark.parametrize("form", [EXP_AVG_FORM, EXP_AVG_SQ_FORM])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(form, bad):
    values = torch.ones(2 * BLOCK_ELEMENTS)
    values[3] = bad
    back = coded(values, form, 0xFFFF)
    assert not back[3].isfinite()
    assert torch.equal(back[BLOCK_ELEMENTS:], values[BLOCK_ELEMENTS:])


@pytest.mark.parametrize("form", [EXP_AVG_FORM, EXP_AVG_SQ_FORM])
def test_blocks_of_nothing_and_of_next_to_nothing(form):
    assert not coded(torch.zeros(70), form, 0xFFFF).any()
    tiny = torch.full((70,), 2.0**-140)
    assert (coded(tiny, form, 0x8000) <= 2.0**-125).all()


def test_bf16_goes_up_or_down_by_chance():
    values = torch.tensor([1.0, 1.0 + 2**-9, -1.0 - 2**-9, torch.inf])
    low, high = (
        to_bf16(values, torch.full((4,), chance, dtype=torch.int32)).float() for chance in (0, 0xFFFF)
    )
    assert low.tolist() == [1.0, 1.0, -1.0, torch.inf]
    assert high.tolist() == [1.0, 1.0 + 2**-7, -1.0 - 2**-7, torch.inf]
    quarter = [
        to_bf16(values[1:2], torch.tensor([chance], dtype=torch.int32)).item() > 1
        for chance in range(0, 1 << 16, 256)
    ]
    assert sum(quarter) == 64
    nans = torch.from_numpy(np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32).copy())
    assert to_bf16(nans, torch.full((3,), 0xFFFF, dtype=torch.int32)).isnan().all()
