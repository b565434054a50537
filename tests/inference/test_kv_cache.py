"""Keys and values that rest on the host: what each layer shows is what it would show without."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from outsize.inference.kv_cache import HostedCache, hosted_bytes
from outsize.runtime.device.device import EmulatedDevice
from outsize.storage.ledger import Arena, Ledger


class _Unit(nn.Module):
    layer_idx = 0


class _Counting(Arena):
    """Counts what is taken."""

    num_taken = 0

    def take(self, *given: Any, **named: Any) -> Tensor:
        self.num_taken += 1
        return super().take(*given, **named)


def grown(layer: Any, hosted: HostedCache, cache: Cache, chunk: int, length: int = 0) -> tuple[Tensor, ...]:
    keys = torch.randn(2, 3, chunk, 4)
    with hosted.up(cache, 0, length):
        layer.update(keys, -keys)
    return keys, -keys


def test_a_window_that_slides_by_several_tokens_rests_as_it_is():
    """It is longer than before, and does not begin as before."""
    layer, plain = DynamicSlidingWindowLayer(sliding_window=8), DynamicSlidingWindowLayer(sliding_window=8)
    cache, arena = Cache(layers=[layer]), _Counting()
    hosted = HostedCache(EmulatedDevice("emulated:1"), [_Unit()], arena)
    for chunk in (5, 5, 1, 3, 1, 1):
        plain.update(*grown(layer, hosted, cache, chunk, length=20))
        assert torch.equal(layer.keys, plain.keys), chunk
        assert torch.equal(layer.values, plain.values), chunk
    assert arena.num_taken == 2


def test_beams_rest_where_they_rested_unless_somebody_has_that_still():
    layer, plain = DynamicLayer(), DynamicLayer()
    cache, arena = Cache(layers=[layer]), _Counting()
    hosted = HostedCache(EmulatedDevice("emulated:1"), [_Unit()], arena)
    order = torch.tensor([1, 1])
    for _ in range(4):
        plain.update(*grown(layer, hosted, cache, 2, length=10))
        for each in (layer, plain):
            each.reorder_cache(order)
    assert arena.num_taken == 2
    grown(layer, hosted, cache, 1)
    shown, copy = layer.keys, layer.keys.clone()
    layer.reorder_cache(order.flip(0) * 0)
    grown(layer, hosted, cache, 1)
    assert torch.equal(shown, copy)
    assert torch.equal(layer.keys[:, :, :9], copy[:1].expand(2, -1, -1, -1))
    assert arena.num_taken == 3  # the keys, which somebody has


def test_a_cache_on_the_host_takes_what_was_said_and_no_more():
    layer = DynamicLayer()
    cache, ledger = Cache(layers=[layer]), Ledger({"host": 2**20})
    hosted = HostedCache(EmulatedDevice("emulated:1"), [_Unit()], Arena(ledger=ledger))
    grown(layer, hosted, cache, 7, length=900)
    said = hosted_bytes(cache, 2, 900, reorders=False)
    for _ in range(893):
        grown(layer, hosted, cache, 1, length=900)
    assert layer.keys.shape[-2] == 900
    most = ledger.statistics()["host"].high_water_bytes
    assert 2 * layer.keys.nbytes <= most <= said
