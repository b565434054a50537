import pytest
import torch

from outsize.codecs.byte_planes import exponent_bound
from outsize.codecs.codec_spec import ENTROPY
from outsize.codecs.open import open_codec
from outsize.errors import CodecError
from outsize.testing import CodecContract
from outsize.testing.codec_contract import encode, normal


class TestEntropy(CodecContract):
    def make(self):
        return open_codec("entropy")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_comes_within_a_hundredth_of_the_bound(dtype):
    source = normal(2**19, dtype)
    ratio = encode(open_codec("entropy"), source).numel() / source.nbytes
    assert exponent_bound(source) <= ratio <= 1.01 * exponent_bound(source)
    assert ratio <= ENTROPY.expected_ratio({torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype])


def test_the_bound_is_the_entropy_of_exponents_and_all_other_bits():
    """Four exponents, equally frequent, are two bits."""
    source = torch.tensor([1.0, 2.0, -4.5, 8.0]).repeat(10)
    assert exponent_bound(source.bfloat16()) == (1 + 7 + 2) / 16
    assert exponent_bound(source) == (1 + 23 + 2) / 32
    assert exponent_bound(source.half()) == (1 + 10 + 2) / 16


def test_damaged_frames_are_refused():
    codec = open_codec("entropy")
    source = normal(40_000, torch.bfloat16)
    encoded = encode(codec, source)
    for at, value in ((0, 255), (3, 255), (4, 0)):
        damaged = encoded.clone()
        damaged[at] = value
        with pytest.raises(CodecError, match="no entropy encoding of 40000 elements"):
            codec.decode(damaged, torch.empty_like(source))
    with pytest.raises(CodecError):
        codec.decode(encoded[:-1].clone(), torch.empty_like(source))
