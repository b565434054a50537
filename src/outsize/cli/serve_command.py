"""``outsize serve``: a model whose weights are streamed, for any client of OpenAI's interface on this machine."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from outsize.cli.text.console import Output
from outsize.cli.text.options import with_options
from outsize.cli.text_writer import ModelOptions, TextWriter


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ModelOptions):
    """What can be asked of the command, option by option."""

    port: Annotated[
        int, typer.Option(min=0, max=65535, help="On the loopback; 0 takes one that is free.")
    ] = 8000
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Of an answer, where a request does not say.")
    ] = 256


@with_options(ServeOptions)
def serve(options: ServeOptions, output: Output) -> None:
    """Answer chats and prompts over HTTP as OpenAI's interface has them, on this machine alone. Ctrl-C ends it."""
    from outsize.cli.completions import CompletionHandler, Completions
    from outsize.loopback import LoopbackServer

    with TextWriter(options) as writer:
        writer.check_settings()
        name = Path(options.model).name or options.model
        completions = Completions(writer, name, options.max_new_tokens)
        with LoopbackServer(CompletionHandler, completions, options.port) as server:
            address = f"{server.url}v1"
            output.emit({"url": address, "model": name})
            output.print_result(address)
            output.say("one answer at a time; Ctrl-C ends it")
            try:
                signal.pause()  # until Ctrl-C
            finally:
                completions.end()
