"""How commands with many options say them: as the fields of a dataclass, or as a table of keys of the configuration.

`train` and `verify` share the table: flag, the key it sets, its type, its help. A flag is a short name for a key;
everything else is reached by a file or ``--set``.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from outsize.cli.text.console import Output

# The help repeats the heart of each key's description: reading it from there would slow every `--help` down.
FLAGS: Sequence[tuple[str, str, type, str]] = (
    ("--model", "model.path", str, "Directory of the model: config.json, safetensors, tokenizer."),
    ("--data", "data.path", str, "File or directory to train on."),
    ("--method", "train.method", str, "full or lora (adapters; their keys are in section lora)."),
    ("--steps", "train.steps", int, "Optimizer steps."),
    ("--epochs", "train.epochs", float, "How often the data are used, in place of --steps."),
    ("--batch-size", "train.batch_size", int, "Sequences per step, in place of --tokens-per-step."),
    ("--tokens-per-step", "train.tokens_per_step", int, "Tokens per step, a multiple of --seq-len."),
    ("--seq-len", "data.seq_len", int, "Tokens per sequence."),
    ("--pack", "data.pack", str, "How documents become sequences: stream, documents or none."),
    ("--eval-split", "eval.split", float, "Share of the data that is held out and measured on."),
    ("--microbatches", "train.microbatches", int, "Slices of a step that pass through a unit in turn."),
    ("--device", "memory.device", str, "cpu, cuda, cuda:N, cuda:0,1, cuda:all, emulated:N or auto."),
    ("--device-memory", "memory.device_memory", str, "Budget on the device, e.g. 64MiB or 20GiB."),
    ("--host-memory", "memory.host_memory", str, "Budget in host memory, e.g. 48GiB."),
    ("--home", "memory.home", str, "Where the training state rests: host, disk or auto."),
    ("--seed", "train.seed", int, "Seed of data order, dropout and fresh weights."),
    ("--run-dir", "train.run_dir", str, "Directory of the run; default: runs/<date and time>."),
    ("--lr", "optimizer.lr", float, "Learning rate after warm-up."),
    ("--lora-r", "lora.r", int, "Rank of the adapters of --method lora."),
    ("--dtype", "model.dtype", str, "Compute dtype: fp32, bf16, fp16 or auto."),
    ("--program", "train.program", str, "A program of your own: FILE, plan.json or FILE.py:FUNCTION."),
    ("--profile", "train.profile_steps", int, "Steps that torch.profiler records into profile.json."),
    (
        "--resume",
        "train.resume",
        str,
        "auto: the run in --run-dir goes on; a path: that checkpoint, in a new one.",
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
    bool, typer.Option("--dry-run", help="Print the resolved config, then the plan; train nothing.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, all else on stderr.")
]

RunCommand = Callable[..., None]
Options = TypeVar("Options")


def with_options(kind: type[Options]) -> Callable[[Callable[[Options, Output], None]], Callable[..., None]]:
    """Return what makes of ``command(options, output)`` a function with an option for each field of ``kind``.

    Args:
        kind: a dataclass; fields are annotated as Typer wants the parameters of a command. ``--json`` is added. A field
            ``named`` is no option: it has the names of those that the user wrote.
    """
    hints = get_type_hints(kind, include_extras=True)
    offered = {field.name: (hints[field.name], field.default) for field in fields(kind)}  # type: ignore[arg-type]
    if "named" in offered:
        offered["named"] = (typer.Context, MISSING)

    def decorate(command: Callable[[Options, Output], None]) -> Callable[..., None]:
        def run(*, as_json: bool, **given: Any) -> None:
            output = Output(as_json=as_json)
            if "named" in given:
                given["named"] = _written(given["named"])
            with output.guarded():
                command(kind(**given), output)

        return _offer(run, command, {**offered, "as_json": (JsonOption, False)})

    return decorate


def _written(context: typer.Context) -> frozenset[str]:
    """Return the parameters of the command under way that its command line has."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(name for name, source in sources.items() if source and source.name == "COMMANDLINE")


def with_run_options(
    command: RunCommand,
    more: Mapping[str, tuple[Any, Any]] = MappingProxyType({}),
    *,
    has_dry_run: bool = True,
) -> Callable[..., None]:
    """Return ``command(config, output, dry_run, **more)`` as a function with the options of a run.

    Args:
        command: is called with a configuration.
        more: annotation and default of each option that is the command's own, by name.
        has_dry_run: whether there is something that can be left undone.
    """
    more = {**({"dry_run": (DryRunOption, False)} if has_dry_run else {}), **more}
    keys = {flag.removeprefix("--").replace("-", "_"): key for flag, key, _, _ in FLAGS}

    def run(*, config_path: Path | None, overrides: list[str] | None, as_json: bool, **flags: Any) -> None:
        from outsize.config import load_config

        output = Output(as_json=as_json)
        with output.guarded():
            own_flags = {name: flags.pop(name) for name in more}
            config = load_config(
                config_path, overrides or (), {keys[name]: value for name, value in flags.items()}
            )
            command(config, output, **own_flags)

    offered = {
        "config_path": (ConfigArgument, None),
        **{
            name: (Annotated[kind | None, typer.Option(flag, help=text)], None)
            for name, (flag, _, kind, text) in zip(keys, FLAGS, strict=True)
        },
        "overrides": (SetOption, None),
        **more,
        "as_json": (JsonOption, False),
    }
    return _offer(run, command, offered)


def _offer(
    run: Callable[..., None], command: Callable[..., None], offered: Mapping[str, tuple[Any, Any]]
) -> Callable[..., None]:
    """Return ``run`` with the name and words of ``command`` and a signature, which is what Typer reads.

    The signature has a parameter for each entry of ``offered``, with that annotation and default; a default of
    `MISSING` makes it required.
    """
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {name: annotation for name, (annotation, _) in offered.items()}
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if default is MISSING else default,
                annotation=annotation,
            )
            for name, (annotation, default) in offered.items()
        ]
    )
    return run
