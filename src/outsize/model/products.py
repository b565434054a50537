"""Products of linear layers in blocks in 8 bits, as torchao's float8 training computes them (extra ``fp8``).

A layer keeps its parameters, and its place; it gets the class of one that `torchao.float8` has converted, and computes
forward and backward by torchao from then on: whatever streams, recomputes, keeps or compiles it runs the operations of
a resident model with the same layers. Scales are made of the numbers of a call, so nothing outlives it.

1. What goes in is rounded to e4m3, gradients to e5m2 (``fp8``: a scale for each matrix) or e4m3 (``fp8-rowwise``: one
   for each row), and multiplied so; sums are made in fp32, and weights and gradients have the dtypes that they had.
2. A layer whose width in or out is no multiple of 16 stays as it is. So do adapters, embeddings, heads, and whatever
   else is no `torch.nn.Linear`.
3. Of frozen weights no gradient is computed, which torchao's own layer would (`model.linear8`).
4. A CPU has no such products. There they are emulated, in fp32, also where a run on a GPU is tried on the CPU.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.accelerators import Devices, module_of, title_of
from outsize.errors import ConfigError, ModelError
from outsize.model.build import quiet_torchao
from outsize.model.split import Split

# torchao's names of them.
_RECIPES = {"fp8": "tensorwise", "fp8-rowwise": "rowwise"}
# What instructions for fp8 multiply is a whole number of these.
_MULTIPLE = 16
# CUDA's first with products of fp8, Ada; and those of AMD, by the beginnings of their names: MI300, MI350, RDNA 4.
_FIRST = (8, 9)
_OF_AMD = ("gfx94", "gfx95", "gfx12")
# Of one layer, with so many tokens and rows of its weights, the error is told.
_TOKENS, _ROWS = 64, 256


def take_products(split: Split, products: str, devices: Devices) -> str:
    """Have linear layers in the blocks of ``split`` multiply as ``products`` says; `take_native` undoes it.

    Args:
        split: its parameters may lie anywhere.
        products: ``fp8`` or ``fp8-rowwise``.
        devices: that will compute.

    Returns:
        What multiplies so now.

    Raises:
        ConfigError: torchao is not installed, or the device has no such products.
        ModelError: the blocks have no layer that could.
    """
    _check_devices(devices, products)
    kind = _linear_class(products)
    layers = list(_linear_layers(split))
    linears = [layer for layer in layers if type(layer) is nn.Linear]
    linears = [one for one in linears if one.in_features % _MULTIPLE == one.out_features % _MULTIPLE == 0]
    if not linears:
        raise ModelError(
            f"products: of {len(layers)} linear layers (torch.nn.Linear) in blocks of {type(split.model).__name__} "
            f"none has widths that are multiples of {_MULTIPLE}; set native"
        )
    for layer in linears:
        layer.__class__ = kind
    emulated = "" if devices.accelerated else "; emulated, which is slow, and only for trying"
    return f"{products} in {len(linears)} of {len(layers)} linear layers of blocks{emulated}"


def take_native(model: nn.Module) -> None:
    """Undo `take_products`."""
    for module in model.modules():
        if _is_taken(module):
            module.__class__ = nn.Linear


def error_of(split: Split, read: Callable[[str, Tensor], None]) -> str:
    """Say how far off products of one layer of `take_products` are, of random tokens with its first weights.

    Args:
        split: the model.
        read: fills a tensor with the first elements of the parameter of that name.
    """
    layers = [layer for layer in _linear_layers(split) if _is_taken(layer)]
    layer: Any = layers[len(layers) // 2]
    name = next(name for name, places in split.owners.items() if (layer, "weight") in places)
    weights = torch.empty(min(_ROWS, layer.out_features), layer.in_features)
    read(name, weights.view(-1))
    sample: Any = nn.Linear(layer.in_features, len(weights), bias=False, device="meta")
    sample.weight, sample.__class__ = nn.Parameter(weights, requires_grad=False), type(layer)
    tokens = torch.randn(_TOKENS, layer.in_features, generator=torch.Generator().manual_seed(0))
    exact = F.linear(tokens, weights)
    error = float((sample.forward(tokens) - exact).norm() / exact.norm().clamp_min(1e-30))
    return f"products of random tokens with {name} are {error:.1%} off (root mean square)"


def _linear_layers(split: Split) -> Iterator[nn.Module]:
    """Yield the linear layers in blocks, but for those of PEFT's adapters."""
    for module, unit in zip(split.modules, split.spec.units, strict=False):
        if unit.kind == "block":
            yield from _linear_inside(module)


def _linear_inside(module: nn.Module) -> Iterator[nn.Module]:
    adapters = getattr(module, "adapter_layer_names", ())
    for name, child in module.named_children():
        if name not in adapters:
            if isinstance(child, nn.Linear):
                yield child
            yield from _linear_inside(child)


def _is_taken(module: nn.Module) -> bool:
    # It imports torchao, and where nobody has imported it, nobody has its class.
    loaded = sys.modules.get("outsize.model.linear8")
    return loaded is not None and isinstance(module, loaded.Linear8)


def _linear_class(products: str) -> Any:
    """Return the class of layers that torchao has converted."""
    try:
        with quiet_torchao():
            from outsize.model.linear8 import linear_class
        return linear_class(_RECIPES[products], _MULTIPLE)
    except ImportError as error:
        raise ConfigError(
            f"products: {products} needs the package torchao ({error}): pip install 'outsize[fp8]'"
        ) from error


def _check_devices(devices: Devices, products: str) -> None:
    """Check that devices multiply in fp8; a CPU emulates it."""
    lacks = {_lacks(devices.kind, index) for index in devices.indices if devices.accelerated} - {""}
    if lacks:
        raise ConfigError(f"products: {products} on {devices}: {lacks.pop()}; set native")


def _lacks(kind: str, index: int) -> str:
    """Say why one device has no products of fp8; empty where it has."""
    if kind != "cuda":
        return f"torchao has no products of fp8 on {title_of(kind)}"
    if torch.version.hip:
        name = module_of(kind).get_device_properties(index).gcnArchName.partition(":")[0]
        return "" if name.startswith(_OF_AMD) else f"{name} has none; MI300, MI350 and RDNA 4 have"
    major, minor = module_of(kind).get_device_capability(index)
    supported = (major, minor) >= _FIRST
    return "" if supported else f"sm_{major}{minor} has none; Ada (sm_89), Hopper and later GPUs have"
