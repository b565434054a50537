"""Matrix products of a given model's own shapes, as its linear layers do them."""

from collections.abc import Callable

import torch

from outsize.accelerators import Devices
from outsize.hardware.streaming import ShapeRate
from outsize.model.sizes.model_spec import ModelSpec
from outsize.probing.compute import DTYPES, dtypes_of, measure_growing
from outsize.probing.effort import Effort

_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096)


def shapes_of(spec: ModelSpec) -> dict[tuple[int, int], str]:
    """Return outputs and inputs of every distinct weight matrix of a block or a head, with the first one's name."""
    shapes: dict[tuple[int, int], str] = {}
    for unit in spec.units:
        for tensor in unit.tensors if unit.kind != "embedding" else ():
            if len(tensor.shape) == 2 and min(tensor.shape) > 1:
                shapes.setdefault((tensor.shape[0], tensor.shape[1]), tensor.name)
    return shapes


def measure_shapes(device: Devices, spec: ModelSpec | None, effort: Effort) -> tuple[ShapeRate, ...]:
    """Return the operations per second of ``x @ w.T`` for each shape of the model, with more and more tokens in ``x``.

    The number of tokens is the first with which a product takes ``effort.matmul_s``, or the largest tried.
    """
    rates = []
    for (num_outputs, num_inputs), name in shapes_of(spec).items() if spec is not None else ():
        tried: dict[str, int] = {}
        measured = {
            dtype: measure_growing(
                device,
                effort,
                _TOKENS,
                _product(device, dtype, num_outputs, num_inputs, tried),
                lambda tokens, one=num_outputs, other=num_inputs: 2.0 * tokens * one * other,  # type: ignore[misc]
                f"{dtype}, weight {num_outputs} x {num_inputs}, tokens =",
            )
            for dtype in dtypes_of(device)
        }
        rates.append(
            ShapeRate(
                name=name,
                num_inputs=num_inputs,
                num_outputs=num_outputs,
                num_tokens=max(tried.values()),
                flops_per_s=measured,
            )
        )
    return tuple(rates)


def _product(
    device: Devices, dtype: str, num_outputs: int, num_inputs: int, tried: dict[str, int]
) -> Callable[[int], Callable[[], object]]:
    def prepare(tokens: int) -> Callable[[], object]:
        tried[dtype] = tokens
        x = torch.randn(tokens, num_inputs, device=device.torch_device).to(DTYPES[dtype])
        weight = torch.randn(num_outputs, num_inputs, device=device.torch_device).to(DTYPES[dtype])
        return lambda: torch.nn.functional.linear(x, weight)

    return prepare
