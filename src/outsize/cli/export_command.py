"""``outsize export``: the trained model of a run in Hugging Face layout."""

from pathlib import Path
from typing import Annotated

import typer

from outsize.cli.text.console import Output
from outsize.cli.text.options import JsonOption


def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of the run.")],
    out_dir: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where to write it; default: RUN_DIR/export.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the adapters of a LoRA run into its model, unit by unit.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="OWNER/NAME", help="Send it to the hub as well, with a card."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: everybody may see it.")] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="With --merge: let Python code that comes with the model run."
        ),
    ] = False,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="MODEL", help="With --merge: the model, if it is not where it was."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the model of a run as Hugging Face safetensors, or its adapters in PEFT's format."""
    from outsize.checkpoint import export as exporter
    from outsize.checkpoint.push import Hub
    from outsize.errors import ConfigError

    output = Output(as_json=as_json)
    with output.guarded():
        if public and push is None:
            raise ConfigError(
                "--public says who sees what --push sends; add --push OWNER/NAME, or leave it out"
            )
        target = out_dir or run_dir / "export"
        hub = None if push is None else Hub(push, public=public)
        written = exporter.export(
            run_dir, target, merge=merge, trust_remote_code=trust_remote_code, base=base
        )
        if hub is not None:
            hub.upload(written, run_dir)
        url = None if hub is None else hub.url
        output.emit({"run_dir": str(run_dir), "model_dir": str(written), "url": url})
        output.print_result(f"wrote {written}" if url is None else f"wrote {written}\nsent to {url}")
