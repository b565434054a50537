"""How many tokens per second are scored by a model that comes from disk, against `accelerate`'s disk offload?

The same texts, model and machine, in one process, one after the other. `accelerate` brings every layer up for every
batch, `outsize.score` once for all texts of a wave. Batches are the same, of texts of one length, and so are logprobs.
`accelerate` maps its files, which come from the page cache where memory is free (``warm``); ``cold`` drops them before
every batch, as memory as short as the device's budget does; `outsize` reads past that cache.

The roofline is the slower of two bounds, each measured here: the same texts by the resident model, in the batch that is
fastest of those tried, and one visit to the weights at the rate at which the disk gives the file. A machine's speed
drifts by more than what is asked for, so a share is of neighbours in time: each turn of `outsize` lies between two of
the resident model, and is held to their mean. Shares are the median of all turns, with the least and the most; the
first scoring of a model that was just opened is told apart (``first_s``). ``share_in_cpu_seconds`` is of the time that
the processor worked, all threads and reading included, which other programs on the machine change less. Where computing
alone takes more than half of `accelerate`'s time, nothing can be twice as fast (``bound_times``).

    python bench/bench_score.py                      # 36M parameters, batches of 128, 512 and 1,024 tokens: 5 minutes
"""

import argparse
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
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


def offloaded(directory: Path) -> Any:
    """The model whose layers `accelerate` brings up from files."""
    import torch
    from accelerate import disk_offload
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory / "model").eval()
    disk_offload(model, str(directory / "offloaded"), execution_device=torch.device("cpu"))
    os.sync()
    return model


def timed(model: Any, groups: Sequence[Any], cold: Path | None = None) -> tuple[float, list[list[float]]]:
    """Seconds and logprobs of groups of texts; of a model whose files are dropped before each, where named."""
    import torch

    found, began = [], time.perf_counter()
    with torch.no_grad():
        for ids in groups:
            if cold is not None:
                drop(cold)
            found += logprobs_of(model, ids)
    return time.perf_counter() - began, found


def with_outsize(model: Any, groups: Sequence[Any]) -> tuple[float, list[list[float]], dict[str, Any]]:
    import outsize
    from outsize.wrapped.writing.scoring import ScoringFigures

    figures = ScoringFigures()
    texts = [row for ids in groups for row in ids.tolist()]
    began = time.perf_counter()
    found = [list(one.tokens) for one in outsize.score(model, texts, figures=figures)]
    seconds = time.perf_counter() - began
    told = {**asdict(figures), "predicted_tokens_per_s": figures.predicted_tokens_per_s}
    return seconds, found, told


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "least": round(min(values), 3),
        "most": round(max(values), 3),
    }


def measure(directory: Path, plain: Any, length: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the grid: batches of one length. Everybody in turn; a ratio is of neighbours in time."""
    import torch

    import outsize
    from outsize.wrapped.module import runner_of

    generator = torch.Generator().manual_seed(0)
    shape = (args.tokens // (length * args.rows), args.rows, length)
    groups = list(torch.randint(3, 2048, shape, generator=generator))
    num_tokens = shape[0] * shape[1] * shape[2]
    weights = sum(path.stat().st_size for path in (directory / "model").glob("*.safetensors"))
    rival = offloaded(directory)
    model = outsize.load(
        directory / "model", dtype="fp32", trainable=False, device="cpu", device_memory=args.budget_bytes,
        home="disk", store_dir=directory / f"home{length}",
    )  # fmt: skip
    rows = sorted({args.rows, *(max(tokens // length, 1) for tokens in (128, 512, 2048))})
    batches = min(  # that are fastest in memory
        (list(torch.cat(groups).split(count)) for count in rows), key=lambda each: timed(plain, each)[0]
    )
    first_s, found, _ = with_outsize(model, groups)
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    cpu: dict[str, list[float]] = {name: [] for name in NAMES[2:]}
    disk = [disk_bytes_per_s(directory / "model")]
    seconds["resident"].append(timed(plain, batches)[0])
    told: dict[str, Any] = {}
    for turn in range(args.turns):
        if turn < args.turns_of_accelerate:
            took, want = timed(rival, groups)
            seconds["accelerate, warm"].append(took)
            took, want = timed(rival, groups, directory / "offloaded")
            seconds["accelerate, cold"].append(took)
            seconds["resident"][-1] = timed(plain, batches)[0]  # the neighbour of what comes next
        cpu_began = time.process_time()
        took, found, told = with_outsize(model, groups)
        cpu["outsize, disk"].append(time.process_time() - cpu_began)
        seconds["outsize, disk"].append(took)
        cpu_began = time.process_time()
        seconds["resident"].append(timed(plain, batches)[0])
        cpu["resident"].append(time.process_time() - cpu_began)
        disk.append(disk_bytes_per_s(directory / "model"))
    runner_of(model).close()
    ours, resident = seconds["outsize, disk"], seconds["resident"]
    bounds = [  # computing before and after a turn, and the disk likewise
        max((resident[turn] + resident[turn + 1]) / 2, weights / ((disk[turn] + disk[turn + 1]) / 2))
        for turn in range(args.turns)
    ]
    times = {
        how: [rival_s / own for rival_s, own in zip(seconds[f"accelerate, {how}"], ours, strict=False)]
        for how in ("cold", "warm")
    }
    middle = {name: statistics.median(each) for name, each in seconds.items()}
    roofline_s = statistics.median(bounds)
    return {
        "batch_tokens": length * args.rows,
        "num_tokens": num_tokens,
        "resident_rows": len(batches[0]),
        "seconds": {name: [round(one, 3) for one in each] for name, each in seconds.items()},
        "first_s": round(first_s, 3),
        "tokens_per_s": {name: round(num_tokens / took, 1) for name, took in middle.items()},
        "disk_bytes_per_s": round(statistics.median(disk)),
        "roofline_tokens_per_s": round(num_tokens / roofline_s, 1),
        "roofline_is": "computing" if weights / statistics.median(disk) < roofline_s else "disk",
        "cpu_seconds": {name: [round(one, 3) for one in each] for name, each in cpu.items()},
        "share_in_cpu_seconds": spread(
            [cpu["resident"][n] / cpu["outsize, disk"][n] for n in range(args.turns)]
        ),
        "share_of_roofline": spread([bound / own for bound, own in zip(bounds, ours, strict=True)]),
        "times_cold": spread(times["cold"]),
        "times_warm": spread(times["warm"]),
        "bound_times": round(middle["accelerate, cold"] / roofline_s, 3),
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
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--turns-of-accelerate", type=int, default=2)
    parser.add_argument("--output", type=Path)
    import outsize  # noqa: F401 - before torch, whose threads would spin while they wait

    args = parser.parse_args()
    import torch
    from transformers import LlamaForCausalLM

    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        make_model(directory / "model")
        plain = LlamaForCausalLM.from_pretrained(directory / "model").eval()
        grid = [measure(directory, plain, length, args) for length in args.lengths]
    common.print_table(
        ["tokens of a batch", *NAMES, "times cold", "at most", "of the roofline"],
        [
            [
                str(row["batch_tokens"]),
                *(f"{row['tokens_per_s'][name]:.0f}" for name in NAMES),
                f"{row['times_cold']['median']:.2f}",
                f"{row['bound_times']:.2f}",
                f"{row['share_of_roofline']['median']:.2f}",
            ]
            for row in grid
        ],
    )
    result = {
        "machine": common.machine(),
        "grid": grid,
        "target_cold": TARGET,
        "target_share": TARGET_SHARE,
        "share_met": all(row["share_of_roofline"]["median"] >= TARGET_SHARE for row in grid),
        # Of batches at which computing allows that.
        "cold_met": all(
            row["times_cold"]["median"] >= TARGET for row in grid if row["bound_times"] >= TARGET
        ),
        "threads": torch.get_num_threads(),
        "arguments": {name: value for name, value in vars(args).items() if name != "output"},
    }
    common.finish(result, args.output)


if __name__ == "__main__":
    main()
