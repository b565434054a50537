"""What a device computes: large matrix products and attention, by dtype.

Matrix products of a given model's own shapes, as its linear layers do them.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from outsize.accelerators import Devices, synchronize
from outsize.hardware.readings import Measurement, explain
from outsize.hardware.streaming import ShapeRate
from outsize.model.sizes.model_spec import ModelSpec
from outsize.probing.effort import Effort, sample

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SIDES: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
_HEADS, _HEAD_DIM = 8, 128
_WIDTH = _HEADS * _HEAD_DIM
_SEQ_LENS: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)


def dtypes_of(device: Devices) -> tuple[str, ...]:
    """Return the compute dtypes that are timed; nobody trains in fp16 on a CPU, which does it one by one."""
    return tuple(DTYPES) if device.accelerated else ("fp32", "bf16")


def finisher(device: Devices) -> Callable[[], None]:
    """Return what waits for all work queued on ``device``."""
    return partial(synchronize, device.torch_device)


def measure_device_memory(device: Devices, effort: Effort) -> Measurement:
    """Return what ``a = b + s * c`` moves in the memory of a GPU, bytes per second, reads and writes together."""
    try:
        a, b, c = (torch.ones(effort.array_bytes // 4, device=device.torch_device) for _ in "abc")
        samples = sample(
            lambda: torch.add(b, c, alpha=3.0, out=a),
            **effort.sampling(),
            finish=finisher(device),
        )
    except RuntimeError as error:
        return Measurement.absent(f"triad on {device}: {explain(error)}")
    return Measurement.of((3 * a.nbytes / seconds for seconds in samples), "torch.add with alpha, fp32")


def measure_matmul(device: Devices, dtype: str, effort: Effort) -> Measurement:
    """Return the operations per second of ``n x n`` products, 2 n³ each, at the largest n that is quick enough.

    fp32 runs with the process's own settings, so without TF32 unless it was allowed.
    """

    def prepare(n: int) -> Callable[[], object]:
        a, b = (torch.randn(n, n, device=device.torch_device).to(DTYPES[dtype]) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    sides = _SIDES
    if device.is_cpu:  # three matrices beside everything else: each no larger than a DRAM array
        sides = tuple(n for n in _SIDES if n == _SIDES[0] or 4 * n * n <= effort.array_bytes)
    return measure_growing(
        device, effort, sides, prepare, lambda n: 2.0 * n**3, f"{dtype} n x n product, n ="
    )


def measure_attention(device: Devices, dtype: str, effort: Effort) -> Measurement:
    """Return the operations per second of causal attention forward, 8 heads of 128.

    ``2 s² h d`` operations: the two products take ``4 s² h d``, and the mask leaves half of it.
    """

    def prepare(s: int) -> Callable[[], object]:
        q, k, v = (
            torch.randn(1, _HEADS, s, _HEAD_DIM, device=device.torch_device).to(DTYPES[dtype])
            for _ in range(3)
        )
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def flops(s: int) -> float:
        return 2.0 * s * s * _WIDTH

    lengths = _SEQ_LENS
    if device.is_cpu:  # as of products: no tensor larger than a DRAM array
        lengths = tuple(s for s in _SEQ_LENS if s == _SEQ_LENS[0] or 4 * s * _WIDTH <= effort.array_bytes)
    return measure_growing(device, effort, lengths, prepare, flops, f"{dtype} causal attention, tokens =")


@torch.no_grad()
def measure_growing(
    device: Devices,
    effort: Effort,
    sizes: tuple[int, ...],
    prepare: Callable[[int], Callable[[], object]],
    flops: Callable[[int], float],
    what: str,
) -> Measurement:
    """Return what ``prepare(size)()`` does per second, at the first of ``sizes`` that takes ``effort.matmul_s``.

    Args:
        device: that is waited for.
        effort: how long.
        sizes: to try, from the smallest.
        prepare: makes the work of a size.
        flops: operations of a size.
        what: it is, for the source; the size is added.
    """
    finish = finisher(device)
    try:
        for size in sizes:
            work = prepare(size)
            work()
            finish()
            started = time.perf_counter()
            work()
            finish()
            if time.perf_counter() - started >= effort.matmul_s:
                break
        samples = sample(
            work,
            **effort.sampling(),
            finish=finish,
        )
    except RuntimeError as error:  # a dtype that the device lacks, or no memory left
        return Measurement.absent(f"{what}: {explain(error)}")
    return Measurement.of((flops(size) / seconds for seconds in samples), f"{what} {size}")


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
        tries_by_shape: dict[str, int] = {}
        measured = {
            dtype: measure_growing(
                device,
                effort,
                _TOKENS,
                _product(device, dtype, num_outputs, num_inputs, tries_by_shape),
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
                num_tokens=max(tries_by_shape.values()),
                flops_per_s=measured,
            )
        )
    return tuple(rates)


def _product(
    device: Devices, dtype: str, num_outputs: int, num_inputs: int, tries_by_shape: dict[str, int]
) -> Callable[[int], Callable[[], object]]:
    def prepare(tokens: int) -> Callable[[], object]:
        tries_by_shape[dtype] = tokens
        x = torch.randn(tokens, num_inputs, device=device.torch_device).to(DTYPES[dtype])
        weight = torch.randn(num_outputs, num_inputs, device=device.torch_device).to(DTYPES[dtype])
        return lambda: torch.nn.functional.linear(x, weight)

    return prepare
