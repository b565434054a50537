"""Codecs on a GPU: what a host encodes is decoded there, and runs over an encoded link are equal.

To try the tests themselves where there is no GPU: ``OUTSIZE_TEST_DEVICE=emulated:1 pytest tests/gpu``.
"""

from pathlib import Path

import pytest
import torch

from contracts import CodecContract, same_values
from contracts.device_contract import TORCH_DTYPE, encode, normal
from devices import DEVICE, TORCH_DEVICE, needs_accelerator
from outsize.codecs.codec import open_codec
from outsize.codecs.codec_spec import BLOCKWISE
from outsize.training.short_runs import verify
from support import make_run

pytestmark = [
    pytest.mark.cuda,
    needs_accelerator,
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", ["lossless4", "lossless3"])
def test_what_a_host_encodes_is_decoded_bit_for_bit(name: str, dtype: str):
    codec = open_codec(name)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for source in (normal(100_003, TORCH_DTYPE[dtype]), every.view(TORCH_DTYPE[dtype])):
        decoded = torch.empty_like(source, device=TORCH_DEVICE)
        codec.decode(encode(codec, source).to(TORCH_DEVICE), decoded)
        assert same_values(decoded.cpu(), source)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", ["nf4", "nf4-double", "fp8"])
def test_frozen_weights_decode_there_as_on_the_host(name: str, dtype: str):
    codec, source = open_codec(name), normal(100_003, TORCH_DTYPE[dtype])
    encoded, on_host = encode(codec, source), torch.empty_like(source)
    there = torch.empty_like(source, device=TORCH_DEVICE)
    codec.decode(encoded, on_host)
    codec.decode(encoded.to(TORCH_DEVICE), there)
    assert same_values(there.cpu(), on_host)


@pytest.mark.parametrize("name", [spec.name for spec in BLOCKWISE])
def test_quantised_ones_encode_and_decode_there(name: str):
    codec = open_codec(name)
    source = normal(100_003, torch.bfloat16)
    there = source.to(TORCH_DEVICE)
    room = torch.empty(codec.spec.max_bytes(source.numel(), "bf16"), dtype=torch.uint8, device=TORCH_DEVICE)
    size = codec.encode(there, room)
    decoded = torch.empty_like(there)
    codec.decode(room[:size], decoded)
    CodecContract().check_decoded(codec, source, decoded.cpu())
    on_host = torch.empty_like(source)  # as gradients are
    codec.decode(room[:size].cpu(), on_host)
    assert torch.allclose(on_host.float(), decoded.cpu().float(), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("codec", ["lossless4", "lossless3"])
def test_training_over_an_encoded_link_is_equal(codec: str, tmp_path: Path):
    config = make_run(
        tmp_path,
        model={"dtype": "bf16"},
        memory={"device": DEVICE, "home": "host"},
        train={"steps": 3},
        transport={"weights": codec},
    )
    result = verify(config)
    assert result.loss_streamed == result.loss_resident
    assert result.differing == []
