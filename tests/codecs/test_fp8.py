"""FP8 as torch casts to it and from it, times the scales of groups."""

import pytest
import torch

from contracts.device_contract import CodecContract, encode, normal
from outsize.codecs.codec import Codec, open_codec
from outsize.codecs.codec_spec import codec_spec

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LARGEST, LEAST_NORMAL, LEAST = 448.0, 2.0**-6, 2.0**-9


class TestFP8(CodecContract):
    def make(self) -> Codec:
        return open_codec("fp8")


def decoded(source: torch.Tensor) -> torch.Tensor:
    codec = open_codec("fp8")
    into = torch.empty_like(source)
    codec.decode(encode(codec, source), into)
    return into


def test_half_the_bytes_of_bf16_and_a_scale():
    assert codec_spec("fp8").max_bytes(2**20, "bf16") * 8 / 2**20 == 8.125


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.75 * 2**-7])
def test_every_code_is_what_torch_casts_it_to(dtype: torch.dtype, scale: float):
    """Subnormal ones and zeros of either sign as well; 127 and 255 are NaN, and in no finite group."""
    codes = torch.tensor([*range(127), 0, *range(128, 255), 128], dtype=torch.uint8)
    scales = torch.full((2,), scale, dtype=torch.bfloat16)
    into = torch.empty(256, dtype=dtype)
    open_codec("fp8").decode(torch.cat([scales.view(torch.uint8), codes]), into)
    want = (codes.view(torch.float8_e4m3fn).float() * scale).to(dtype)
    assert torch.equal(into, want)
    assert torch.equal(into.signbit(), want.signbit())


def test_each_weight_becomes_the_nearest_float_by_its_scale():
    source = normal(128 * 40 + 5, torch.float32)
    for group, found in zip(source.split(128), decoded(source).split(128), strict=True):
        scale = (group.abs().max() / LARGEST).bfloat16().float()
        assert torch.equal(found, (group / scale).to(torch.float8_e4m3fn).float() * scale)


def test_a_small_weight_keeps_its_precision_beside_a_large_one():
    """2^-4 of itself, as far down as e4m3 is normal, and half a subnormal step below it."""
    source = torch.exp2(torch.linspace(-30, 0, 128)).repeat(20) * normal(20, torch.float32)[:, None].repeat(
        1, 128
    ).view(-1)
    scale = source.view(20, 128).abs().amax(1, keepdim=True) / LARGEST
    error = (decoded(source) - source).abs().view(20, 128)
    size = source.abs().view(20, 128)
    bound = torch.where(
        size >= LEAST_NORMAL * scale * (1 + 2**-8), size / 16, scale * LEAST / 2 * (1 + 2**-8)
    )
    assert (error <= bound * (1 + 2**-20)).all()
    int8 = open_codec("int8")
    int8.decode(encode(int8, source), into := torch.empty_like(source))
    assert not ((into - source).abs().view(20, 128) <= bound).all()


def test_error_on_normal_weights():
    source = normal(2**18, torch.float32)
    error = (decoded(source) - source).norm() / source.norm()
    assert 0.025 < float(error) < 0.027


def test_zeros_and_what_is_not_finite():
    source = torch.zeros(128 * 6)
    source[5] = -0.0
    assert torch.equal(decoded(source).signbit(), source.signbit())
    for bad in (torch.inf, -torch.inf, torch.nan):
        source[128 * 3 + 7] = bad
        found = decoded(source).view(6, 128)
        assert found[3].isnan().all()
        assert not found[[0, 1, 2, 4, 5]].any()


@pytest.mark.parametrize("largest", [3e38, 1e-30, 1e-40])
def test_whatever_is_finite_stays_so(largest: float):
    source = torch.linspace(-1, 1, 300) * largest
    assert torch.allclose(decoded(source), source, rtol=2**-4, atol=max(largest * 2**-18, 2**-136))


def test_groups_do_not_depend_on_pieces(monkeypatch: pytest.MonkeyPatch):
    source = normal(128 * 100 + 7, torch.bfloat16)
    encoded, whole = encode(open_codec("fp8"), source), decoded(source)
    monkeypatch.setattr("outsize.codecs.frozen.PIECE_ELEMENTS", 384)
    assert torch.equal(encode(open_codec("fp8"), source), encoded)
    assert torch.equal(decoded(source), whole)
