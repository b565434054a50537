import itertools
from collections.abc import Callable

import pytest
import torch

from contracts import DEVICE_CONTRACT, MakeDevice
from outsize.accelerators import Devices
from outsize.errors import ConfigError
from outsize.runtime.device.device import CpuDevice, Device, EmulatedDevice, open_device
from outsize.storage.ledger import Ledger

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
NAMES = ["cpu", "emulated:1", pytest.param("cuda:0", marks=[pytest.mark.cuda, needs_cuda])]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", DEVICE_CONTRACT, ids=lambda check: check.__name__)
def test_contract(check: Callable[[MakeDevice], None], name: str):
    check(lambda ledger: open_device(Devices.parse(name), ledger))


@pytest.mark.parametrize(("name", "kind"), [("cpu", CpuDevice), ("emulated:1", EmulatedDevice)])
def test_a_device_is_known_by_its_name(name: str, kind: type[Device]):
    device = open_device(Devices.parse(name))
    assert type(device) is kind
    assert device.name == name
    device.close()


@pytest.mark.parametrize("name", ["gpu", "cpu:1", "cuda:x", "emulated:-1", "emulated:1:2", ""])
def test_what_is_no_device_is_refused(name: str):
    with pytest.raises(ConfigError, match="use cpu, emulated:N, cuda:i or cuda:i,j"):
        Devices.parse(name)


def test_a_cuda_device_that_is_not_there_is_an_error_with_advice():
    with pytest.raises(ConfigError, match=r"cuda:99, but torch .* sees \d+ CUDA devices; use --device cpu"):
        open_device(Devices.parse("cuda:99"))


class Clock:
    """Stands in for `time.perf_counter` and for waiting."""

    def __init__(self):
        self.now = 0.0
        self.waited: list[float] = []

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.now += seconds


@pytest.mark.parametrize("copying_s", [0.0, 0.25, 5.0])
def test_an_emulated_link_takes_the_time_that_its_rate_says(
    copying_s: float, monkeypatch: pytest.MonkeyPatch
):
    """The copy itself counts; a copy that takes longer is not slowed down further."""
    clock = Clock()
    times = itertools.cycle((0.0, copying_s))
    monkeypatch.setattr("outsize.runtime.device.device.time.perf_counter", lambda: next(times))
    device = EmulatedDevice("emulated:1", link_bytes_per_s=1000.0)
    monkeypatch.setattr("outsize.runtime.device.device.time.sleep", clock.wait)
    source, into = torch.arange(500, dtype=torch.uint8), torch.zeros(500, dtype=torch.uint8)
    device.copy(into, source)
    assert torch.equal(into, source)
    assert clock.waited == ([0.5 - copying_s] if copying_s < 0.5 else [])
    device.close()


def test_an_emulated_link_without_a_rate_waits_for_nothing(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    device = open_device(Devices.parse("emulated:1"), Ledger({"device": 4096}))
    monkeypatch.setattr("outsize.runtime.device.device.time.sleep", clock.wait)
    device.copy(torch.zeros(8), torch.ones(8))
    assert clock.waited == []
    device.close()
