import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.codecs.blockwise import rotate, rotate_back, signs
from outsize.codecs.codec import open_codec
from outsize.codecs.codec_spec import ROTATED, codec_spec
from outsize.testing import CodecContract
from outsize.testing.device_contract import TORCH_DTYPE, encode, normal


class TestInt8Hadamard(CodecContract):
    def make(self):
        return open_codec("int8-hadamard")


class TestInt8HadamardStochastic(CodecContract):
    def make(self):
        return open_codec("int8-hadamard-stochastic")


class TestInt4Hadamard(CodecContract):
    def make(self):
        return open_codec("int4-hadamard")


class TestInt4HadamardStochastic(CodecContract):
    def make(self):
        return open_codec("int4-hadamard-stochastic")


def through(codec, source):
    decoded = torch.empty_like(source)
    codec.decode(encode(codec, source), decoded)
    return decoded


@pytest.mark.parametrize("group", [2, 4, 64, 128])
def test_it_is_the_matrix_of_hadamard_with_signs(group):
    matrix = torch.ones(1, 1)
    while len(matrix) < group:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    x = torch.randint(-8, 9, (5, group)).float()
    want = (x * signs(group, x.device)) @ matrix.T / group
    assert torch.equal(rotate(x, torch.empty_like(x)), want)
    assert torch.equal(rotate_back(want), x)


@pytest.mark.parametrize("group", [0, 1, 48, 256])
def test_other_groups_are_refused(group):
    with pytest.raises(ValueError, match=f"no rotation of {group} elements"):
        signs(group, torch.device("cpu"))


@settings(max_examples=80)
@given(
    st.sampled_from([2, 16, 64, 128]),
    st.integers(0, 2**32 - 1),
    st.floats(-1e38, 1e38),
    st.floats(1e-45, 1e38),
)
def test_there_and_back_is_exact_but_for_fp32(group, seed, centre, spread):
    x = torch.rand(7, group, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    x = (x * spread + centre).clamp(-1.5e38, 1.5e38)
    back = rotate_back(rotate(x, torch.empty_like(x)))
    rounds = group.bit_length() - 1
    bound = 2 * group * rounds * 2**-24 * x.abs().amax(1, keepdim=True).double() + group * 2.0**-149
    assert ((back.double() - x.double()).abs() <= bound).all()


@settings(max_examples=80)
@given(
    st.sampled_from([spec.name for spec in ROTATED]),
    st.sampled_from(["fp32", "bf16", "fp16"]),
    st.integers(1, 400),
    st.integers(0, 2**32 - 1),
    st.floats(-1e38, 1e38),
    st.floats(1e-45, 1e38),
    st.integers(0, 8),
)
def test_the_bounds_hold_for_whatever_is_finite(name, dtype, numel, seed, centre, spread, odd_ones):
    """Of each element; and of a group as a whole, of which rotation keeps the 2-norm, the same as without."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.rand(numel, generator=generator) * 2 - 1
    source[torch.randint(0, numel, (odd_ones,), generator=generator)] *= 1e-3  # or all the others stand out
    source = (source * spread + centre).clamp(-1.5e38, 1.5e38).to(TORCH_DTYPE[dtype])
    codec = open_codec(name)
    decoded = through(codec, source)
    CodecContract().check_decoded(codec, source, decoded)
    group, plain = codec.spec.group, codec_spec(name.replace("-hadamard", ""))
    for one, other in zip(source.double().split(group), decoded.double().split(group), strict=True):
        if not one.isfinite().all():
            continue
        rounding = torch.finfo(source.dtype).eps * (one.norm() + other.norm())
        least = group * torch.finfo(source.dtype).tiny
        # A group that is filled up counts its last element more often.
        whole = torch.cat([one, one[-1:].expand(group - len(one))])
        assert (other - one).norm() <= group**0.5 * plain.error * whole.norm() * 1.001 + rounding + least


@pytest.mark.parametrize(("name", "plain"), [("int4-hadamard", "int4"), ("int8-hadamard", "int8")])
def test_it_helps_where_few_elements_stand_out_and_not_elsewhere(name, plain):
    """One element in a hundred is 50 times as large as the others; of all alike nothing is gained."""
    source = normal(64_000, torch.float32)
    error = {each: (through(open_codec(each), source) - source).norm() for each in (name, plain)}
    assert error[name] < 1.3 * error[plain]
    odd = torch.rand(64_000, generator=torch.Generator().manual_seed(2)) < 0.01
    source[odd] *= 50
    error = {each: (through(open_codec(each), source) - source).norm() for each in (name, plain)}
    assert error[name] < 0.75 * error[plain]


@pytest.mark.parametrize("name", [spec.name for spec in ROTATED])
def test_a_group_of_equal_elements_does_not_become_one_large_one(name):
    source = torch.full((640,), 3.0) + normal(640, torch.float32)
    rotated = rotate(source.view(-1, 64), torch.empty(10, 64)).abs()
    assert (rotated.amax(1) < 1.5).all()
