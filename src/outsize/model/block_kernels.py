"""Kernels in place of operations of a model's blocks, as `model.kernels` names them."""

from collections.abc import Callable

from torch import nn

from outsize.accelerators import Devices
from outsize.choices import BlockKernels
from outsize.model.hub_kernels import take_hub
from outsize.model.liger import take_liger


def take_kernels(
    model: nn.Module, whose: BlockKernels, devices: Devices, announce: Callable[[str], object]
) -> None:
    """Have ``model`` compute with such kernels on ``devices``, and say which they are; `take_plain` undoes it.

    Raises:
        ConfigError: the package of the kernels is not there, or they do not run on such a device.
        ModelError: there are none for such a model, or it has some already.
    """
    if whose != "none":
        announce(f"kernels: {(take_liger if whose == 'liger' else take_hub)(model, devices)}")
