"""``outsize report``, ``watch`` and ``serve``: pages of runs, and a model for clients of OpenAI's interface."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from outsize.cli.text.console import Output
from outsize.cli.text.options import JsonOption, with_options
from outsize.cli.text_writer import ModelOptions, TextWriter
from outsize.errors import ConfigError


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
    from outsize.reporting.history import empty_files
    from outsize.reporting.html_page import make_page, page_data, write_page
    from outsize.units import format_bytes

    output = Output(as_json=as_json)
    with output.guarded():
        directories = [directory for directory in (run, other) if directory is not None]
        runs = [collect(directory) for directory in directories]
        for path in (path for directory in directories for path in empty_files(directory)):
            output.say(f"note: {path} is empty, and counts as absent")
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


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ModelOptions):
    """What can be asked of the command, option by option."""

    port: Annotated[
        int, typer.Option(min=0, max=65535, help="On the loopback; 0 takes one that is free.")
    ] = 8000
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Of an answer, where a request does not say.")
    ] = 256
    most_waiting: Annotated[
        int,
        typer.Option("--queue", min=0, help="Requests that wait their turn; further ones get status 429."),
    ] = 64


@with_options(ServeOptions)
def serve(options: ServeOptions, output: Output) -> None:
    """Answer chats and prompts over HTTP as OpenAI's interface has them, on this machine alone. Ctrl-C ends it."""
    from outsize.cli.openai_server import Completions, make_app
    from outsize.local_server import LocalServer

    with TextWriter(options) as writer:
        writer.check_settings()
        name = Path(options.model).name or options.model
        completions = Completions(writer, name, options.max_new_tokens, options.most_waiting)
        with LocalServer(make_app(completions), options.port) as server:
            address = f"{server.url}v1"
            output.emit({"url": address, "model": name})
            output.print_result(address)
            output.say("one answer at a time; Ctrl-C ends it")
            try:
                _wait_for_the_end()
            finally:
                completions.end()


def _wait_for_the_end() -> None:
    """Wait for Ctrl-C, or for the SIGTERM of service managers and containers, which interrupts as well."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        signal.pause()
    finally:
        signal.signal(signal.SIGTERM, before)


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run; it may not have begun.")],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="On the loopback; 0 takes one that is free.")
    ] = 0,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks at the run.")] = 3.0,
    as_json: JsonOption = False,
) -> None:
    """Show a run while it goes on: the page of `outsize report`, which refreshes itself. Ctrl-C ends it."""
    from outsize.reporting.collect import LiveRun, LiveServer

    output = Output(as_json=as_json)
    with output.guarded():
        if run.exists() and not run.is_dir():
            raise ConfigError(f"{run} is not a directory; name the directory of a run")
        with LiveServer(LiveRun(run, every), port) as server:
            output.emit({"url": server.url})
            output.print_result(server.url)
            if not (run / "heartbeat.jsonl").exists():
                output.say(f"no run has begun in {run} yet: the page shows it once its first step has ended")
            output.say(
                "Ctrl-C ends it; from another machine: ssh -L PORT:127.0.0.1:PORT, with the port above"
            )
            _wait_for_the_end()
