import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import CodecContract
from contracts.device_contract import TORCH_DTYPE, encode, normal
from outsize.codecs.codec import open_codec
from outsize.codecs.codec_spec import BLOCKWISE

NAMES = [spec.name for spec in BLOCKWISE]


def through(codec, source):
    decoded = torch.full_like(source, 7.0)
    codec.decode(encode(codec, source), decoded)
    return decoded


class TestInt8(CodecContract):
    def make(self):
        return open_codec("int8")


class TestInt8Asymmetric(CodecContract):
    def make(self):
        return open_codec("int8-asymmetric")


class TestInt8Stochastic(CodecContract):
    def make(self):
        return open_codec("int8-stochastic")


class TestInt4(CodecContract):
    def make(self):
        return open_codec("int4")


class TestInt4Asymmetric(CodecContract):
    def make(self):
        return open_codec("int4-asymmetric")


class TestInt4Stochastic(CodecContract):
    def make(self):
        return open_codec("int4-stochastic")


@settings(max_examples=80)
@given(
    st.sampled_from(NAMES),
    st.sampled_from(["fp32", "bf16", "fp16"]),
    st.integers(1, 400),
    st.integers(0, 2**32 - 1),
    st.floats(-1e38, 1e38),
    st.floats(1e-45, 1e38),
)
def test_the_bound_holds_for_whatever_is_finite(name, dtype, numel, seed, centre, spread):
    generator = torch.Generator().manual_seed(seed)
    source = torch.rand(numel, generator=generator) * 2 - 1
    source = (source * spread + centre).clamp(-1.5e38, 1.5e38).to(TORCH_DTYPE[dtype])
    codec = open_codec(name)
    CodecContract().check_decoded(codec, source, through(codec, source))


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_constants_and_the_very_small(name):
    codec = open_codec(name)
    assert not through(codec, torch.zeros(300)).any()
    for constant in (1.0, -3.7e-3, 1e30, 1e-30):
        decoded = through(codec, torch.full((300,), constant))
        assert decoded.sub(constant).abs().max() <= codec.spec.error * abs(constant)
    assert through(codec, torch.full((300,), 1e-44)).abs().max() < 2.0**-125


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_makes_its_group_nan_and_no_other(name, what):
    codec = open_codec(name)
    source = normal(5 * codec.spec.group, torch.bfloat16)
    source[2 * codec.spec.group + 5] = what
    groups = through(codec, source).view(5, -1)
    assert groups[2].isnan().all()
    assert groups[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("name", ["int8-stochastic", "int4-stochastic"])
def test_chances_are_fair_and_follow_the_seed(name):
    """The mean of many roundings comes near the source, as that of one rounding to the nearest does not."""
    codec = open_codec(name)
    source = normal(4096, torch.float32)
    decoded = torch.stack([through(codec.seeded(seed), source) for seed in range(100)])
    step = source.view(-1, codec.spec.group).abs().amax(1) * codec.spec.error
    off = (decoded.mean(0) - source).view(-1, codec.spec.group).abs() / step[:, None]
    assert (
        off.mean() < 0.06
    )  # a step's deviation of 0.5 at most, by 10, by what the mean of a magnitude takes
    assert off.max() < 0.25
    assert torch.equal(through(codec.seeded(5), source), decoded[5])
    assert not torch.equal(decoded[4], decoded[5])


def test_an_asymmetric_grid_serves_what_is_all_positive_better():
    source = normal(6400, torch.float32).abs() + 0.05
    errors = {
        name: (through(open_codec(name), source) - source).norm() for name in ("int4", "int4-asymmetric")
    }
    assert errors["int4-asymmetric"] < errors["int4"] / 2


@pytest.mark.parametrize(("name", "times"), [("int4", 3.76), ("int8", 1.96)])
def test_ratios_count_the_scales(name, times):
    """Against bf16; against fp32 twice as much."""
    spec = open_codec(name).spec
    assert 2**21 / spec.expected_bytes(2**20, "bf16") == pytest.approx(times, abs=0.02)
    assert 2**22 / spec.expected_bytes(2**20, "fp32") == pytest.approx(2 * times, abs=0.04)
