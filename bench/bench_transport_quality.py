"""What do lossy codecs on the link do to a run? Loss curves of a small GPT on real text, against the exact run.

A GPT-2 of three blocks learns the source of Python's standard library, byte by byte, on one emulated device: from the
same weights and on the same batches exactly, with activations in int8, and with gradients in int4, to the nearest, by
chance, with error feedback, and with that in rotated groups. Every input of a unit leaves the device and comes back.
Targets, over three seeds: int8 activations within 0.5 % of the exact loss after 1,000 steps, int4 gradients with error
feedback within 2 %.

    OMP_NUM_THREADS=1 nice python bench/bench_transport_quality.py --output bench/results/transport_quality.json
"""

import argparse
import statistics
import sys
import sysconfig
import tempfile
import warnings
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from outsize.config import load_config
from outsize.train.prepare import prepare
from outsize.train.sources import open_dataset
from outsize.train.stream import StreamedTrainer

TRANSPORTS: dict[str, dict[str, str]] = {
    "exact": {},
    "activations int8": {"activations": "int8"},
    "gradients int4": {"gradients": "int4"},
    "gradients int4-stochastic": {"gradients": "int4-stochastic"},
    "gradients int4-ef": {"gradients": "int4-ef"},
    "gradients int4-hadamard-ef": {"gradients": "int4-hadamard-ef"},
}
WIDTH, BLOCKS, SEQ_LEN, SEQUENCES, MICROBATCHES = 64, 3, 64, 8, 2
NUM_BYTES = 2_000_000
# Losses are means over so many last steps: single ones jump from batch to batch.
WINDOW = 50
CURVE_POINTS = 50


def write_inputs(directory: Path, seed: int) -> None:
    """A fresh model of ``seed``, and bytes of the standard library as tokens."""
    torch.manual_seed(seed)
    shape = {"n_embd": WIDTH, "n_layer": BLOCKS, "n_head": 4, "vocab_size": 256, "n_positions": SEQ_LEN}
    config = GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        AutoModelForCausalLM.from_config(config).save_pretrained(directory / "model")
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
    np.save(directory / "tokens.npy", np.frombuffer(bytes(text[:NUM_BYTES]), np.uint8).astype(np.uint16))


def losses(directory: Path, seed: int, steps: int, transport: dict[str, str]) -> list[float]:
    settings = [
        f"model.path={directory / 'model'}",
        "model.dtype=fp32",
        f"data.path={directory / 'tokens.npy'}",
        "data.format=tokens",
        f"data.seq_len={SEQ_LEN}",
        f"train.steps={steps}",
        f"train.tokens_per_step={SEQ_LEN * SEQUENCES}",
        f"train.microbatches={MICROBATCHES}",
        f"train.seed={seed}",
        "optimizer.lr=1e-3",
        "optimizer.warmup_steps=20",
        "memory.device=emulated:1",
        "memory.device_memory=1GiB",
        "memory.home=host",
        "memory.host_memory=2GiB",
        "memory.offload=true",
        "memory.activations=recompute",  # what is kept on the device crosses no link
        *(f"transport.{crossing}={codec}" for crossing, codec in transport.items()),
    ]
    config = load_config(None, settings)
    with tempfile.TemporaryDirectory(dir=directory) as store:
        prepared = prepare(config, Path(store), lambda _: None)
        with open_dataset(config, prepared, Path(store), lambda _: None) as dataset:
            batches = (dataset.batch(step, config.sequences_per_step) for step in range(steps))
            with StreamedTrainer(prepared, Path(store)) as trainer:
                trainer.fill()
                found = [outcome.loss for outcome in trainer.steps(batches)]
                trainer.settle()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    window = min(WINDOW, args.steps)
    finals: dict[str, list[float]] = {name: [] for name in TRANSPORTS}
    curves: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as name:
            write_inputs(Path(name), seed)
            for transport, codecs in TRANSPORTS.items():
                found = losses(Path(name), seed, args.steps, codecs)
                finals[transport].append(statistics.fmean(found[-window:]))
                every = max(1, args.steps // CURVE_POINTS)
                points = [
                    round(statistics.fmean(found[at : at + every]), 5) for at in range(0, len(found), every)
                ]
                curves.append({"seed": seed, "transport": transport, "every": every, "loss": points})
                print(f"seed {seed}, {transport}: {finals[transport][-1]:.4f}", file=sys.stderr)
    off = {
        name: [loss / exact - 1 for loss, exact in zip(values, finals["exact"], strict=True)]
        for name, values in finals.items()
    }
    common.print_table(
        ("transport", f"loss of the last {window} steps", "off the exact run, mean", "worst"),
        [
            (
                name,
                " ".join(f"{loss:.4f}" for loss in finals[name]),
                f"{statistics.fmean(off[name]):+.2%}",
                f"{max(off[name], key=abs):+.2%}",
            )
            for name in TRANSPORTS
        ],
    )
    common.finish(
        {
            "bench": "transport_quality",
            "machine": common.machine(),
            "steps": args.steps,
            "finals": finals,
            "off": off,
            "curves": curves,
        },
        args.output,
    )


if __name__ == "__main__":
    main()
