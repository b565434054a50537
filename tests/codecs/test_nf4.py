"""NF4 as the paper on QLoRA has it."""

import pytest
import torch

from contracts.device_contract import CodecContract, encode, normal
from outsize.codecs.codec import Codec, open_codec
from outsize.codecs.codec_spec import NF4_LEVELS, codec_spec
from outsize.codecs.frozen import NF4Codec

NAMES = ["nf4", "nf4-double"]


class TestNF4(CodecContract):
    def make(self) -> Codec:
        return open_codec("nf4")


class TestNF4Double(CodecContract):
    def make(self) -> Codec:
        return open_codec("nf4-double")


def decoded(name: str, source: torch.Tensor) -> torch.Tensor:
    codec = open_codec(name)
    into = torch.empty_like(source)
    codec.decode(encode(codec, source), into)
    return into


def test_bits_per_weight():
    """4.5, and with double quantisation 4.127: section 3 of the paper."""
    assert codec_spec("nf4").max_bytes(2**20, "bf16") * 8 / 2**20 == 4.5
    assert codec_spec("nf4-double").max_bytes(2**20, "bf16") * 8 / 2**20 == pytest.approx(4.129, abs=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_levels_come_back_as_they_are(name: str):
    source = torch.tensor(NF4_LEVELS).repeat(4) * 3.0
    assert torch.equal(decoded(name, source), source)


def test_each_weight_becomes_the_nearest_level():
    source = normal(64 * 40, torch.float32).view(40, 64)
    levels = torch.tensor(NF4_LEVELS)
    largest = source.abs().amax(1, keepdim=True)
    nearest = (source[..., None] / largest[..., None] - levels).abs().argmin(-1)
    assert torch.equal(decoded("nf4", source), levels[nearest] * largest)


@pytest.mark.parametrize(("name", "most"), [("nf4", 0.095), ("nf4-double", 0.096)])
def test_error_on_normal_weights(name: str, most: float):
    """Half a level is 9 % of the weights' own size; double quantisation adds next to nothing."""
    source = normal(2**18, torch.float32)
    error = (decoded(name, source) - source).square().mean().sqrt() / source.square().mean().sqrt()
    assert 0.08 < float(error) < most


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_what_is_not_finite(name: str):
    source = torch.zeros(64 * 600)
    assert not decoded(name, source).any()
    source[64 * 300] = torch.inf
    found = decoded(name, source).view(600, 64)
    assert found[300].isnan().all()
    assert not found[:256].any()


@pytest.mark.parametrize("name", NAMES)
def test_blocks_do_not_depend_on_pieces(name: str, monkeypatch: pytest.MonkeyPatch):
    source = normal(64 * 1000 + 7, torch.bfloat16)
    whole = decoded(name, source)
    monkeypatch.setattr("outsize.codecs.frozen._PIECE_BLOCKS", 3)
    assert torch.equal(decoded(name, source), whole)


def test_a_codec_keeps_nothing_between_calls():
    codec = NF4Codec(codec_spec("nf4"))
    one, other = normal(640, torch.float32), normal(640, torch.float32, seed=1)
    first = encode(codec, one)
    encode(codec, other)
    assert torch.equal(encode(codec, one), first)
