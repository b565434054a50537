"""``outsize report``: one page of a run, or of two beside each other, that opens from disk."""

from pathlib import Path
from typing import Annotated

import typer

from outsize.cli.text.console import Output
from outsize.cli.text.options import JsonOption


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run; it may be going on.")],
    other: Annotated[
        Path | None, typer.Argument(metavar="[OTHER]", help="Directory of a run to compare it with.")
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Default: report.html in RUN, or compare-OTHER.html."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a run did: curves, waits, timeline, memory, verdict, in one HTML file that loads nothing."""
    from outsize.reporting.collect import collect
    from outsize.reporting.html_page import make_page, page_data, write_page
    from outsize.units import format_bytes

    output = Output(as_json=as_json)
    with output.guarded():
        runs = [collect(directory) for directory in (run, other) if directory is not None]
        name = "report.html" if other is None else f"compare-{runs[-1]['name']}.html"
        path = output_file or run / name
        size = write_page(path, make_page(page_data(runs)))
        bottlenecks = [each["verdict"]["bottleneck"] for each in runs]
        output.emit(
            {
                "path": str(path),
                "bytes": size,
                "runs": [
                    {key: each[key] for key in ("name", "status", "figures", "waits", "verdict")}
                    for each in runs
                ],
            }
        )
        for each, bottleneck in zip(runs, bottlenecks, strict=True):
            if bottleneck is not None:
                output.print_result(
                    f"{each['name']}: limited by {bottleneck['limits']}: {bottleneck['evidence']}"
                )
        output.print_result(f"{path}  {format_bytes(size)}")
