"""What a step computes and what the device promises, for MFU: the one over the other, in the time that it took."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from outsize.accelerators import Devices
from outsize.hardware.streaming import slower_than_fp32
from outsize.runtime.forward.binding import TORCH_DTYPE
from outsize.session.job.device_presets import preset_of
from outsize.session.job.prepare import Job

# A square product of this size takes a core some milliseconds and its operands fit into caches.
_SIDE, _REPEATS = 512, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """What the devices of a run compute at most.

    Attributes:
        flops_per_s: of all of them together; None where it is not known.
        source: whose figure that is.
        fp32_flops_per_s: what a CPU computes in fp32, measured where a run takes another dtype; None elsewhere.
    """

    flops_per_s: float | None
    source: str
    fp32_flops_per_s: float | None = None

    def slower_than_fp32(self) -> float | None:
        """Return how often as long as in fp32 products of the run take; None where they are faster, or not known."""
        return slower_than_fp32(self.flops_per_s, self.fp32_flops_per_s)


def step_flops(prepared: Job) -> float | None:
    """Return the FLOPs of forward and backward of a step, without recompute; None where they are not counted.

    That is where a trial sees no operations, and where steps differ in length.

    A backward computes the gradients of inputs, as many FLOPs as the forward, and those of trained weights, as many
    again: three forwards where all weights train, two where nearly all are frozen.
    """
    config, spec = prepared.config, prepared.split.spec
    if config.data.is_grouped:
        return None
    forward = sum(prepared.measured.flops.forward(prepared.num_sequences, config.data.seq_len))
    if not forward:
        return None
    return (2 + spec.num_trainable / spec.num_parameters) * forward


def peak_of(devices: Devices, dtype: str) -> Peak:
    """Return what ``devices`` compute at most: by the data sheet of a GPU, measured on a CPU."""
    if devices.accelerated:
        return promised(devices.titles, dtype)
    return Peak(
        flops_per_s=_measured(TORCH_DTYPE[dtype], torch.get_num_threads()),
        source=f"measured: the best of {_REPEATS} products of {_SIDE} x {_SIDE} in {dtype} on all threads",
        fp32_flops_per_s=None if dtype == "fp32" else _measured(torch.float32, torch.get_num_threads()),
    )


def slow_products(peak: Peak, dtype: str) -> str:
    """Return what to say of a processor that multiplies faster in fp32 than in ``dtype``; empty where none does."""
    times = peak.slower_than_fp32()
    if times is None:
        return ""
    return (
        f"model.dtype: products in {dtype} take {times:.1f} times as long as in fp32 on this processor (measured now); "
        "fp32 computes a step faster, with twice the bytes of each weight"
    )


def promised(names: Sequence[str], dtype: str) -> Peak:
    """Return what the data sheets of GPUs, called as the driver calls them, promise together."""
    gpus = [preset_of(name) for name in names]
    figures = [gpu.peak_flops_per_s.get(dtype) for gpu in gpus if gpu is not None]
    known = [figure for figure in figures if figure is not None]
    if len(known) < len(names):
        return Peak(flops_per_s=None, source=f"no figure for {dtype} on {', '.join(dict.fromkeys(names))}")
    return Peak(flops_per_s=sum(figure.value for figure in known), source=known[0].source)


@cache
def _measured(dtype: torch.dtype, threads: int) -> float:
    """Return the FLOPs per second of products on as many ``threads`` as torch has; measured once in a process."""
    left, right = torch.ones(_SIDE, _SIDE, dtype=dtype), torch.ones(_SIDE, _SIDE, dtype=dtype)
    out = left @ right
    samples = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        torch.mm(left, right, out=out)
        samples.append(time.perf_counter() - began)
    return 2.0 * _SIDE**3 / min(samples)  # other work only takes from it
