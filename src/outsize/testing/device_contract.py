"""What every device promises, see `outsize.runtime.device.device`."""

from collections.abc import Callable

import torch

from outsize.errors import BudgetExceededError
from outsize.runtime.device.device import Device
from outsize.storage.arena import Arena
from outsize.storage.ledger import Ledger
from outsize.testing.samples import pattern, raises, same_bits

MakeDevice = Callable[[Ledger | None], Device]


def check_device_memory_is_aligned_and_lies_on_it(make: MakeDevice) -> None:
    """Every allocation has the size asked for, on the device, aligned for DMA, apart from all others."""
    device = make(None)
    sizes = (1, 4096, 10_000)
    tensors = [device.allocate(size, "x") for size in sizes]
    for value, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        assert (tensor.dtype, tensor.shape) == (torch.uint8, (size,))
        assert tensor.device == device.torch_device
        assert tensor.data_ptr() % 512 == 0
        tensor.fill_(value)
    assert all((tensor == value).all() for value, tensor in enumerate(tensors))
    device.close()


def check_device_memory_is_reserved_until_closed(make: MakeDevice) -> None:
    """The ledger knows every byte; beyond the budget nothing is allocated; closing gives everything back, twice."""
    ledger = Ledger({"device": 3 * 4096})
    device = make(ledger)
    device.allocate(8192, "x")
    assert ledger.used("device") == 8192
    assert raises(BudgetExceededError, lambda: device.allocate(8192, "y"))
    assert ledger.used("device") == 8192
    device.allocate(4096, "z")
    device.close()
    assert ledger.used("device") == 0
    device.close()


def check_device_copies_both_ways(make: MakeDevice) -> None:
    """What goes up and comes down again is the same bits, by way of two lanes and their marks."""
    device = make(None)
    with Arena() as arena:
        for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.uint8)):
            source = pattern(4096, dtype, seed, arena)
            back = pattern(4096, dtype, 99, arena)
            slot = device.allocate(source.nbytes, "slot").view(dtype)
            with device.lane("up:w0"):
                device.copy(slot, source)
                mark = device.record("up:w0")
            with device.lane("down:w0"):
                if mark is not None:
                    device.wait("down:w0", mark)
                device.copy(back, slot)
                mark = device.record("down:w0")
            if mark is not None:
                device.wait("host", mark)
            assert same_bits(back, source), dtype
    device.close()


def check_device_orders_lanes_by_marks(make: MakeDevice) -> None:
    """A lane that waits for a mark sees all that was done before it, however often the memory is used again."""
    device = make(None)
    slot = device.allocate(4 * 2**16, "slot").view(torch.float32)
    sums = []
    mark = None
    for value in range(20):
        with device.lane("up:w0"):
            if mark is not None:
                device.wait("up:w0", mark)
            device.copy(slot, torch.full((2**16,), float(value)))
            mark = device.record("up:w0")
        with device.lane("compute:w0"):
            if mark is not None:
                device.wait("compute:w0", mark)
            sums.append(slot.sum())
            device.hold(sums[-1], "compute:w0")
            mark = device.record("compute:w0")
    if mark is not None:
        device.wait("host", mark)
    assert [total.item() for total in sums] == [value * 2**16 for value in range(20)]
    device.close()


DEVICE_CONTRACT: tuple[Callable[[MakeDevice], None], ...] = (
    check_device_memory_is_aligned_and_lies_on_it,
    check_device_memory_is_reserved_until_closed,
    check_device_copies_both_ways,
    check_device_orders_lanes_by_marks,
)
