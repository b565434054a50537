"""What the driver says of GPUs once per step, by nvidia-ml-py where that is installed.

Everything asked here answers within some microseconds. ``nvmlDeviceGetPcieThroughput`` is not asked: it watches the
bus for 20 ms, which would be felt. The counters of bytes sent and received are read instead; where a driver lacks
them the field is null.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Self

from outsize.hardware.gpus import clock_limits
from outsize.telemetry.heartbeat_schema import GpuSample

# From nvml.h: nvmlClockType_t, nvmlTemperatureSensors_t, NVML_FI_DEV_PCIE_COUNT_TX_BYTES and RX.
_SM_CLOCK, _CHIP = 1, 0
_SENT, _RECEIVED = 197, 198


class GpuSampler:
    """Samples some GPUs; a context manager. Without NVML, or without GPUs to sample, it samples nothing.

    Args:
        uuids: of the GPUs by the number that the run knows them by, e.g. ``GPU-8f0c…``.
        load_nvml: returns the module ``pynvml``, or raises ImportError.
    """

    def __init__(self, uuids: Mapping[int, str], load_nvml: Callable[[], Any]) -> None:
        self._nvml: Any = None
        self._handles: dict[int, Any] = {}
        self._counted: dict[tuple[int, int], int] = {}
        if not uuids:
            return
        try:
            nvml = load_nvml()
        except ImportError:
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return
        self._nvml = nvml
        for index, uuid in uuids.items():
            with contextlib.suppress(nvml.NVMLError):
                self._handles[index] = nvml.nvmlDeviceGetHandleByUUID(uuid)

    def sample(self) -> tuple[GpuSample, ...]:
        """Return what each GPU is doing now."""
        return tuple(self._sample(index, handle) for index, handle in self._handles.items())

    def close(self) -> None:
        """Let the driver go; idempotent."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None
            self._handles.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _sample(self, index: int, handle: Any) -> GpuSample:
        def ask(function: str, convert: Callable[[Any], Any], *arguments: Any) -> Any:
            # A driver or a virtual GPU may lack any of them, and an old nvidia-ml-py the function itself.
            try:
                return convert(getattr(self._nvml, function)(handle, *arguments))
            except (self._nvml.NVMLError, AttributeError, OSError):
                return None

        return GpuSample(
            index=index,
            sm_clock_hz=ask("nvmlDeviceGetClockInfo", lambda mhz: int(mhz) * 10**6, _SM_CLOCK),
            utilisation_share=ask("nvmlDeviceGetUtilizationRates", lambda rates: rates.gpu / 100),
            memory_used_bytes=ask("nvmlDeviceGetMemoryInfo", lambda memory: int(memory.used)),
            power_w=ask("nvmlDeviceGetPowerUsage", lambda milliwatts: milliwatts / 1e3),
            temperature_c=ask("nvmlDeviceGetTemperature", int, _CHIP),
            pcie_sent_bytes=self._since(index, handle, _SENT),
            pcie_received_bytes=self._since(index, handle, _RECEIVED),
            clock_limits=ask("nvmlDeviceGetCurrentClocksThrottleReasons", clock_limits),
        )

    def _since(self, index: int, handle: Any, field: int) -> int | None:
        """Return how far a counter of bytes came since the last sample; None for the first, and where there is none."""
        try:
            (value,) = self._nvml.nvmlDeviceGetFieldValues(handle, [field])
            if value.nvmlReturn != 0:
                return None
            now = int(value.value.ullVal)
        except (self._nvml.NVMLError, AttributeError, OSError, ValueError):
            return None
        before = self._counted.get((index, field))
        self._counted[index, field] = now
        return None if before is None or now < before else now - before
