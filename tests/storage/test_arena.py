import gc
import logging
import weakref
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outsize.accelerators import VENDORS, Devices
from outsize.errors import BudgetExceededError, StorageError
from outsize.runtime.device.driver import DriverPinner, pinner_of
from outsize.storage.ledger import MOST_REFUSALS, Arena, Ledger


class FakePinner:
    """Pins up to a number of bytes, like a driver under a limit of locked memory."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.pinned: dict[int, int] = {}

    def pin(self, address, num_bytes):
        if sum(self.pinned.values()) + num_bytes > self.limit:
            raise OSError("locked memory limit")
        self.pinned[address] = num_bytes

    def unpin(self, address):
        del self.pinned[address]


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("size", [1, 4095, 4096, 5000, 3 * 2**20 + 1])
def test_memory_is_zero_aligned_and_of_exact_size(size):
    with Arena() as arena:
        tensor = arena.take(size, "x")
        assert (tensor.dtype, tensor.shape, tensor.data_ptr() % 4096) == (torch.uint8, (size,), 0)
        assert not tensor.any()
        tensor.fill_(7)
        assert arena.statistics().num_bytes == -(-size // 4096) * 4096


def test_pieces_do_not_overlap():
    with Arena() as arena:
        pieces = [arena.take(5000, "x").fill_(value) for value in range(20)]
        assert all((piece == value).all() for value, piece in enumerate(pieces))


def test_pieces_taken_together_are_each_aligned_and_of_exact_size():
    with Arena() as arena:
        sizes = [1, 4096, 0, 5000, 3 * 2**20]
        pieces = arena.take_all(sizes, "x")
        assert [len(piece) for piece in pieces] == sizes
        assert not any(piece.data_ptr() % 4096 for piece in pieces if len(piece))
        for value, piece in enumerate(pieces):
            piece.fill_(value)
        assert all((piece == value).all() for value, piece in enumerate(pieces))
        assert arena.statistics().num_bytes == 4096 + 4096 + 8192 + 3 * 2**20


def test_huge_pages_make_no_more_resident_than_was_taken():
    size = 2 * 2**20 + 4096
    with Arena() as arena:
        before = resident_bytes()
        pieces = [arena.take(size, "x").fill_(1) for _ in range(40)]
        assert resident_bytes() - before < 40 * size + 2**22
        assert all(piece.data_ptr() % 2**21 == 0 for piece in pieces)


def test_memory_that_is_not_used_is_not_resident():
    before = resident_bytes()
    with Arena() as arena:
        tensor = arena.take(2**30, "x")
        assert resident_bytes() - before < 2**24
        tensor[: 2**26].fill_(1)
        assert 2**26 <= resident_bytes() - before < 2**26 + 2**24


def test_close_gives_pages_and_reservation_back_and_live_tensors_stay_valid():
    ledger = Ledger({"host": 2**26})
    arena = Arena(ledger=ledger)
    tensor = arena.take(2**26, "x").fill_(1)
    before = resident_bytes()
    arena.close()
    arena.close()
    assert before - resident_bytes() > 2**25
    assert ledger.used("host") == 0
    assert not tensor.any()
    with pytest.raises(ValueError, match="closed"):
        arena.take(1, "y")


def test_address_space_goes_with_the_last_tensor():
    arena = Arena()
    tensor = arena.take(4096, "x")
    ((mapped, _),) = arena._mappings.values()
    mapping = weakref.ref(mapped)
    del mapped
    arena.close()
    assert mapping() is not None
    del tensor
    gc.collect()
    assert mapping() is None


def test_the_ledger_is_asked_for_whole_pages_and_a_refusal_takes_nothing():
    ledger = Ledger({"device": 8192})
    with Arena(ledger=ledger, tier="device") as arena:
        arena.take(4097, "x")
        assert ledger.used("device") == 8192
        with pytest.raises(BudgetExceededError, match="y asks for"):
            arena.take(1, "y")
        assert arena.take(0, "nothing").numel() == 0
        assert arena.statistics().num_bytes == 8192


def test_memory_that_does_not_exist_is_a_storage_error_and_unreserved():
    ledger = Ledger({"host": None})
    with Arena(ledger=ledger) as arena:
        with pytest.raises(StorageError, match="lower the host budget"):
            arena.take(2**60, "x")
        assert ledger.used("host") == 0
        with pytest.raises(ValueError, match="-1"):
            arena.take(-1, "x")


def test_pinning_covers_whole_pages_and_close_undoes_it():
    pinner = FakePinner(limit=2**20)
    arena = Arena(pinner=pinner)
    tensor = arena.take(5000, "x")
    assert pinner.pinned == {tensor.data_ptr(): 8192}
    assert arena.statistics().pinned_bytes == 8192
    arena.close()
    assert pinner.pinned == {}


def test_a_refused_pin_is_logged_counted_and_harmless(caplog):
    with Arena(pinner=FakePinner(limit=4096)) as arena, caplog.at_level(logging.WARNING):
        arena.take(4096, "slots")
        tensor = arena.take(4096, "scratch")
        tensor.fill_(1)
        statistics = arena.statistics()
    assert (statistics.pinned_bytes, statistics.num_pageable_fallbacks) == (4096, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "scratch (4.00 KiB) stays pageable, copies to the GPU will be slower: locked memory limit"
    ]


def test_what_is_given_back_is_unpinned_and_stays_for_whoever_has_it():
    pinner, ledger = FakePinner(limit=2**20), Ledger({"host": 2**20})
    with Arena(ledger=ledger, pinner=pinner) as arena:
        first, second = arena.take(5000, "x").fill_(1), arena.take(4096, "y")
        arena.give_back(first)
        assert pinner.pinned == {second.data_ptr(): 4096}
        assert (ledger.used("host"), arena.statistics().num_bytes) == (4096, 4096)
        assert first.all()
    assert pinner.pinned == {}
    assert first.all()


def test_what_was_taken_without_is_pinned_in_order_and_the_rest_is_said_in_one_line(caplog):
    pinner = FakePinner(limit=8192)
    with Arena(pinner=pinner) as arena, caplog.at_level(logging.WARNING):
        pieces = [arena.take(4096, "weights", pins=False) for _ in range(20)]
        assert pinner.pinned == {}
        arena.pin(pieces[::-1], "weights")
        assert list(pinner.pinned) == [piece.data_ptr() for piece in pieces[:-3:-1]]
        assert arena.statistics().pageable_bytes == 18 * 4096
    assert [record.getMessage() for record in caplog.records] == [
        "72.00 KiB of 80.00 KiB of weights stay pageable, copies to the GPU will be slower: locked memory limit"
    ]


def test_a_driver_that_goes_on_refusing_is_asked_no_more(caplog):
    pinner = FakePinner(limit=4096)
    asked: list[int] = []
    refuse = pinner.pin
    pinner.pin = lambda address, size: (asked.append(size), refuse(address, size))[1]
    with Arena(pinner=pinner) as arena, caplog.at_level(logging.WARNING):
        for _ in range(20):
            arena.take(8192, "weights")
        statistics = arena.statistics()
    assert len(asked) == MOST_REFUSALS
    assert (statistics.pageable_bytes, statistics.num_pageable_fallbacks) == (20 * 8192, 20)
    assert len(caplog.records) == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_pins_exact_sizes_and_a_failure_leaves_no_error_behind():
    with Arena(pinner=DriverPinner(torch.device("cuda", 0))) as arena:
        tensor = arena.take(3 * 2**20 + 4096, "x").fill_(3)
        assert tensor.is_pinned()
        assert (tensor.to("cuda", non_blocking=True).cpu() == 3).all()
        with pytest.raises(OSError, match="cudaHostRegister"):
            DriverPinner(torch.device("cuda", 0)).pin(tensor.data_ptr(), tensor.numel())
        assert int(torch.ones(4, device="cuda").sum()) == 4
    assert not tensor.is_pinned()


def test_the_driver_is_asked_in_the_context_of_the_device_that_computes(monkeypatch):
    """`cudaHostRegister` takes memory on whatever device is the current one: for cuda:1 that is not GPU 0."""
    entered: list[torch.device] = []
    seen: list[tuple[str, list[torch.device]]] = []

    @contextmanager
    def current(device):
        entered.append(device)
        yield
        entered.pop()

    row = replace(
        VENDORS["cuda"],
        register=lambda address, size: seen.append(("pin", list(entered))),
        unregister=lambda address: seen.append(("unpin", list(entered))),
    )
    monkeypatch.setitem(VENDORS, "cuda", row)
    monkeypatch.setattr(torch.cuda, "device", current)
    with Arena(pinner=pinner_of(Devices.parse("cuda:1"))) as arena:
        arena.take(4096, "x")
    assert seen == [(what, [torch.device("cuda", 1)]) for what in ("pin", "unpin")]
