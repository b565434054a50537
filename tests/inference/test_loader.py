"""The loader runs ahead, round and round, within its slots, whatever the order in which units are asked for."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from outsize.errors import StorageError
from outsize.inference.loader import Caller, Loader
from outsize.planner.search.forward_plan import Scan, plan_scan
from outsize.runtime.device.device import CpuDevice
from patience import PATIENCE_S

NUM_UNITS, UNIT_BYTES = 5, 8


class Weights:
    """A source whose units hold their number; it notes what was loaded, and fails or pauses when told to."""

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.changed = threading.Condition()
        self.failing: set[int] = set()

    def planes(self, unit: int, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (memory[:UNIT_BYTES],)

    def load(self, unit: int, memory: torch.Tensor) -> None:
        if unit in self.failing:
            raise StorageError(f"unit {unit} cannot be read")
        memory.fill_(unit)
        with self.changed:
            self.loaded.append(unit)
            self.changed.notify_all()

    def wait_for(self, count: int) -> list[int]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.loaded) >= count, timeout=PATIENCE_S)
            return self.loaded[:count]


@contextmanager
def loading(scan: Scan) -> Iterator[tuple[Loader, Weights]]:
    device, weights = CpuDevice(), Weights()
    loader = Loader(device, Caller(device.torch_device), weights, (UNIT_BYTES,) * NUM_UNITS, CpuDevice)
    try:
        loader.follow(scan)
        yield loader, weights
    finally:
        loader.close()
        device.close()


def use(loader: Loader, unit: int) -> None:
    (weights,) = loader.take(unit)
    assert weights.tolist() == [unit] * UNIT_BYTES
    loader.give_back(unit)


def scan_of(num_kept: int, num_slots: int) -> Scan:
    scan = plan_scan([UNIT_BYTES] * NUM_UNITS, UNIT_BYTES * (num_kept + num_slots), prefetch=num_slots - 1)
    assert (len(scan.kept), scan.num_slots) == (num_kept, num_slots)
    return scan


def test_it_loads_the_first_units_of_the_next_pass_while_this_one_ends():
    with loading(scan_of(0, 3)) as (loader, weights):
        assert weights.wait_for(3) == [0, 1, 2]  # before anybody asked
        for unit in range(NUM_UNITS):
            use(loader, unit)
        assert weights.wait_for(NUM_UNITS + 3) == [0, 1, 2, 3, 4, 0, 1, 2]


@pytest.mark.parametrize(
    ("num_kept", "num_slots"), [(0, 1), (0, 2), (0, 3), (0, 4), (1, 1), (1, 3), (2, 1), (2, 2), (3, 1)]
)
def test_kept_units_come_up_once_and_the_others_in_every_pass(num_kept, num_slots):
    scan = scan_of(num_kept, num_slots)
    with loading(scan) as (loader, weights):
        for _ in range(4):
            for unit in range(NUM_UNITS):
                use(loader, unit)
        counts = [weights.loaded.count(unit) for unit in range(NUM_UNITS)]
        assert all(counts[unit] == 1 for unit in scan.kept)
        assert all(4 <= counts[unit] <= 5 for unit in scan.streamed)
        assert all(unit in loader._kept and unit in loader._there for unit in scan.kept)


def test_all_kept_is_loaded_once_and_stays():
    with loading(plan_scan([UNIT_BYTES] * NUM_UNITS, 1000)) as (loader, weights):
        for _ in range(3):
            for unit in range(NUM_UNITS):
                use(loader, unit)
        assert weights.loaded == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_kept", [0, 2])
@pytest.mark.parametrize(
    "order", [[0, 1, 0, 1, 2], [3, 1, 4, 0], [4, 3, 2, 1, 0], [0, 2, 4, 0, 2, 4], [2, 2, 2]]
)
def test_any_order_gets_the_right_weights(order, num_kept):
    with loading(scan_of(num_kept, 2)) as (loader, _):
        for unit in order * 3:
            use(loader, unit)


def test_its_own_thread_may_close_it():
    """The collector lets go of a model in any thread."""
    with loading(scan_of(0, 2)) as (loader, weights):
        weights.wait_for(2)
        load, closed = weights.load, threading.Event()

        def closing(unit: int, memory: torch.Tensor) -> None:
            load(unit, memory)
            loader.close()
            closed.set()

        weights.load = closing  # type: ignore[method-assign]
        use(loader, 0)
        assert closed.wait(PATIENCE_S)


def test_another_scan_takes_over_between_passes():
    with loading(scan_of(0, 3)) as (loader, _):
        for scan in (scan_of(1, 3), scan_of(1, 2), scan_of(3, 1), scan_of(0, 1), plan_scan([8] * 5, 40)):
            for unit in range(NUM_UNITS):
                use(loader, unit)
            kept_before = {
                unit for unit in range(NUM_UNITS) if unit in loader._kept and unit in loader._there
            }
            loader.follow(scan)
            assert all(unit in loader._kept and unit in loader._there for unit in kept_before & scan.kept)


def test_an_error_reaches_whoever_asks_and_the_next_pass_works():
    with loading(scan_of(1, 2)) as (loader, weights):
        weights.failing = {3}
        use(loader, 0)
        use(loader, 1)
        use(loader, 2)
        with pytest.raises(StorageError, match="unit 3"):
            loader.take(3)
        weights.failing = set()
        for _ in range(2):
            for unit in range(NUM_UNITS):
                use(loader, unit)
