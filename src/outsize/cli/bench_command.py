"""``outsize bench``: one row of what this machine does, with proof: a model made on the spot, streamed and resident.

The model's training state is twice the budget, so that it has to be streamed, and small enough that the device holds
all of it, so that the two can be compared. Nothing is sent anywhere.
"""

import datetime
import json
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outsize.cli.text.console import Output, write_output
from outsize.errors import ConfigError, OutsizeError
from outsize.units import format_bytes, format_count

if TYPE_CHECKING:
    from outsize.config import Config

SCHEMA = 1
VOCABULARY, NUM_TOKENS = 8192, 200_000
VERIFIED_STEPS = 3
STATE_BYTES, STATE_BY_BUDGET = 16, 2
WIDTHS, FEWEST_LAYERS = (2048, 1024, 512, 256, 128), 6
# Parameters of a layer by those of a square of its width: four of attention, and an MLP of 2.75 widths.
LAYER_SQUARES = 4 + 3 * 2.75
# Budget, sequence and tokens of a step, of an accelerator and of a CPU.
ON_ACCELERATORS, ON_CPUS = ("4GiB", 512, 8192), ("96MiB", 128, 512)


def bench(
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N, emulated:N or auto; one device.")] = "auto",
    device_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Budget; default: 4GiB, of a CPU 96MiB. The model is made for it."),
    ] = None,
    steps: Annotated[int, typer.Option(min=3, help="Steps that are timed.")] = 8,
    output_file: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Also write the row here.")
    ] = None,
) -> None:
    """Print one row for MEASURED.md: train a made-up model streamed and resident, compare every bit, time steps.

    The row is one JSON object on the last line of stdout; exit status 1 where the runs differ.
    """
    output = Output(as_json=True)
    with output.guarded(), tempfile.TemporaryDirectory(prefix="outsize-bench-") as directory:
        if output_file is not None and not output_file.absolute().parent.is_dir():
            raise ConfigError(f"--output {output_file}: there is no such directory; create it first")
        row = _row(device, device_memory, steps, Path(directory), output)
        if output_file is not None:
            write_output(output_file, json.dumps(row) + "\n")
        output.emit(row)
    if not row["equal"]:
        raise typer.Exit(1)


def _row(
    device: str, device_memory: str | None, steps: int, directory: Path, output: Output
) -> dict[str, Any]:
    """Return the row, and say on stderr what is under way."""
    from outsize.accelerators import kind_here
    from outsize.cli.plan.plan_machine import size_of
    from outsize.config import load_config
    from outsize.training.run import train
    from outsize.training.short_runs import verify

    chosen = device if device != "auto" else kind_here() or "cpu"
    usual = ON_CPUS if chosen.partition(":")[0] in ("cpu", "emulated") else ON_ACCELERATORS
    budget = size_of("--device-memory", device_memory or usual[0])
    shape = shape_for(budget)
    output.say(f"making a model for a budget of {format_bytes(budget)}")
    num_parameters = _make(shape, directory)
    settings: dict[str, Any] = {
        "model.path": str(directory / "model"),
        "data.path": str(directory / "tokens.npy"),
        "data.format": "tokens",
        "data.seq_len": usual[1],
        "train.tokens_per_step": usual[2],
        "train.seed": 0,
        "memory.device": chosen,
        "memory.device_memory": budget,
    }
    compared, timed = (
        load_config(
            flags={**settings, "train.steps": count, "train.run_dir": str(directory / name)}, environ={}
        )
        for name, count in (("verify", VERIFIED_STEPS), ("run", steps))
    )
    count = format_count(num_parameters)
    output.say(f"training {count} parameters for {VERIFIED_STEPS} steps, streamed and resident")
    proof = verify(compared)
    output.say(f"timing {steps} steps")
    result = train(timed)
    lines = (directory / "run" / "heartbeat.jsonl").read_text(encoding="utf-8").splitlines()
    beats = [json.loads(line) for line in lines]
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **_machine(directory / "run"),
        "model": {**shape, "num_parameters": num_parameters},
        "budget_bytes": budget,
        "state_bytes": STATE_BYTES * num_parameters,
        "seq_len": usual[1],
        "tokens_per_step": usual[2],
        "equal": proof.equal,
        "compared_steps": proof.steps,
        "largest_difference": proof.max_weight_difference,
        "digest": proof.digest_streamed,
        "tokens_per_s": _tokens_per_s(beats, usual[2]),
        "stall_share": result.stall_share,
        "peak_rss_bytes": result.peak_rss_bytes,
        "predicted_from_calibration": _rate(result.predicted_step_s, usual[2]),
        "predicted_from_data_sheet": _planned(timed, shape, directory / "run"),
        "fallbacks": beats[-1].get("fallbacks"),
    }


def shape_for(budget: int) -> dict[str, int]:
    """Return sizes of a Llama whose training state is about twice ``budget`` bytes.

    Raises:
        ConfigError: that would be no model.
    """
    wanted = STATE_BY_BUDGET * budget / STATE_BYTES
    for width in WIDTHS:
        layers = int((wanted - 2 * VOCABULARY * width) / (LAYER_SQUARES * width**2))
        if layers >= FEWEST_LAYERS:
            return {
                "hidden_size": width,
                "intermediate_size": width * 11 // 4,
                "num_hidden_layers": layers,
                "num_attention_heads": max(1, width // 64),
                "num_key_value_heads": max(1, width // 64),
                "vocab_size": VOCABULARY,
                "max_position_embeddings": 2048,
            }
    raise ConfigError(
        f"--device-memory: {format_bytes(budget)} is too little for a model; give 32MiB at least"
    )


def _make(shape: dict[str, int], directory: Path) -> int:
    """Write a model with random weights and random tokens; return its number of parameters."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**shape, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory / "model")
    ids = np.random.default_rng(0).integers(0, VOCABULARY, NUM_TOKENS, dtype=np.int32)
    np.save(directory / "tokens.npy", ids)
    return sum(parameter.numel() for parameter in model.parameters())


def _tokens_per_s(beats: list[dict[str, Any]], tokens_per_step: int) -> float | None:
    """Return tokens per second of the median step, the first left out."""
    import statistics

    seconds = [beat["seconds"] for beat in beats if "seconds" in beat][1:]
    return _rate(statistics.median(seconds) if seconds else None, tokens_per_step)


def _rate(step_s: float | None, tokens_per_step: int) -> float | None:
    return None if not step_s else tokens_per_step / step_s


def _machine(run_dir: Path) -> dict[str, Any]:
    """Return what the machine is, by what the run has written and the inventory of probe."""
    import platform
    from importlib.metadata import version

    from outsize import __version__
    from outsize.hardware.gpus import take_inventory

    run = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    measured = json.loads((run_dir / "machine.json").read_text(encoding="utf-8"))
    inventory = take_inventory([run_dir])
    link = measured["links"][0]
    return {
        "outsize": __version__,
        "commit": _commit(),
        "card": run["device_names"][0],
        "drivers": sorted({str(gpu.driver.value) for gpu in inventory.gpus}),
        "num_gpus": len(inventory.gpus),
        "cpu": inventory.cpu.model.value,
        "ram_bytes": inventory.memory.total_bytes.value,
        "memlock_bytes": inventory.memory.memlock_limit_bytes.value,
        "system": platform.platform(),
        "packages": {name: version(name) for name in ("torch", "transformers")},
        "dtype": run["dtype"],
        "link": {
            way: {name: link[f"{way}_bytes_per_s"][name] for name in ("value", "source", "measured")}
            for way in ("up", "down")
        },
    }


def _commit() -> str | None:
    """Return the commit of the checkout that runs, ``+`` where it was changed; None of an installed package."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() or None


def _planned(config: "Config", shape: dict[str, int], run_dir: Path) -> dict[str, Any] | None:
    """Return what ``outsize plan`` says of the card by its name; None of one that it does not know."""
    from outsize.cli.plan.plan_model import AskedModel
    from outsize.cli.plan.plan_options import PlanFlags
    from outsize.cli.plan.plan_question import ask_what_fits
    from outsize.hardware.cards import known_card
    from outsize.hardware.host_memory import read_host_memory
    from outsize.planner.predict.prediction import fastest

    run = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    card = known_card(run["device_names"][0])
    if card is None:
        return None
    options = PlanFlags(
        model=config.model.path,
        gpus=card.name,
        ram=f"{read_host_memory(Path('/')).total_bytes.number():.0f}B",
        device_memory=f"{config.memory.device_memory}B",
        dtype=run["dtype"],
        seq_len=config.data.seq_len,
        tokens_per_step=config.tokens_per_step,
    )
    model = AskedModel(config.model.path, {"model_type": "llama", **shape, "tie_word_embeddings": False})
    try:
        prediction = fastest(ask_what_fits(options, model).question)
    except OutsizeError as error:
        return {"error": str(error)}
    return {"card": card.name, "tokens_per_s": prediction.tokens_per_s, "interval": list(prediction.interval)}
