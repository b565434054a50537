"""How many tokens per second are scored by a model that comes from disk, against `accelerate`'s disk offload?

The same texts, model and machine, in one process, one after the other. `accelerate` brings every layer up for every
batch, `outsize.score` once for all texts of a wave. Batches are the same, of texts of one length, and so are logprobs.
`accelerate` maps its files, which come from the page cache where memory is free (``warm``); ``cold`` drops them before
every batch, as memory as short as the device's budget does; `outsize` reads past that cache.

The roofline is the slower of two bounds, each measured here: the same texts by the resident model, in the batch that is
fastest of those tried, and one visit to the weights at the rate at which the disk gives the file. Where computing
alone takes more than half of `accelerate`'s time, nothing can be twice as fast (``bound_times``).

    python bench/bench_score.py                      # 36M parameters, batches of 128, 512 and 1,024 tokens: 5 minutes
"""

import argparse
import mmap
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import common

TARGET = 2.0  # times accelerate, from disk
TARGET_SHARE = 0.95  # of the roofline
READ_BYTES = 8 * 2**20
NAMES = ("accelerate, warm", "accelerate, cold", "outsize, disk", "resident")


def make_model(directory: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=1024,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)


def drop(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_bytes_per_s(folder: Path) -> float:
    """The rate at which the largest file of a folder is read past the page cache."""
    path = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    buffer = mmap.mmap(-1, READ_BYTES)
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        began, count = time.perf_counter(), 0
        while got := os.preadv(file, [buffer], count):
            count += got
        return count / (time.perf_counter() - began)
    finally:
        os.close(file)


def logprobs_of(model: Any, ids: Any) -> Any:
    logprobs = model(ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[:, 1:, None])[..., 0].tolist()


def with_accelerate(directory: Path, groups: list[Any], *, cold: bool) -> tuple[float, list[list[float]]]:
    import torch
    from accelerate import disk_offload
    from transformers import LlamaForCausalLM

    folder = directory / "offloaded"
    model = LlamaForCausalLM.from_pretrained(directory / "model").eval()
    disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    os.sync()
    found, began = [], time.perf_counter()
    with torch.no_grad():
        for ids in groups:
            if cold:
                drop(folder)
            found += logprobs_of(model, ids)
    return time.perf_counter() - began, found


def resident(directory: Path, groups: list[Any], rows: int) -> float:
    """Seconds of the model in memory for all texts, in batches of so many."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory / "model").eval()
    with torch.no_grad():
        logprobs_of(model, groups[0][:1])
        began = time.perf_counter()
        for ids in torch.cat(groups).split(rows):
            logprobs_of(model, ids)
    return time.perf_counter() - began


def with_outsize(
    directory: Path, groups: list[Any], budget: int
) -> tuple[float, list[list[float]], dict[str, Any]]:
    import outsize
    from outsize.wrapped.module import runner_of
    from outsize.wrapped.writing.scoring import ScoringFigures

    model = outsize.load(
        directory / "model", dtype="fp32", trainable=False, device="cpu", device_memory=budget, home="disk",
        store_dir=directory / "home",
    )  # fmt: skip
    figures = ScoringFigures()
    texts = [row for ids in groups for row in ids.tolist()]
    began = time.perf_counter()
    found = [list(one.tokens) for one in outsize.score(model, texts, figures=figures)]
    seconds = time.perf_counter() - began
    runner_of(model).close()
    told = {**asdict(figures), "predicted_tokens_per_s": figures.predicted_tokens_per_s}
    return seconds, found, told


def measure(directory: Path, length: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the grid: batches of one length, everybody in turn, the fastest of each taken."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (args.tokens // (length * args.rows), args.rows, length)
    groups = list(torch.randint(3, 2048, shape, generator=generator))
    num_tokens = shape[0] * shape[1] * shape[2]
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    disk, want, found, told = [], [], [], {}
    for _ in range(args.repeats):
        for name in NAMES[:2]:
            took, want = with_accelerate(directory, groups, cold=name.endswith("cold"))
            seconds[name].append(took)
        took, found, told = with_outsize(directory, groups, args.budget_bytes)
        seconds["outsize, disk"].append(took)
        batches = sorted({args.rows, *(max(tokens // length, 1) for tokens in (128, 512, 2048))})
        seconds["resident"].append(min(resident(directory, groups, rows) for rows in batches))
        disk.append(disk_bytes_per_s(directory / "model"))
    best = {name: min(each) for name, each in seconds.items()}
    weights = sum(path.stat().st_size for path in (directory / "model").glob("*.safetensors"))
    roofline_s = max(best["resident"], weights / max(disk))
    rates = {name: num_tokens / took for name, took in best.items()}
    return {
        "batch_tokens": length * args.rows,
        "num_tokens": num_tokens,
        "seconds": {name: [round(one, 3) for one in each] for name, each in seconds.items()},
        "tokens_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        "disk_bytes_per_s": round(max(disk)),
        "roofline_tokens_per_s": round(num_tokens / roofline_s, 1),
        "roofline_is": "computing" if roofline_s == best["resident"] else "disk",
        "share_of_roofline": round(roofline_s / best["outsize, disk"], 3),
        "times_cold": round(best["accelerate, cold"] / best["outsize, disk"], 3),
        "times_warm": round(best["accelerate, warm"] / best["outsize, disk"], 3),
        "bound_times": round(best["accelerate, cold"] / roofline_s, 3),
        "largest_difference_of_a_logprob": max(
            abs(a - b)
            for one, other in zip(found, want, strict=True)
            for a, b in zip(one, other, strict=True)
        ),
        "outsize": told,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--rows", type=int, default=1, help="texts in a batch of accelerate")
    parser.add_argument("--tokens", type=int, default=8192, help="of all texts")
    parser.add_argument("--budget-bytes", type=int, default=96 * 2**20)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    import torch

    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        make_model(directory / "model")
        grid = [measure(directory, length, args) for length in args.lengths]
    common.print_table(
        ["tokens of a batch", *NAMES, "times cold", "at most", "of the roofline"],
        [
            [
                str(row["batch_tokens"]),
                *(f"{row['tokens_per_s'][name]:.0f}" for name in NAMES),
                f"{row['times_cold']:.2f}",
                f"{row['bound_times']:.2f}",
                f"{row['share_of_roofline']:.2f}",
            ]
            for row in grid
        ],
    )
    result = {
        "grid": grid,
        "target_cold": TARGET,
        "target_share": TARGET_SHARE,
        "met": all(row["times_cold"] >= TARGET or row["share_of_roofline"] >= TARGET_SHARE for row in grid),
        "threads": torch.get_num_threads(),
        "arguments": {name: value for name, value in vars(args).items() if name != "output"},
    }
    common.finish(result, args.output)


if __name__ == "__main__":
    main()
