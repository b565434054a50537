"""Commands on checkpoints: `inspect` and `export`.

``outsize inspect`` and ``outsize data``: a model, and data, as a run would take them; no weights are read.

``outsize export``: the trained model of a run in Hugging Face layout.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outsize.choices import ComputeDtype
from outsize.cli.text.console import Output, columns
from outsize.cli.text.options import JsonOption, with_run_options
from outsize.units import format_bytes, format_count

if TYPE_CHECKING:
    from outsize.config import Config
    from outsize.model.sizes.model_spec import ModelSpec


_BAR_CHARS = 40
_MOST_LABELS = 20


def inspect(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model directory, bare config.json or hub id.")
    ],
    dtype: Annotated[ComputeDtype, typer.Option(help="Compute dtype.")] = "bf16",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let Python code that comes with the model run.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the units that a model is split into, and their bytes; reads no weights."""
    from outsize.checkpoint.begun_adapters import servable
    from outsize.model.build import build_skeleton, load_hf_config
    from outsize.model.split import split

    output = Output(as_json=as_json)
    with output.guarded():
        config = load_hf_config(servable(model), trust_remote_code)
        built = build_skeleton(config, dtype, trust_remote_code=trust_remote_code, frozen=True)
        figures = _figures(type(built).__name__, split(built, dtype).spec, dtype)
        output.emit(figures)
        output.print_result(_table(figures))


def _figures(architecture: str, spec: "ModelSpec", dtype: str) -> dict[str, Any]:
    """Return the units of a model and their bytes; the training state is fp32 weights, gradients and two moments."""
    return {
        "architecture": architecture,
        "dtype": dtype,
        "num_parameters": spec.num_parameters,
        "num_trainable": spec.num_trainable,
        "training_state_bytes": spec.training_state_bytes,
        "largest_unit_bytes": max(unit.weight_bytes(dtype) for unit in spec.units),
        "units": [
            {
                "index": unit.index,
                "name": unit.name,
                "kind": unit.kind,
                "num_parameters": sum(tensor.numel for tensor in unit.tensors),
                "weight_bytes": unit.weight_bytes(dtype),
            }
            for unit in spec.units
        ],
    }


def _table(figures: dict[str, Any]) -> str:
    """Return the units, equal neighbours on one line, and the totals."""
    rows = [("units", "kind", "name", "parameters", f"weights ({figures['dtype']})")]
    for first, last in _runs_of_equals(figures["units"]):
        span = f"{first['index']}" if first is last else f"{first['index']}-{last['index']}"
        count = last["index"] - first["index"] + 1
        name = first["name"] if first is last else f"{first['name']} ... {last['name']}"
        each = "" if count == 1 else " each"
        parameters = f"{format_count(first['num_parameters'])}{each}"
        rows.append((span, first["kind"], name, parameters, f"{format_bytes(first['weight_bytes'])}{each}"))
    lines = [
        *columns(rows),
        "",
        f"{figures['architecture']}: {format_count(figures['num_parameters'])} parameters, "
        f"{format_count(figures['num_trainable'])} trainable",
        f"training state {format_bytes(figures['training_state_bytes'])} (fp32 weights, gradients, moments)",
        f"largest unit {format_bytes(figures['largest_unit_bytes'])} of weights in {figures['dtype']}",
    ]
    return "\n".join(lines)


def _runs_of_equals(units: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the first and the last of each run of neighbours with the same kind and size."""
    runs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for unit in units:
        key = (unit["kind"], unit["num_parameters"], unit["weight_bytes"])
        if runs and (runs[-1][1]["kind"], runs[-1][1]["num_parameters"], runs[-1][1]["weight_bytes"]) == key:
            runs[-1] = (runs[-1][0], unit)
        else:
            runs.append((unit, unit))
    return runs


@partial(with_run_options, has_dry_run=False)
def data(config: "Config", output: Output) -> None:
    """Show what would be trained: documents, their lengths, what is cut, and the first one as the model sees it."""
    from outsize.checkpoint.begun_adapters import with_saved_model
    from outsize.objectives import objective_data
    from outsize.objectives.recipes import RECIPES, objective_of
    from outsize.training.forecast import preview

    notes: list[str] = []
    config = with_saved_model(config, notes.append)
    objective = objective_of(config)
    if objective is not None and RECIPES[objective].fields:
        figures = objective_data.preview(config, objective, notes.append)
        output.emit(figures)
        output.print_result("\n".join([*notes, *_records(figures)]))
        return
    figures = preview(config, notes.append)
    output.emit(figures)
    output.print_result("\n".join([*notes, "", *_lengths(figures), *_sequences(figures), *_loader(figures)]))


def _records(figures: dict[str, Any]) -> list[str]:
    """Return what records with fields of their own hold."""
    rows = [("field", "most tokens", "mean", "longer than data.seq_len")]
    rows += [
        (name, f"{tokens['most']:,}", f"{tokens['mean']:.1f}", f"{tokens['num_longer']:,}")
        for name, tokens in figures["tokens"].items()
    ]
    labels = [f"label {label}: {count:,} records" for label, count in figures["labels"].items()]
    return [
        *(f"first {name}: {value}" for name, value in figures["first"].items()),
        *columns(rows),
        *labels[:_MOST_LABELS],
        f"{figures['num_records']:,} records, {figures['steps_per_epoch']:,.1f} steps per epoch",
    ]


def _lengths(figures: dict[str, Any]) -> list[str]:
    """Return a histogram of the documents' lengths; nothing of tokens without bounds of documents."""
    buckets = figures["lengths"]
    if not buckets:
        return []
    most = max(bucket["num_documents"] for bucket in buckets)
    rows = [("tokens", "documents", "trained", "")]
    rows += [
        (
            f"<= {bucket['most_tokens']:,}",
            f"{bucket['num_documents']:,}",
            f"{bucket['num_trained']:,}",
            "#" * max(1, round(_BAR_CHARS * bucket["num_documents"] / most)),
        )
        for bucket in buckets
    ]
    return [*columns(rows), ""]


def _sequences(figures: dict[str, Any]) -> list[str]:
    return [
        f"{figures['num_sequences']:,} sequences of {figures['seq_len']} tokens per epoch, "
        f"{figures['steps_per_epoch']:,.1f} steps; the run takes {figures['epochs']:.2f} epochs"
    ]


def _loader(figures: dict[str, Any]) -> list[str]:
    """Say how fast batches come, and how many threads that takes."""
    rates = [
        f"{format_count(rate['tokens_per_s'])} tokens/s by {rate['workers']}" for rate in figures["loader"]
    ]
    return [f"batches come at {', '.join(rates)} (data.workers); {figures['enough_workers']} is enough"]


def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of the run.")],
    out_dir: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where to write it; default: RUN_DIR/export.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the adapters of a LoRA run into its model, unit by unit.")
    ] = False,
    gguf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it for llama.cpp and Ollama as well.")
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Send it to the hub as well, with a card.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: everybody may see it.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="With --merge: let code of the model run.")
    ] = False,
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="With --merge: the model, if it is not where it was.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the model of a run as Hugging Face safetensors, or its adapters in PEFT's format."""
    from outsize.checkpoint import checkpoint_state
    from outsize.checkpoint import export as exporter
    from outsize.errors import ConfigError

    output = Output(as_json=as_json)
    with output.guarded():
        if public and push is None:
            raise ConfigError(
                "--public says who sees what --push sends; add --push OWNER/NAME, or leave it out"
            )
        if trust_remote_code and not merge:
            output.say("note: --trust-remote-code has no effect without --merge: no code of the model runs")
        source = checkpoint_state.exported(run_dir)
        if gguf is not None:
            exporter.check_gguf(source, gguf, merge=merge, base=base)
        hub = None if push is None else exporter.Hub(push, public=public)
        written = exporter.write_export(
            source,
            out_dir or run_dir / "export",
            merge=merge,
            trust_remote_code=trust_remote_code,
            base=base,
            ready=None if hub is None else hub.make,
        )
        if hub is not None:
            hub.upload(written, run_dir)
        if gguf is not None:
            exporter.write_gguf(written, gguf)
            output.say(f"wrote {gguf}")
        url = None if hub is None else hub.url
        output.emit(
            {"run_dir": str(run_dir), "model_dir": str(written), "gguf": gguf and str(gguf), "url": url}
        )
        output.print_result(f"wrote {written}, of {source.name}" + (f"\nsent to {url}" if url else ""))
