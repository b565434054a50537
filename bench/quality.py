"""What a lossy choice does to a run: loss curves of a small GPT on real text, variant by variant, against an exact one.

A GPT-2 of three blocks learns the source of Python's standard library, byte by byte. A benchmark says how a variant
trains; `compare` runs every variant from several seeds, and says how far off the exact one each ends.
"""

import argparse
import statistics
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import common
import torch
from transformers import AutoModelForCausalLM, GPT2Config

WIDTH, BLOCKS, SEQ_LEN, SEQUENCES = 64, 3, 64, 8
NUM_BYTES = 2_000_000
# Losses are means over so many last steps: single ones jump from batch to batch.
WINDOW = 50
CURVE_POINTS = 50

# Yields each variant and its loss at every step, for a seed.
Runs = Callable[[int], Iterable[tuple[str, list[float]]]]


def fresh_model(seed: int, **settings: Any) -> Any:
    """Return a model with the weights of ``seed``, no dropout, and ``settings`` of its config."""
    torch.manual_seed(seed)
    shape = {"n_embd": WIDTH, "n_layer": BLOCKS, "n_head": 4, "vocab_size": 256, "n_positions": SEQ_LEN}
    config = GPT2Config(**{**shape, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **settings})
    return AutoModelForCausalLM.from_config(config)


def text() -> bytearray:
    """Return the source of the standard library, as much as is trained on."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += path.read_bytes()
    return found[:NUM_BYTES]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that `compare` needs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    return parser


def compare(what: str, exact: str, runs: Runs, args: argparse.Namespace) -> None:
    """Run all variants from every seed, print how far off they end, and keep their curves.

    Args:
        what: the kind of variant, e.g. ``state``, in the name of the benchmark and in its result.
        exact: the variant that the others are held against, the first of each seed.
        runs: of one seed; the same variants each time.
        args: of `arguments`.
    """
    window, every = min(WINDOW, args.steps), max(1, args.steps // CURVE_POINTS)
    finals: dict[str, list[float]] = {}
    off: dict[str, list[float]] = {}
    curves: list[dict[str, Any]] = []
    result = {
        "bench": f"{what}_quality",
        "machine": common.machine(),
        "steps": args.steps,
        "finals": finals,
        "off": off,
        "curves": curves,
    }
    for seed in range(args.seeds):
        for name, losses in runs(seed):
            final = statistics.fmean(losses[-window:])
            finals.setdefault(name, []).append(final)
            off.setdefault(name, []).append(final / finals[exact][seed] - 1)
            points = [
                round(statistics.fmean(losses[at : at + every]), 5) for at in range(0, len(losses), every)
            ]
            curves.append({"seed": seed, what: name, "every": every, "loss": points})
            print(f"seed {seed}, {name}: {final:.4f}", file=sys.stderr)
            common.keep(result, args.output)  # all of it takes hours
    common.print_table(
        (what, f"loss of the last {window} steps", f"off {exact}, mean", "worst"),
        [
            (
                name,
                " ".join(f"{loss:.4f}" for loss in values),
                f"{statistics.fmean(off[name]):+.2%}",
                f"{max(off[name], key=abs):+.2%}",
            )
            for name, values in finals.items()
        ],
    )
    common.finish(result, args.output)
