"""The figures of data sheets for the devices of a run, by what the driver calls them."""

import contextlib

from outsize.accelerators import index_of, is_accelerator, module_of
from outsize.hardware.machine_spec import Gpu, Machine
from outsize.hardware.presets import GPUS, parse_gpus
from outsize.runtime.device.device_group import device_names

# Stands for devices without figures, emulated ones and GPUs that nobody has described.
USUAL = "4090"


def preset_of(name: str) -> Gpu | None:
    """Return the preset for a driver's name, e.g. ``NVIDIA H100 80GB HBM3``; cards that share a name only have none."""
    words = name.lower().replace(" ti", "ti").replace("-", " ").split()
    if "pcie" in words or "laptop" in words or "super" in words or "nvl" in words:
        return None
    return next((gpu for word, gpu in GPUS.items() if word in words), None)


def assumed_machine(device: str) -> Machine:
    """Return the preset of the devices of a run, or that of so many `USUAL` cards where they have none.

    For what must not be timed, since another start would find another number.
    """
    names = device_names(device)
    gpu = GPUS[USUAL]
    if is_accelerator(device):
        with contextlib.suppress(
            AssertionError, RuntimeError
        ):  # torch without CUDA: of a run on another machine
            gpu = preset_of(module_of(names[0]).get_device_name(index_of(names[0]))) or gpu
    return parse_gpus(f"{len(names)}x{gpu.name}")
