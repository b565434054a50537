"""What a device keeps of memory that nobody uses, and what a run says where there is none left."""

import pytest
import torch

from accelerator import late
from devices import IS_MADE_UP
from outsize.accelerators import Devices
from outsize.errors import ExecutionError
from outsize.runtime.device.device import open_device
from outsize.storage.ledger import Ledger

pytestmark = pytest.mark.skipif(not IS_MADE_UP, reason="run with --accelerator=late")
MIB = 2**20


def test_memory_of_other_streams_goes_before_lanes_begin_and_after_they_end(monkeypatch: pytest.MonkeyPatch):
    """Pools are per stream: what was timed has left segments that no lane can use."""
    emptied: list[int] = []
    monkeypatch.setattr(torch.get_device_module("late"), "empty_cache", lambda: emptied.append(1))
    device = open_device(Devices.parse("late:0"))
    assert len(emptied) == 1
    device.close()
    assert len(emptied) == 2


def test_slots_that_find_no_memory_are_an_error_that_says_what_to_set():
    device = open_device(Devices.parse("late:0"), Ledger({"device": 64 * MIB}))
    late.set_limit(0, 16 * MIB)
    try:
        with pytest.raises(
            ExecutionError,
            match=r"weights: late:0 is out of memory: torch has reserved .* of a budget of 64.00 MiB; lower "
            r"memory.device_memory",
        ):
            device.allocate(32 * MIB, "weights")
    finally:
        device.close()
