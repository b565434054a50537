"""Marks of the package and streams of torch: those of the vendor's module, which know each other."""

import pytest
import torch

from accelerator import late
from devices import IS_MADE_UP
from outsize.accelerators import Devices, catch_up
from outsize.runtime.device.device import open_device

pytestmark = pytest.mark.skipif(not IS_MADE_UP, reason="run with --accelerator=late")


@pytest.mark.parametrize("index", [0, 1])
def test_what_rejoins_waits_for_what_was_beside(index: int):
    """As a decode beside the copies does, and what comes up into memory that computes before."""
    name = f"late:{index}"
    device = open_device(Devices.parse(name))
    target, source = torch.zeros(256, device=name), torch.ones(256, device=name)
    catch_up(name)
    decoding = device._streams.of("decode")  # type: ignore[attr-defined]
    with device.behind("up"):
        arrived = device.here()
        with late.held_up(decoding):
            decoded = device.beside(arrived, lambda: target.copy_(source))
            assert not decoded.query()
            device.rejoin(decoded)
            seen = target.clone()
        device.hold(seen, "up")
        catch_up(name)
    assert seen.cpu().eq(1).all()
    device.close()


def test_an_event_of_a_vendor_is_none_for_a_stream_of_torch():
    """As on CUDA: `torch.Stream.wait_event` returns at once, waits for nothing and says nothing."""
    event, plain = torch.late.Event(), torch.accelerator.current_stream("late:0")
    assert not isinstance(plain, torch.late.Stream)
    with pytest.raises(TypeError, match="another class"):
        event.record(plain)
    event.record(torch.late.current_stream("late:0"))
    plain.wait_event(event)
    torch.late.current_stream("late:0").wait_event(event)
    event.synchronize()
