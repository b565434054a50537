"""Time codecs on a device: one block of an 8B model decoded by Triton and by torch, beside a copy of as many bytes.

Prints one JSON line: of each codec GB/s of bf16 that decoding makes, and how many kernels that takes.

    python bench/gpu/bench_decode.py
    python bench/gpu/bench_decode.py --numel 1000000 --device cpu     # that it runs, without a GPU
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from outsize.codecs.codec import device_kernels, open_codec

BLOCK_ELEMENTS = 218_112_000  # matrices and norms of a layer of Llama 3 8B
NAMES = ("nf4", "nf4-double", "int8", "fp8", "lossless4", "lossless3")


def best_s(work: Callable[[], object], device: str, repeats: int = 5) -> float:
    """Return the least seconds of ``work``, the host's part included, once it has run before."""
    wait = torch.accelerator.synchronize if device != "cpu" else lambda: None
    seconds = []
    for _ in range(1 + repeats):
        wait()
        started = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def count_kernels(work: Callable[[], object]) -> int:
    """Return how many kernels and copies ``work`` has a GPU run."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        work()
        torch.accelerator.synchronize()
    # Calls of the host and what the profiler does itself are events as well.
    return sum(event.count for event in seen.key_averages() if event.device_time_total > 0)


def measure(work: Callable[[], object], num_bytes: int, device: str) -> dict[str, Any]:
    row = {"gb_per_s": round(num_bytes / best_s(work, device) / 1e9, 1)}
    return row | ({} if device == "cpu" else {"kernels": count_kernels(work)})


def decoded(name: str, source: Tensor, device: str) -> dict[str, Any]:
    codec = open_codec(name)
    room = torch.empty(codec.spec.max_bytes(source.numel(), "bf16"), dtype=torch.uint8)
    encoded = room[: codec.encode(source, room)].to(device)
    into, rows = torch.empty_like(source, device=device), {}
    for label, kernels in (("triton", device_kernels(torch.device(device))), ("torch", None)):
        if label == "torch" or kernels is not None:
            rows[label] = measure(partial(codec.by(kernels).decode, encoded, into), source.nbytes, device)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--numel", type=int, default=BLOCK_ELEMENTS)
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    source = torch.empty(args.numel, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)
    there, into = source.to(args.device), torch.empty_like(source, device=args.device)
    rows = {"copy": measure(lambda: into.copy_(there), source.nbytes, args.device)}
    rows |= {name: decoded(name, source, args.device) for name in NAMES}
    card = torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device
    print(json.dumps({"device": card, "torch": torch.__version__, "elements": args.numel, "decode": rows}))


if __name__ == "__main__":
    main()
