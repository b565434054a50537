"""The figures of data sheets for the devices of a run, by what the driver calls them."""

import contextlib

from outsize.accelerators import Devices
from outsize.hardware.cards.gpu_table import find_card, known_card
from outsize.hardware.cards.presets import parse_gpus
from outsize.hardware.machine_spec import Gpu, Machine

# Stands for devices without figures, emulated ones and GPUs that nobody has described.
USUAL = "4090"


def preset_of(name: str) -> Gpu | None:
    """Return the preset for a driver's name, e.g. ``NVIDIA H100 80GB HBM3``; None for one that nobody has described."""
    card = known_card(name)
    return None if card is None else card.gpu()


def assumed_machine(devices: Devices) -> Machine:
    """Return the preset of the devices of a run, or that of so many `USUAL` cards where they have none.

    For what must not be timed, since another start would find another number.
    """
    gpu = find_card(USUAL).gpu()
    with contextlib.suppress(AssertionError, RuntimeError):  # torch without CUDA: of a run on another machine
        gpu = next(filter(None, map(preset_of, devices.each[0].titles)), gpu)
    return parse_gpus(f"{len(devices.each)}x{gpu.name}")
