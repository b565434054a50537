"""Kernels of the Hub in the layers of a model.

Kernels of the Hugging Face hub in a model: transformers maps them to layers, and the package `kernels` loads them.

Modules of a class that transformers maps get the forward of a kernel; functions that it maps, such as scans and
convolutions, belong to a module of transformers, and so to every model of the process, and keep theirs. As Liger's
kernels, see there, these run where tensors lie on the device that they were loaded for: elsewhere, as in the trial of a
microbatch, the model's own code runs.

Kernels in place of operations of a model's blocks, as `model.kernels` names them.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from outsize.accelerators import Devices
from outsize.choices import BlockKernels
from outsize.errors import ConfigError, ModelError
from outsize.model.liger import NORM, Either, check_plain, given_forward, saving_norm, take_liger


def take_hub(model: nn.Module, devices: Devices) -> str:
    """Have ``model`` compute with kernels of the hub; `take_plain` undoes it, but for functions.

    A kernel that is not in the hub's cache is downloaded by the package, if that trusts who publishes it.

    Args:
        model: its parameters may lie anywhere.
        devices: that it will compute on.

    Returns:
        For which layers kernels compute now, and how many times.

    Raises:
        ConfigError: the package is not there, or transformers does not take its version.
        ModelError: there is no kernel for a layer of such a model on such a device, one cannot be loaded, or the model
            has some already.
    """
    kernelize = _kernelize()
    check_plain(model)
    kind = devices.torch_device.type
    kind = "rocm" if kind == "cuda" and torch.version.hip else kind
    functions = (vars(module).get("_kernel_funcs", {}).values() for module in model.modules())
    parts = dict.fromkeys(
        [*model.modules(), *(each for layer_functions in functions for each in layer_functions)]
    )
    mapped = [part for part in parts if hasattr(type(part), "kernel_layer_name")]
    try:
        kernelize(model, device=kind)
    except Exception as error:  # of the hub, of the network, and of code that comes from there
        for part in mapped:
            vars(part).pop("forward", None)
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(
            f"kernels: those of the hub for {type(model).__name__} on {kind} cannot be loaded: {why}; try again where "
            "the hub can be asked, or set none"
        ) from error
    layer_functions = Counter(name for part in mapped for name in _take(part, not devices.own_processor))
    if not layer_functions:
        raise ModelError(
            f"kernels: the hub has none that trains a layer of {type(model).__name__} on {kind}; set none"
        )
    return ", ".join(f"{name} × {count}" for name, count in sorted(layer_functions.items()))


def _kernelize() -> Callable[..., Any]:
    """Return what puts kernels into a model that trains, by transformers' mapping.

    Raises:
        ConfigError: the package is not there, or transformers does not take its version.
    """
    from transformers.integrations import hub_kernels

    try:
        from kernels import Mode, kernelize

        hub_kernels.register_kernel_mapping_transformers()
    except (ImportError, RuntimeError) as error:
        why = error if isinstance(error, ImportError) else "another one is installed"
        raise ConfigError(
            f"kernels: hub needs the package kernels in a version that transformers takes ({why}): "
            "pip install 'outsize[hub]'"
        ) from error
    return partial(kernelize, mode=Mode.TRAINING)


def _take(part: Any, everywhere: bool) -> Iterator[str]:
    """Have ``part``, a module or a function as one, run the kernel that it was given where its tensors lie.

    Yields:
        The name of its layer, if there was a kernel.
    """
    kernel, class_forward = given_forward(part), type(part).forward
    if kernel is class_forward:
        del part.forward
    elif kernel is not None and not isinstance(kernel, Either):
        saving = partial(saving_norm, class_forward) if kernel.__qualname__ == NORM else class_forward
        part.forward = MethodType(Either(kernel, saving, everywhere), part)
        yield type(part).kernel_layer_name


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
