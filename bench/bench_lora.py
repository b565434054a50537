"""What of a frozen model crosses the link in a LoRA step, and what do 8 and 4 bits do to it?

A small Llama is trained for some steps, so that its weights are not random. Then adapters train on it, three steps for
each way in which the frozen model is written, or as many as ``--adapter-steps`` says. Counted, over all of them: bytes
that went up per frozen parameter and pass (two passes per step), and bytes of gradients that came down and are not of
adapters. Measured: the root mean square error of the weights, the loss of the first step, when adapters do nothing yet,
and the mean loss of the last tenth. Nothing is timed, so the result is that of any machine, but for rounding of other
kernels.

The embedding, below the first adapter, runs no backward, and the head turns around on the device: both go up once per
step, so bf16 takes less than 2 bytes per pass.

    python bench/bench_lora.py                       # 10.6M parameters, two to three minutes
    python bench/bench_lora.py --adapter-steps 100   # loss curves
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from outsize.streamed.spec import RunSpec

sys.path.insert(0, str(Path(__file__).parent))
import common
import shapes

BF16_TARGET, NF4_TARGET = 2.1, 0.6
# How matrices of blocks are written, and how embedding and head are.
VARIANTS = (
    ("raw", "raw"),
    ("int8", "raw"),
    ("fp8", "raw"),
    ("fp8", "fp8"),
    ("nf4", "raw"),
    ("nf4-double", "raw"),
    ("nf4-double", "int8"),
    ("nf4-double", "nf4-double"),
)


def settings(directory: Path, path: Path, **changes: Any) -> dict[str, Any]:
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(path), "dtype": "bf16"},
        "data": {"path": str(directory / "text.txt"), "format": "text", "seq_len": 128},
        "train": {"tokens_per_step": 1024, "microbatches": 2, "seed": 0},
        "optimizer": {"schedule": "constant", "lr": 1e-3},
        "memory": {"device": "cpu", "home": "host", "device_memory": "1GiB", "host_memory": "2GiB"},
    }
    for name, values in changes.items():
        sections[name] = {**sections.get(name, {}), **values}
    return sections


def pretrained(directory: Path, steps: int) -> Path:
    """A model that has learnt something."""
    from outsize.config.load import parse_config
    from outsize.training.run import train

    shapes.write("llama-10m", directory)
    changes = {"steps": steps, "run_dir": str(directory / "pretraining")}
    run = settings(directory, directory / "model", model={"dtype": "fp32"}, train=changes)
    result = train(parse_config(run))
    print(f"pretrained for {result.steps} steps, loss {result.loss:.3f}")
    return Path(str(result.export_dir))


def adapt(directory: Path, model: Path, base: str, table: str, steps: int) -> dict[str, Any]:
    """Some steps of adapters; what moved and what came of it."""
    from outsize.config.load import parse_config
    from outsize.session.job.prepare import prepare
    from outsize.session.stream import StreamedTrainer
    from outsize.training.run_data import open_dataset

    lora = {"r": 8, "target_modules": "all-linear", "base_codec": base, "table_codec": table}
    train = {"method": "lora", "steps": steps}
    config = parse_config(settings(directory, model, train=train, lora=lora))
    run_dir = directory / f"{base}-{table}"
    run_dir.mkdir()
    prepared = prepare(RunSpec.of(config, run_dir), lambda _: None)
    with (
        open_dataset(config, prepared, run_dir, lambda _: None) as dataset,
        StreamedTrainer(prepared, run_dir) as trainer,
    ):
        trainer.fill()
        # Other sequences than those that it was trained on.
        batches = [dataset.batch(1000 + step, config.sequences_per_step) for step in range(steps)]
        losses = [outcome.loss for outcome in trainer.steps(batches)]
        trainer.settle()
        moved, errors = trainer.engine.link_bytes(), list(trainer.errors.values())
    units = prepared.split.spec.units
    adapters = sum(4 * unit.numel for unit in units)
    frozen = sum(tensor.numel for unit in units for part in unit.frozen for tensor in part.tensors)
    written = [part for unit in units for part in unit.frozen if part.codec is not None]
    encoded = sum(tensor.numel for part in written for tensor in part.tensors)
    return {
        "base": base,
        "table": table,
        "up_bytes_per_frozen_parameter_and_pass": (moved["up:w0"] / steps / 2 - adapters) / frozen,
        "bytes_per_encoded_parameter": sum(part.home_bytes for part in written) / encoded
        if encoded
        else None,
        "gradient_bytes_of_frozen": moved["down:w0"] // steps - adapters,
        "frozen_parameters": frozen,
        "encoded_share": encoded / frozen,
        "median_rms_error": statistics.median(errors) if errors else 0.0,
        "worst_rms_error": max(errors, default=0.0),
        "first_loss": losses[0],
        "last_loss": statistics.mean(losses[-max(1, steps // 10) :]),
        "losses": losses,
    }


def is_met(rows: list[dict[str, Any]]) -> bool:
    """Whether bf16 and 4 bits take no more than they may, and nothing of what is frozen comes down."""
    in_4_bits = [row for row in rows if row["base"].startswith("nf4") and row["table"] != "int8"]
    return (
        rows[0]["up_bytes_per_frozen_parameter_and_pass"] <= BF16_TARGET
        and rows[-1]["up_bytes_per_frozen_parameter_and_pass"] <= NF4_TARGET
        and all(row["bytes_per_encoded_parameter"] <= NF4_TARGET for row in in_4_bits)
        and not any(row["gradient_bytes_of_frozen"] for row in rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=80, help="of pretraining")
    parser.add_argument("--adapter-steps", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = pretrained(directory, args.steps)
        rows = [adapt(directory, model, *variant, args.adapter_steps) for variant in VARIANTS]
    for row in rows:
        row["loss_difference"] = row["first_loss"] - rows[0]["first_loss"]
        row["last_loss_difference"] = row["last_loss"] - rows[0]["last_loss"]
    common.print_table(
        [
            "matrices",
            "tables",
            "B/parameter/pass",
            "B/encoded",
            "frozen gradient B",
            "RMS error",
            "loss",
            "beyond bf16",
            "last",
            "beyond bf16",
        ],
        [
            [
                row["base"],
                row["table"],
                f"{row['up_bytes_per_frozen_parameter_and_pass']:.3f}",
                row["bytes_per_encoded_parameter"] and f"{row['bytes_per_encoded_parameter']:.4f}",
                row["gradient_bytes_of_frozen"],
                f"{row['median_rms_error']:.2%}",
                f"{row['first_loss']:.4f}",
                f"{row['loss_difference']:+.4f}",
                f"{row['last_loss']:.4f}",
                f"{row['last_loss_difference']:+.4f}",
            ]
            for row in rows
        ],
    )
    met = is_met(rows)
    common.finish({"bench": "lora", "machine": common.machine(), "rows": rows, "met": met}, args.output)


if __name__ == "__main__":
    main()
