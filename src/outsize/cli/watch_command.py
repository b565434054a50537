"""``outsize watch``: the page of a run that goes on, in a browser on this machine."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from outsize.cli.text.console import Output
from outsize.cli.text.options import JsonOption


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run; it may not have begun.")],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="On the loopback; 0 takes one that is free.")
    ] = 0,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks at the run.")] = 3.0,
    as_json: JsonOption = False,
) -> None:
    """Show a run while it goes on: the page of `outsize report`, which refreshes itself. Ctrl-C ends it."""
    from outsize.errors import ConfigError
    from outsize.reporting.live import LiveRun, LiveServer

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
            signal.pause()  # until Ctrl-C
