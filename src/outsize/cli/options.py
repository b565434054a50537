"""The options that `train` and `verify` share, as a table: flag, the key it sets, its type, its help.

A flag is a short name for a key of the configuration; everything else is reached by a file or ``--set``.
"""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outsize.cli.console import Output

if TYPE_CHECKING:
    from outsize.config import Config

# The help repeats the heart of each key's description: reading it from there would slow every `--help` down.
FLAGS: Sequence[tuple[str, str, type, str]] = (
    ("--model", "model.path", str, "Directory of the model: config.json, safetensors, tokenizer."),
    ("--data", "data.path", str, "File or directory to train on."),
    ("--method", "train.method", str, "full or lora (adapters; their keys are in section lora)."),
    ("--steps", "train.steps", int, "Optimizer steps."),
    (
        "--tokens-per-step",
        "train.tokens_per_step",
        int,
        "Tokens per step, a multiple of --seq-len.",
    ),
    ("--seq-len", "data.seq_len", int, "Tokens per sequence."),
    ("--microbatches", "train.microbatches", int, "Slices of a step that pass through a unit in turn."),
    ("--device", "memory.device", str, "cpu, cuda, cuda:N, cuda:0,1, cuda:all, emulated:N or auto."),
    ("--device-memory", "memory.device_memory", str, "Budget on the device, e.g. 64MiB or 20GiB."),
    ("--home", "memory.home", str, "Where the training state rests: host, disk or auto."),
    ("--seed", "train.seed", int, "Seed of data order, dropout and fresh weights."),
    ("--run-dir", "train.run_dir", str, "Directory of the run; default: runs/<date and time>."),
    ("--lr", "optimizer.lr", float, "Learning rate after warm-up."),
    ("--dtype", "model.dtype", str, "Compute dtype: fp32, bf16, fp16 or auto."),
    ("--profile", "train.profile_steps", int, "Steps that torch.profiler records into profile.json."),
    (
        "--resume",
        "train.resume",
        str,
        "auto continues the run in --run-dir; a path, that checkpoint in a new one.",
    ),
)

ConfigArgument = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="YAML file, docs/configuration.md.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set any key of the configuration; repeatable."),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print plan and resolved config; train nothing.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, all else on stderr.")
]

RunCommand = Callable[["Config", Output, bool], None]


def with_run_options(command: RunCommand) -> Callable[..., None]:
    """Return ``command(config, output, dry_run)`` as a function with the options of a run.

    Typer reads the signature of a function, so the table above becomes one.
    """
    keys = {flag.removeprefix("--").replace("-", "_"): key for flag, key, _, _ in FLAGS}

    def run(
        config_path: Path | None, overrides: list[str] | None, dry_run: bool, as_json: bool, **flags: Any
    ) -> None:
        from outsize.config import load_config

        output = Output(as_json=as_json)
        with output.guarded():
            config = load_config(
                config_path, overrides or (), {keys[name]: value for name, value in flags.items()}
            )
            command(config, output, dry_run)

    annotations = {
        "config_path": ConfigArgument,
        **{
            name: Annotated[kind | None, typer.Option(flag, help=text)]
            for name, (flag, _, kind, text) in zip(keys, FLAGS, strict=True)
        },
        "overrides": SetOption,
        "dry_run": DryRunOption,
        "as_json": JsonOption,
    }
    run.__name__, run.__doc__, run.__annotations__ = command.__name__, command.__doc__, annotations
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if name in ("dry_run", "as_json") else None,
                annotation=annotation,
            )
            for name, annotation in annotations.items()
        ]
    )
    return run
