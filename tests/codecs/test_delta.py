import pytest
import torch

from contracts import CodecContract, same_bits
from contracts.device_contract import encode, normal
from outsize.codecs.codec import open_codec
from outsize.codecs.delta import apply_difference, difference
from outsize.errors import CodecError


class TestDelta(CodecContract):
    def make(self):
        return open_codec("delta")


def stepped(rate, numel=2**16):
    """Normal weights before and after ten steps of AdamW beside one more, in bf16."""
    master = torch.nn.Parameter(normal(numel, torch.float32))
    optimizer = torch.optim.AdamW([master], lr=rate)
    generator = torch.Generator().manual_seed(3)
    for _ in range(11):
        old = master.detach().bfloat16()
        master.grad = torch.randn(numel, generator=generator)
        optimizer.step()
    return old, master.detach().bfloat16()


@pytest.mark.parametrize("rate", [1e-5, 2e-5])
def test_a_step_at_a_fine_tuning_rate_shrinks_eightfold(rate):
    old, new = stepped(rate)
    codec = open_codec("delta")
    encoded = encode(codec, difference(new, old))
    assert new.nbytes / encoded.numel() >= 8
    changed = torch.empty_like(new)
    codec.decode(encoded, changed)
    apply_difference(changed, old)
    assert same_bits(old, new)


def test_nothing_changed_takes_next_to_nothing():
    old = normal(2**16, torch.bfloat16)
    assert encode(open_codec("delta"), difference(old, old)).numel() < 64


def test_damage_is_refused():
    codec = open_codec("delta")
    source = torch.zeros(5000, dtype=torch.bfloat16)
    source[::7] = 1.0
    encoded = encode(codec, source)
    too_many, cut, longer = encoded.clone(), encoded[:-1].clone(), torch.cat([encoded, encoded[:2]])
    too_many[3] = 255
    for damaged in (too_many, cut, longer):
        with pytest.raises(CodecError):
            codec.decode(damaged, torch.empty_like(source))
