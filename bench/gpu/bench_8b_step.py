"""A full training step of an 8B-shaped Llama with random weights under a cap of device memory: 24 GB, or what is free.

Width, heads and vocabulary are those of an 8B Llama; layers are as many as host memory holds at 18 bytes per parameter
(32 make 8B), or as ``--layers`` says. The step is the real one: bf16, fp32 masters, global norm, AdamW on the host. Its
timeline is kept: open it in Perfetto. Tokens per second are compared with the interval that `outsize plan` gives.

    python bench/gpu/bench_8b_step.py
    python bench/gpu/bench_8b_step.py --tiny --device emulated:1     # that it runs, without a GPU
"""

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outsize.accelerators import Devices
from outsize.streamed.spec import RunSpec

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
import common
import psutil
import torch
from random_weights import RandomWeights

from outsize.config import Config, load_config
from outsize.data.batch import Batch
from outsize.hardware.cards import known_card
from outsize.planner.simulate.simulator import Timeline
from outsize.reporting.html_page import to_chrome
from outsize.session.job.machine import available_ram_bytes
from outsize.session.job.prepare import Job, prepare
from outsize.session.process_settings import borrowed_torch
from outsize.session.steps import StepOutcome
from outsize.session.stream import StreamedTrainer
from outsize.units import parse_bytes

SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
}
FULL_LAYERS = 32
BYTES_PER_PARAMETER = 18
# For the process itself, saved activations, and whatever else runs.
HOST_RESERVE_BYTES = 20 * 2**30
# Of the device: the cap, and the share of what is free that it may be.
CAP_BYTES, FREE_SHARE = 24 * 10**9, 0.85
# Dense bf16, from the data sheets, FLOP/s.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "4090": 165e12, "B200": 2250e12}


def parameters(shape: dict[str, int], layers: int) -> tuple[int, int]:
    """Parameters of all units, and of those that multiply every token (all but the embedding)."""
    width, inner, vocabulary = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    keys = width * shape["num_key_value_heads"] // shape["num_attention_heads"]
    block = 2 * width * width + 2 * width * keys + 3 * width * inner + 2 * width
    return layers * block + 2 * vocabulary * width + width, layers * block + vocabulary * width


def layers_that_fit(shape: dict[str, int]) -> int:
    room = available_ram_bytes() - HOST_RESERVE_BYTES
    fitting = (n for n in range(FULL_LAYERS, 0, -1) if parameters(shape, n)[0] * BYTES_PER_PARAMETER <= room)
    return next(fitting, 1)


def flops_per_token(shape: dict[str, int], layers: int, seq_len: int) -> float:
    """Forward and backward of a token without the recompute: 6 per parameter, and causal attention (half of S × S)."""
    return 6.0 * parameters(shape, layers)[1] + 6.0 * layers * shape["hidden_size"] * seq_len


def configure(args: argparse.Namespace, shape: dict[str, int], directory: Path) -> Config:
    from transformers import LlamaConfig

    LlamaConfig(**shape, num_hidden_layers=args.layers, tie_word_embeddings=False).save_pretrained(directory)
    settings = [
        f"model.path={directory}",
        f"model.dtype={args.dtype}",
        "data.path=random",
        f"data.seq_len={args.seq_len}",
        f"train.steps={args.steps}",
        f"train.tokens_per_step={args.seq_len * args.microbatches * args.sequences}",
        f"train.microbatches={args.microbatches}",
        f"train.head_chunk_tokens={args.head_chunk_tokens}",
        f"train.deterministic={args.deterministic == 'on'}",
        f"memory.device={args.device}",
        f"memory.device_memory={args.device_memory}",
        f"memory.home={args.home}",
        f"memory.host_memory={available_ram_bytes() - HOST_RESERVE_BYTES // 2}",
    ]
    if args.store_dir:
        settings.append(f"memory.store_dir={args.store_dir}")
    return load_config(None, settings)


def batches(config: Config, vocabulary: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    while True:
        ids = torch.randint(
            0, vocabulary, (config.sequences_per_step, config.data.seq_len), generator=generator
        )
        yield Batch(input_ids=ids, labels=ids, attention_mask=None)


def cap_device(device: str, num_bytes: int) -> None:
    """Let torch refuse what goes beyond the cap; the CUDA context itself is not torch's and comes on top."""
    if device.startswith("cuda"):
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)


def default_cap(device: str) -> str:
    """Return what the cap is where nobody has named one: a desktop may hold a part of a card of 24 GB."""
    if not device.startswith("cuda"):
        return str(CAP_BYTES)
    free, _ = torch.cuda.mem_get_info(device)
    return str(min(CAP_BYTES, int(FREE_SHARE * free)))


def run(args: argparse.Namespace, config: Config, directory: Path) -> dict[str, Any]:
    began = time.perf_counter()
    prepared = prepare(RunSpec.of(config, directory), print, RandomWeights())
    print(prepared.plan.table, flush=True)
    prepared_s = time.perf_counter() - began
    with StreamedTrainer(prepared, Path(config.memory.store_dir or directory)) as trainer:
        opened_s = time.perf_counter() - began - prepared_s
        trainer.fill()
        filled_s = time.perf_counter() - began - prepared_s - opened_s
        print(f"prepared {prepared_s:.1f} s, opened {opened_s:.1f} s, filled {filled_s:.1f} s", flush=True)
        outcomes: list[StepOutcome] = []
        links, marks = [link(trainer)], []
        given = itertools.islice(batches(config, prepared.hf_config.vocab_size), args.steps)
        for outcome in trainer.steps(given):
            outcomes.append(outcome)
            links.append(link(trainer))
            marks.append(time.perf_counter())
            print(f"step {outcome.number + 1}: loss {outcome.loss:.4f}, {outcome.seconds:.2f} s", flush=True)
            if outcome.number == args.steps - 2:
                trainer.take_timeline()
        trainer.settle()
        tail_s = time.perf_counter() - marks[-1]
        timeline = trainer.take_timeline()
        arena = trainer.session.host.statistics()
    steady = common.Spread.of(o.seconds for o in (outcomes[1:] or outcomes))
    return {
        **describe(args, prepared, steady.median),
        "losses": [outcome.loss for outcome in outcomes],
        "finite": all(math.isfinite(outcome.loss) for outcome in outcomes),
        "step_s": vars(steady),
        "optimizer_tail_s": tail_s,
        "bytes_up": links[-1][0] - links[-2][0],
        "bytes_down": links[-1][1] - links[-2][1],
        "prepare_s": prepared_s,
        "open_s": opened_s,
        "fill_s": filled_s,
        "pinned_bytes": arena.pinned_bytes,
        "pageable_fallbacks": arena.num_pageable_fallbacks,
        **lanes_of(timeline, links),
        "timeline": keep(args, timeline),
    }


def link(trainer: StreamedTrainer) -> tuple[int, int]:
    engine = trainer.engine
    saved = engine.activations
    return engine.weights.bytes_up + saved.bytes_up, engine.gradients.bytes_down + saved.bytes_down


def describe(args: argparse.Namespace, prepared: Job, step_s: float) -> dict[str, Any]:
    shape = TINY if args.tiny else SHAPE
    tokens = prepared.config.tokens_per_step
    flops = flops_per_token(shape, args.layers, args.seq_len) * tokens
    found: dict[str, Any] = {
        "layers": args.layers,
        "full_layers": FULL_LAYERS,
        "parameters": prepared.split.spec.num_parameters,
        "tokens_per_step": tokens,
        "tokens_per_s": tokens / step_s,
        "model_flops_per_s": flops / step_s,
        "planned_device_bytes": prepared.plan.total_bytes("device"),
        "planned_host_bytes": prepared.plan.total_bytes("host"),
        "classes": prepared.plan.memory["device"],
        "traffic": vars_of(prepared),
        "peak_rss_bytes": common.peak_rss_bytes(),
    }
    if args.device.startswith("cuda"):
        name = torch.cuda.get_device_name(args.device)
        peak = next((value for key, value in PEAK_FLOPS.items() if key in name), None)
        free, total = torch.cuda.mem_get_info(args.device)
        (args.results / f"8b_step_{args.label}_memory.txt").write_text(torch.cuda.memory_summary(args.device))
        statistics = torch.cuda.memory_stats(args.device)
        found |= {
            "mfu": common.ratio(flops / step_s, peak),
            "cap_bytes": prepared.machine.device_bytes,
            "max_reserved_bytes": torch.cuda.max_memory_reserved(args.device),
            "max_allocated_bytes": torch.cuda.max_memory_allocated(args.device),
            "used_on_device_bytes": total - free,
            "allocator_retries": statistics.get("num_alloc_retries"),
            "allocator_out_of_memory": statistics.get("num_ooms"),
            "allocator_settings": os.environ.get("PYTORCH_ALLOC_CONF", ""),
            "attention": attention_of(args, shape),
        }
    return found


def attention_of(args: argparse.Namespace, shape: dict[str, int]) -> dict[str, Any]:
    """Return which kernels the device computes attention by, and how many tensors a forward saves for its backward."""
    from torch.profiler import ProfilerActivity, profile

    heads, keys = shape["num_attention_heads"], shape["num_key_value_heads"]
    width = shape["hidden_size"] // heads
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[args.dtype]
    q, k, v = (
        torch.randn(1, count, args.seq_len, width, device=args.device, dtype=dtype, requires_grad=True)
        for count in (heads, keys, keys)
    )
    saved: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out.sum().backward()
        torch.cuda.synchronize(args.device)
    kernels = sorted({e.key for e in profiled.key_averages() if e.self_device_time_total > 0})
    return {"kernels": kernels, "saved_tensors": len(saved)}


def planned(args: argparse.Namespace, directory: Path, tokens_per_s: float) -> dict[str, Any]:
    """What `outsize plan` says of this step on such a GPU, which it has not seen, and whether that was true."""
    name = args.card or torch.cuda.get_device_name(args.device)
    card = known_card(name)
    if card is None:
        return {"why_not": f"{name} is in no list"}
    asked = {
        "--gpus": f"1x{card.name}",
        "--dtype": args.dtype,
        "--seq-len": args.seq_len,
        "--tokens-per-step": args.seq_len * args.microbatches * args.sequences,
        "--microbatches": args.microbatches,
        "--home": args.home,
        "--device-memory": args.device_memory,
        "--ram": psutil.virtual_memory().total,
        "--cpu-cores": len(os.sched_getaffinity(0)),
    }
    command = [sys.executable, "-m", "outsize", "plan", str(directory), "--no-advice", "--json"]
    command += [str(word) for pair in asked.items() for word in pair]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = common.last_json(done.stdout)
    if done.returncode or told is None:
        return {"why_not": done.stderr.strip()}
    low, high = told["interval"]
    print(f"planned {low:.0f} to {high:.0f} tokens/s, measured {tokens_per_s:.0f}", flush=True)
    return {
        "tokens_per_s": told["tokens_per_s"],
        "interval": [low, high],
        "measured_lies_in_it": low <= tokens_per_s <= high,
    }


def vars_of(prepared: Job) -> dict[str, int]:
    traffic = prepared.plan.traffic
    return {
        "up": traffic.up,
        "down": traffic.down,
        "disk_read": traffic.disk_read,
        "disk_written": traffic.disk_written,
    }


def lanes_of(timeline: Timeline, links: list[tuple[int, int]]) -> dict[str, Any]:
    """Shares of the last step, and what the links carried while they were busy."""
    busy = {lane: timeline.busy_s(lane) for lane in timeline.lanes}
    up, down = (links[-1][i] - links[-2][i] for i in (0, 1))
    return {
        "span_s": timeline.span_s,
        "busy_s": busy,
        "stall_share": timeline.stall_share(),
        "stall_s_by_owner": timeline.stall_s_by_owner(),
        "gb_per_s_up_while_busy": common.ratio(up / 1e9, busy.get("up:w0")),
        "gb_per_s_down_while_busy": common.ratio(down / 1e9, busy.get("down:w0")),
    }


def keep(args: argparse.Namespace, timeline: Timeline) -> str:
    path = args.results / f"8b_step_{args.label}_timeline.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_chrome(timeline)), encoding="utf-8")
    return path.name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--device-memory", help="the cap; default: 24 GB, or 85 % of what is free")
    parser.add_argument("--home", choices=("host", "disk"), default="host")
    parser.add_argument("--store-dir", help="of a disk home")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument(
        "--layers", type=int, help=f"{FULL_LAYERS} make 8B; default: as many as host memory holds"
    )
    parser.add_argument("--most-layers", type=int, default=FULL_LAYERS)
    parser.add_argument("--deterministic", choices=("on", "off"), default="on")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=1, help="per microbatch")
    parser.add_argument("--head-chunk-tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent.parent / "results")
    parser.add_argument("--card", help="that `outsize plan` is asked about; default: the device's own name")
    parser.add_argument("--label", help="for the names of the files; default: machine and month")
    args = parser.parse_args()
    shape = TINY if args.tiny else SHAPE
    machine = common.machine()
    args.layers = args.layers or min(args.most_layers, 4 if args.tiny else layers_that_fit(shape))
    args.label = args.label or f"{(machine['gpu'] or 'cpu').lower().replace(' ', '_')}_{machine['month']}"
    args.device_memory = args.device_memory or default_cap(args.device)
    args.results.mkdir(parents=True, exist_ok=True)
    cap_device(args.device, parse_bytes(args.device_memory))
    with (
        tempfile.TemporaryDirectory() as name,
        borrowed_torch(deterministic=args.deterministic == "on", devices=Devices.parse(args.device)),
    ):
        result = run(args, configure(args, shape, Path(name)), Path(name))
        if args.card or args.device.startswith("cuda"):
            result["plan"] = planned(args, Path(name), result["tokens_per_s"])
    rows = [(key, value) for key, value in result.items() if isinstance(value, int | float | str)]
    common.print_table(
        ("figure", "value"), rows, title=f"{args.layers} of {FULL_LAYERS} layers on {args.device}"
    )
    settings = {key: str(value) for key, value in vars(args).items()}
    common.finish(
        {"bench": "8b_step", "machine": machine, "settings": settings, **result},
        args.results / f"8b_step_{args.label}.json",
    )


if __name__ == "__main__":
    main()
