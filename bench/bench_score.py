"""How many tokens per second are scored by a model that comes from disk, against `accelerate`'s disk offload?

The same texts, model and machine, in one process, one after the other. `accelerate` brings every layer up for every
batch, `outsize.score` once for all texts of a wave. Batches are the same, of texts of one length, and so are logprobs.
`accelerate` maps its files, which come from the page cache where memory is free (``warm``); ``cold`` drops them before
every batch, as memory as short as the device's budget does; `outsize` reads past that cache.

    python bench/bench_score.py                      # 36M parameters, 8,192 tokens: under 2 minutes
"""

import argparse
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


def make_model(directory: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=512,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)


def drop(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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
            logprobs = model(ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
            found += logprobs.gather(-1, ids[:, 1:, None])[..., 0].tolist()
    return len(found) * groups[0].shape[1] / (time.perf_counter() - began), found


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
    found = [list(one.tokens) for one in outsize.score(model, texts, figures=figures)]
    runner_of(model).close()
    told = {**asdict(figures), "predicted_tokens_per_s": figures.predicted_tokens_per_s}
    return figures.tokens_per_s, found, told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--budget-bytes", type=int, default=96 * 2**20)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    import torch

    generator = torch.Generator().manual_seed(0)
    groups = list(torch.randint(3, 2048, (args.groups, args.rows, args.length), generator=generator))
    rates: dict[str, list[float]] = {"accelerate, warm": [], "accelerate, cold": [], "outsize, disk": []}
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        make_model(directory / "model")
        for _ in range(args.repeats):
            for name in ("accelerate, warm", "accelerate, cold"):
                rate, want = with_accelerate(directory, groups, cold=name.endswith("cold"))
                rates[name].append(rate)
            rate, found, told = with_outsize(directory, groups, args.budget_bytes)
            rates["outsize, disk"].append(rate)
    differ = max(
        abs(a - b) for one, other in zip(found, want, strict=True) for a, b in zip(one, other, strict=True)
    )
    best = {name: max(each) for name, each in rates.items()}
    common.print_table(
        ["", "tokens/s", "times"],
        [[name, f"{rate:.0f}", f"{best['outsize, disk'] / rate:.2f}"] for name, rate in best.items()],
    )
    result = {
        "tokens_per_s": rates,
        "times_cold": best["outsize, disk"] / best["accelerate, cold"],
        "times_warm": best["outsize, disk"] / best["accelerate, warm"],
        "target_cold": TARGET,
        "largest_difference_of_a_logprob": differ,
        "outsize": told,
        "threads": torch.get_num_threads(),
        "arguments": {name: value for name, value in vars(args).items() if name != "output"},
    }
    common.finish(result, args.output)


if __name__ == "__main__":
    main()
