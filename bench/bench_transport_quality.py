"""What do lossy codecs on the link do to a run? Loss curves of a small GPT on real text, against the exact run.

A GPT-2 of three blocks (`quality`) trains on one emulated device: from the same weights and on the same batches
exactly, with activations in int8, and with gradients in int4, to the nearest and by chance. Every
input of a unit leaves the device and comes back.
Targets, over three seeds: int8 activations within 0.5 % of the exact loss after 1,000 steps, int4 gradients within 2 %.

    OMP_NUM_THREADS=1 nice python bench/bench_transport_quality.py --output bench/results/transport_quality.json
"""

import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import quality
import torch
from quality import SEQ_LEN, SEQUENCES

from outsize.config import load_config
from outsize.session.job.prepare import prepare
from outsize.session.stream import StreamedTrainer
from outsize.streamed.spec import RunSpec
from outsize.training.run_data import open_dataset

TRANSPORTS: dict[str, dict[str, str]] = {
    "exact": {},
    "activations int8": {"activations": "int8"},
    "gradients int4": {"gradients": "int4"},
    "gradients int4-stochastic": {"gradients": "int4-stochastic"},
}
MICROBATCHES = 2


def write_inputs(directory: Path, seed: int) -> None:
    """A fresh model of ``seed``, and bytes of the standard library as tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quality.fresh_model(seed, tie_word_embeddings=False).save_pretrained(directory / "model")
    np.save(directory / "tokens.npy", np.frombuffer(quality.text(), np.uint8).astype(np.uint16))


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
        prepared = prepare(RunSpec.of(config, Path(store)), lambda _: None)
        with open_dataset(config, prepared, Path(store), lambda _: None) as dataset:
            batches = (dataset.batch(step, config.sequences_per_step) for step in range(steps))
            with StreamedTrainer(prepared, Path(store)) as trainer:
                trainer.fill()
                found = [outcome.loss for outcome in trainer.steps(batches)]
                trainer.settle()
    return found


def runs(seed: int, steps: int) -> Iterator[tuple[str, list[float]]]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_inputs(directory, seed)
        for transport, codecs in TRANSPORTS.items():
            yield transport, losses(directory, seed, steps, codecs)


def main() -> None:
    args = quality.arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    quality.compare("transport", "exact", lambda seed: runs(seed, args.steps), args)


if __name__ == "__main__":
    main()
