"""How many tokens per second does a model write whose weights do not fit, against `accelerate`'s disk offload?

The same model, device budget, prompts and machine; greedy decoding; every variant in a process of its own, in turn. The
tokens must be equal. `accelerate` places what fits the budget (``device_map="auto"``, ``max_memory``) and offloads the
rest to a folder; it maps those files, so that on a machine with free memory they come from the page cache and not from
the disk, outside the budget. ``outsize`` has the same machine and budget, and its home where it likes: in free memory.
``accelerate, cold`` has the pages dropped after every token, as they are where memory is as short as the budget says;
beside it stands ``outsize, disk``, which reads with direct I/O, always from the disk. ``resident`` holds all of it.
AirLLM joins where ``--airllm`` names a Python that has it (`pip install airllm scipy sentencepiece` beside torch and
transformers): it holds a layer or two at a time whatever the budget, and reads through the page cache, too.

    python bench/bench_generate.py                   # 98M parameters in a quarter of their bytes: under 4 minutes
    python bench/bench_generate.py --airllm VENV/bin/python --tokens 6 --warm 2      # with the peer: under 5
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import common

OURS = ("outsize", "outsize, disk")
VARIANTS = ("resident", *OURS, "accelerate", "accelerate, cold")
AIRLLM = ("airllm", "airllm, cold")
# How many times as fast as a peer: where free memory holds the weights, and where nothing does.
TARGETS = {"accelerate": 1.0, "airllm": 1.0, "accelerate, cold": 2.0, "airllm, cold": 2.0}


def prompts(batch: int, length: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 8000, (batch, length), generator=generator)


def open_model(variant: str, args: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    directory = Path(args.directory)
    if variant in OURS:
        import outsize

        return outsize.load(
            directory / "model",
            dtype="fp32",
            trainable=False,
            device="cpu",
            device_memory=args.budget_bytes,
            home="disk" if variant.endswith("disk") else "auto",
            store_dir=directory / "home",
        )
    if variant == "resident":
        return AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32).eval()
    if variant in AIRLLM:
        from airllm import AutoModel

        return AutoModel.from_pretrained(
            str(directory / "model"),
            device="cpu",
            dtype=torch.float32,
            layer_shards_saving_path=str(directory / "shards"),
        )
    return AutoModelForCausalLM.from_pretrained(
        directory / "model",
        dtype=torch.float32,
        device_map="auto",
        max_memory={"cpu": args.budget_bytes},
        offload_folder=str(directory / "offload"),
    ).eval()


def drop_pages(directory: Path) -> None:
    """Have the kernel forget the cached pages of all files below ``directory``."""
    for path in directory.rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 16:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


class Times:
    """A streamer that notes when tokens come, and drops pages where asked to."""

    def __init__(self, dropped: Path | None) -> None:
        self.at: list[float] = []
        self._dropped = dropped

    def put(self, value: Any) -> None:
        if self._dropped is not None:
            drop_pages(self._dropped)
        self.at.append(time.perf_counter())

    def end(self) -> None:
        pass


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    directory = Path(args.directory)
    model = open_model(args.variant, args)
    times = Times(directory if args.variant.endswith("cold") else None)
    before = common.Usage.now()
    written = model.generate(
        prompts(args.batch, args.length),
        max_new_tokens=args.tokens,
        do_sample=False,
        use_cache=True,
        streamer=times,
        eos_token_id=None,
        pad_token_id=0,
    )
    used = common.Usage.now() - before
    # The streamer is given the prompt first; the first tokens fill caches and decide what stays.
    passes = [end - begin for begin, end in pairwise(times.at)][args.warm :]
    spread = common.Spread.of(passes)
    result: dict[str, Any] = {
        "tokens_per_s": args.batch / spread.median,
        "pass_s": [spread.low, spread.median, spread.high],
        "tokens": written.tolist(),
        "disk_bytes_per_pass": used.read_bytes / args.tokens,
        "peak_rss_bytes": common.peak_rss_bytes(),
        "threads": torch.get_num_threads(),
    }
    if args.variant in OURS:
        from dataclasses import asdict

        import outsize
        from outsize.wrapped.module import runner_of

        statistics = runner_of(model).inference_statistics()  # none where weights are used where they lie
        result["session"] = None if statistics is None else asdict(statistics)
        outsize.unwrap(model)
    return result


def spawn(args: argparse.Namespace, variant: str, batch: int, directory: Path, budget: int) -> dict[str, Any]:
    python = args.airllm if variant in AIRLLM else sys.executable
    command = [python, __file__, "--variant", variant, "--batch", batch, "--directory", directory]
    command += [
        "--budget-bytes",
        budget,
        "--tokens",
        args.tokens,
        "--length",
        args.length,
        "--warm",
        args.warm,
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    found = common.last_json(done.stdout)
    if done.returncode or found is None:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-100m")
    parser.add_argument("--share", type=float, default=0.25, help="budget, as a share of the weights")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--length", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--warm", type=int, default=4, help="passes that are not timed")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--work-dir", type=Path, default=None, help="on the disk that is measured")
    parser.add_argument("--airllm", type=Path, default=None, help="a Python that has AirLLM, as a peer")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--variant", choices=(*VARIANTS, *AIRLLM), help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    parser.add_argument("--budget-bytes", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant is not None:
        print(json.dumps(run(args)))
        return
    with tempfile.TemporaryDirectory(dir=args.work_dir) as name:
        directory = Path(name)
        made = [sys.executable, str(Path(__file__).parent / "shapes.py"), args.shape, name]
        subprocess.run(made, check=True, capture_output=True)
        weights = sum(path.stat().st_size for path in (directory / "model").glob("*.safetensors"))
        budget = int(weights * args.share)
        variants = (*VARIANTS, *AIRLLM) if args.airllm else VARIANTS
        found = {
            batch: {variant: spawn(args, variant, batch, directory, budget) for variant in variants}
            for batch in args.batches
        }
    rows, summary = [], {}
    for batch, by_variant in found.items():
        want = by_variant["resident"].get("tokens")
        for variant, one in by_variant.items():
            ours = by_variant["outsize, disk" if variant.endswith(("cold", "disk")) else "outsize"]
            rate = common.ratio(ours.get("tokens_per_s"), one.get("tokens_per_s"))
            equal = one.pop("tokens", None) == want
            one["equal_tokens"], one["outsize_is_times_as_fast"] = equal, rate
            read, peak = one.get("disk_bytes_per_pass", 0) / 1e6, one.get("peak_rss_bytes", 0) / 2**20
            cells = [f"{variant}, batch {batch}", one.get("tokens_per_s"), rate, equal, read, peak]
            rows.append([*cells, one.get("error")])
        summary[batch] = by_variant
    headers = ["variant", "tokens/s", "outsize is times", "equal", "MB read per pass", "peak MiB", "error"]
    title = f"{args.shape}, {weights / 1e6:.0f} MB of weights, budget {budget / 1e6:.0f} MB"
    common.print_table(headers, rows, title)
    compared = [
        (summary[b][variant]["outsize_is_times_as_fast"], target)
        for b in args.batches
        for variant, target in TARGETS.items()
        if variant in variants
    ]
    result = {
        "machine": common.machine(),
        "weights_bytes": weights,
        "budget_bytes": budget,
        "by_batch": {str(batch): values for batch, values in summary.items()},
        "targets": TARGETS,
        "reached": all(value is not None and value >= target for value, target in compared),
    }
    common.finish(result, args.output)


if __name__ == "__main__":
    main()
