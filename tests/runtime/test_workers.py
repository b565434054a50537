import contextlib

import pytest
import torch

from outsize.accelerators import Devices
from outsize.errors import BudgetExceededError, ConfigError
from outsize.runtime.device.device import EmulatedDevice
from outsize.runtime.device.device_group import Workers, open_workers
from outsize.storage.ledger import Ledger, tier_of


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cpu", ("cpu",)),
        ("emulated:1", ("emulated:1",)),
        ("emulated:3", ("emulated:0", "emulated:1", "emulated:2")),
        ("cuda:1", ("cuda:1",)),
        ("cuda:0,2", ("cuda:0", "cuda:2")),
        ("cuda:0,0", ("cuda:0", "cuda:0")),
    ],
)
def test_a_name_means_one_device_for_each_worker(name: str, expected: tuple[str, ...]):
    assert Devices.parse(name).names == expected


@pytest.mark.parametrize("name", ["emulated:0", "emulated:x"])
def test_names_that_mean_none(name: str):
    with pytest.raises(ConfigError, match="unknown device"):
        Devices.parse(name)


def test_each_worker_has_a_budget_of_its_own():
    ledger = Ledger({tier_of(0, 2): 4096, tier_of(1, 2): 8192})
    workers = open_workers(Devices.parse("emulated:2"), ledger)
    workers.devices[1].allocate(8192, "slot")
    workers.devices[0].allocate(4096, "slot")
    with pytest.raises(BudgetExceededError, match="device:w0"):
        workers.devices[0].allocate(1, "slot")
    workers.close()
    assert ledger.used("device:w0") == ledger.used("device:w1") == 0


def test_a_device_that_is_missing_leaves_nothing_open():
    ledger = Ledger({tier_of(0, 2): 4096, tier_of(1, 2): 4096})
    with pytest.raises(ConfigError, match="cuda:98"):
        open_workers(Devices.parse("cuda:98,99"), ledger)


def test_lanes_belong_to_their_workers():
    one, other = EmulatedDevice("one"), EmulatedDevice("other")
    workers = Workers([one, other])
    assert workers.of("compute:w1") is other
    assert workers.of("down:w0") is one
    assert workers.of("host") is one
    assert workers.torch_device == torch.device("cpu")
    with workers.lane("compute:w1"):
        assert workers.record("compute:w1") is None
    workers.close()


def test_an_emulated_link_takes_its_time_for_copies_of_others_too(monkeypatch: pytest.MonkeyPatch):
    device = EmulatedDevice("slow", link_bytes_per_s=1000.0)
    waits: list[float] = []
    monkeypatch.setattr("outsize.runtime.device.device.time.sleep", waits.append)
    with device.link(500):
        pass
    assert waits == [pytest.approx(0.5, abs=0.1)]
    device.close()


def test_a_lane_between_two_devices_is_that_of_the_first_in_order_with_the_other():
    class Told(EmulatedDevice):
        def lane(self, name):
            return self._telling(f"{self.name} runs {name}")

        def behind(self, lane):
            return self._telling(f"{self.name} follows {lane}")

        @contextlib.contextmanager
        def _telling(self, what):
            told.append(what)
            yield

    told: list[str] = []
    workers = Workers([Told("a"), Told("b"), Told("c")])
    assert workers.of("peer:w2-w0").name == "c"
    with workers.lane("peer:w2-w0"):
        assert told == ["a follows peer:w2-w0", "c runs peer:w2-w0"]
    workers.close()


def test_copies_between_emulated_devices_take_their_time(monkeypatch: pytest.MonkeyPatch):
    device = open_workers(Devices.parse("emulated:2"), peer_bytes_per_s=1000.0).devices[1]
    waits: list[float] = []
    monkeypatch.setattr("outsize.runtime.device.device.time.sleep", waits.append)
    with device.crossing(500):
        pass
    with device.link(500):  # which has no rate
        pass
    assert waits == [pytest.approx(0.5, abs=0.1)]
    device.close()
