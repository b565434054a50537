"""NVIDIA GPUs as the driver describes them, by nvidia-ml-py where that is installed."""

from collections.abc import Callable
from typing import Any

from outsize.hardware.readings import Fact, Record


class GpuFacts(Record):
    """One GPU.

    Attributes:
        name: as the driver gives it.
        capability: of its architecture, e.g. ``9.0``.
        memory_total_bytes: its memory.
        memory_free_bytes: what no process holds.
        pcie_generation: negotiated now; lower while the GPU is idle.
        pcie_generation_max: that GPU and slot could negotiate.
        pcie_lanes: negotiated now.
        pcie_lanes_max: that GPU and slot could negotiate.
        numa_node: nearest to it.
        driver: version.
    """

    name: Fact
    capability: Fact
    memory_total_bytes: Fact
    memory_free_bytes: Fact
    pcie_generation: Fact
    pcie_generation_max: Fact
    pcie_lanes: Fact
    pcie_lanes_max: Fact
    numa_node: Fact
    driver: Fact


def read_gpus(load_nvml: Callable[[], Any]) -> tuple[tuple[GpuFacts, ...], Fact]:
    """Return the GPUs, and how many there are or why that is unknown.

    Args:
        load_nvml: returns the module ``pynvml``, or raises ImportError.
    """
    try:
        nvml = load_nvml()
    except ImportError:
        return (), Fact.absent("nvidia-ml-py is not installed; pip install 'outsize[nvml]'")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), Fact.absent(f"NVML: {error}")
    try:
        count = nvml.nvmlDeviceGetCount()
        return tuple(_gpu(nvml, index) for index in range(count)), Fact.read(count, "NVML")
    except nvml.NVMLError as error:
        return (), Fact.absent(f"NVML: {error}")
    finally:
        nvml.nvmlShutdown()


def import_nvml() -> Any:
    """Return the module ``pynvml``.

    Raises:
        ImportError: not installed.
    """
    import pynvml

    return pynvml


def _gpu(nvml: Any, index: int) -> GpuFacts:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: str, convert: Callable[[Any], Any] = lambda value: value) -> Fact:
        # A driver or a virtual GPU may lack any of them, and an old nvidia-ml-py the function itself.
        try:
            return Fact.read(convert(getattr(nvml, function)(handle)), f"NVML {function}")
        except (nvml.NVMLError, AttributeError) as error:
            return Fact.absent(f"NVML {function}: {error}")

    try:
        driver = Fact.read(_text(nvml.nvmlSystemGetDriverVersion()), "NVML nvmlSystemGetDriverVersion")
    except nvml.NVMLError as error:
        driver = Fact.absent(f"NVML nvmlSystemGetDriverVersion: {error}")
    return GpuFacts(
        name=ask("nvmlDeviceGetName", _text),
        capability=ask("nvmlDeviceGetCudaComputeCapability", lambda pair: f"{pair[0]}.{pair[1]}"),
        memory_total_bytes=ask("nvmlDeviceGetMemoryInfo", lambda memory: memory.total),
        memory_free_bytes=ask("nvmlDeviceGetMemoryInfo", lambda memory: memory.free),
        pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_generation_max=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_lanes=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_lanes_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        numa_node=ask("nvmlDeviceGetNumaNodeId"),
        driver=driver,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
