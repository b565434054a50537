"""What is made of a driver's answers, recorded ones: there need not be a GPU."""

from types import SimpleNamespace

import pytest

from outsize.telemetry.counters import GpuSampler


class NvmlError(Exception):
    pass


class Recorded:
    """A driver of one GPU: counters of bytes that go on, and the functions that ``missing`` names refused."""

    NVMLError = NvmlError

    def __init__(self, *missing: str) -> None:
        self.missing = missing
        self.open = 0
        self.sent = 0

    def __getattr__(self, name: str):
        if name in self.missing or not hasattr(Recorded, f"do_{name}"):
            raise AttributeError(name)
        return getattr(self, f"do_{name}")

    def do_nvmlInit(self):  # noqa: N802 - the driver's own name
        if "driver" in self.missing:
            raise NvmlError("Driver Not Loaded")
        self.open += 1

    def do_nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def do_nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid != "GPU-1":
            raise NvmlError("Not Found")
        return uuid

    def do_nvmlDeviceGetClockInfo(self, handle, kind):  # noqa: N802
        return 1755

    def do_nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        return SimpleNamespace(gpu=87, memory=40)

    def do_nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(used=3 * 2**30)

    def do_nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802
        return 350_500

    def do_nvmlDeviceGetTemperature(self, handle, sensor):  # noqa: N802
        raise NvmlError("Not Supported")

    def do_nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):  # noqa: N802
        return 0x4 | 0x40

    def do_nvmlDeviceGetFieldValues(self, handle, fields):  # noqa: N802
        self.sent += 1000
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=self.sent)) for _ in fields]


def test_a_gpu_is_sampled_and_its_counters_are_differences():
    driver = Recorded()
    with GpuSampler({2: "GPU-1"}, lambda: driver) as sampler:
        (first,), (second,) = sampler.sample(), sampler.sample()
    assert driver.open == 0
    assert first.index == 2
    assert (first.pcie_sent_bytes, second.pcie_sent_bytes, second.pcie_received_bytes) == (None, 2000, 2000)
    assert second.sm_clock_hz == 1_755_000_000
    assert (second.utilisation_share, second.memory_used_bytes, second.power_w) == (0.87, 3 * 2**30, 350.5)
    assert second.clock_limits == "power cap, hardware thermal slowdown"
    assert second.temperature_c is None  # the driver does not say


def test_what_a_driver_lacks_is_null():
    driver = Recorded("nvmlDeviceGetFieldValues", "nvmlDeviceGetUtilizationRates")
    with GpuSampler({0: "GPU-1"}, lambda: driver) as sampler:
        (sample,) = sampler.sample()
    assert (sample.pcie_sent_bytes, sample.utilisation_share) == (None, None)


def no_module():
    raise ImportError


@pytest.mark.parametrize(
    ("uuids", "load"),
    [
        ({}, no_module),
        ({0: "GPU-1"}, no_module),
        ({0: "GPU-1"}, lambda: Recorded("driver")),
        ({0: "GPU-other"}, Recorded),
    ],
)
def test_without_nvml_or_its_gpu_there_are_no_samples(uuids, load):
    with GpuSampler(uuids, load) as sampler:
        assert sampler.sample() == ()
    sampler.close()
