"""``outsize generate``: text from a model whose weights are streamed."""

import contextlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outsize.choices import Dtype, Home
from outsize.cli.text.console import Output
from outsize.cli.text.options import with_options
from outsize.errors import ConfigError
from outsize.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from outsize.wrapped.text import Figures, Written


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What can be asked of the command, option by option."""

    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model directory, hub id, run directory, or adapters.")
    ]
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="Text to go on from; repeatable.")
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="File with a prompt on each line, or as .jsonl with prompt or messages; - is standard input.",
        ),
    ] = None
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Prompts are a user's messages; without one, a conversation line by line."
        ),
    ] = False
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System message of --chat.")
    ] = None
    json_lines: Annotated[
        bool, typer.Option("--json-lines", help="Print a JSON object for each prompt on stdout.")
    ] = False
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Tokens to write per prompt.")] = 64
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Prompts at once; weights come up once for all.")
    ] = 1
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens; otherwise the likeliest one.")] = (
        False
    )
    temperature: Annotated[float, typer.Option("--temperature", help="Of --sample.")] = 1.0
    top_k: Annotated[int | None, typer.Option("--top-k", help="Of --sample: the likeliest tokens.")] = None
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Of --sample: the likeliest tokens of that probability.")
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option("--min-p", help="Of --sample: least share of the likeliest token's probability."),
    ] = None
    seed: Annotated[int, typer.Option("--seed", help="Of --sample.")] = 0
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:N, emulated:1 or auto.")] = "auto"
    device_memory: Annotated[
        str | None, typer.Option("--device-memory", help="Budget on the device, e.g. 64MiB or 20GiB.")
    ] = None
    home: Annotated[Home, typer.Option("--home", help="Where the weights rest.")] = "auto"
    store_dir: Annotated[
        Path | None, typer.Option("--store-dir", help="Directory of a disk home, best on a local NVMe.")
    ] = None
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of weights and computation.")] = "auto"
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let Python code that comes with the model run.")
    ] = False


# Settings of how tokens are drawn, and what each may be.
_DRAWING: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, math.inf),
    "top_k": (0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
}


@with_options(GenerateOptions)
def generate(options: GenerateOptions, output: Output) -> None:
    """Write text with a model that may be larger than the device, its weights streamed once per token batch."""
    from outsize.cli.text.prompts import conversation, read_prompts
    from outsize.wrapped.text import check_question

    _check_drawing(options, output)
    prompts = read_prompts(options.prompt or [], options.prompts, chat=options.chat, system=options.system)
    talks = options.chat and not prompts and not output.as_json and not options.json_lines
    check_question(len(prompts) + talks, options.max_new_tokens, options.batch_size)
    with _Writer(options) as writer:
        if talks:
            conversation(writer.reply, options.system, sys.stdin, output.say)
            return
        shows = not (output.as_json or options.json_lines)
        texts = [writer.text_of(prompt) for prompt in prompts]
        written, figures = writer.write(texts, on_text=_print if shows else (lambda _: None))
    for one in written:
        if options.json_lines:
            print(json.dumps(asdict(one)), file=sys.stdout, flush=True)  # noqa: T201 - a line for each prompt
        elif options.batch_size > 1:
            output.print_result(f"{one.prompt}{one.text}\n")
    output.say(_summary(figures))
    output.emit({"written": [asdict(one) for one in written], **asdict(figures)})


def _check_drawing(options: GenerateOptions, output: Output) -> None:
    """Refuse what tokens cannot be drawn by, and say what has no effect."""
    if options.json_lines and output.as_json:
        raise ConfigError("--json-lines prints an object for each prompt, and --json one for all; choose one")
    if options.system is not None and not options.chat:
        raise ConfigError("--system is the system message of --chat; add --chat, or leave it out")
    for name, (least, most) in _DRAWING.items():
        value, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if value is None or (name == "temperature" and value == 1.0):
            continue
        if not options.sample:
            output.say(f"note: {flag} has no effect without --sample")
        elif not least < value <= most:
            bound = "above zero" if math.isinf(most) else f"above {least:g} and at most {most:g}"
            raise ConfigError(
                f"{flag} is {value:g}; it has to be {bound}; leave --sample out for the likeliest token"
            )


class _Writer:
    """A model and its tokenizer, open for writing; a context manager."""

    def __init__(self, options: GenerateOptions) -> None:
        import torch

        import outsize
        from outsize.checkpoint.trained_model import servable
        from outsize.wrapped.text import check_model

        self._options = options
        self._choice: dict[str, Any] = {"do_sample": options.sample}
        if options.sample:
            drawn = {name: getattr(options, name) for name in _DRAWING}
            self._choice |= {name: value for name, value in drawn.items() if value is not None}
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(servable(options.model, options.trust_remote_code))
            self._model = outsize.load(
                place,
                dtype=options.dtype,
                trust_remote_code=options.trust_remote_code,
                trainable=False,
                device=options.device,
                device_memory=options.device_memory,
                home=options.home,
                store_dir=options.store_dir,
            )
            stack.callback(self._close)
            check_model(self._model)
            self._tokenizer = _tokenizer(place, options.trust_remote_code)
            torch.manual_seed(options.seed)
            self._stack = stack.pop_all()

    def text_of(self, prompt: "str | list[dict[str, Any]]") -> str:
        """Return a prompt as text; a conversation by the tokenizer's template, open for a reply."""
        if isinstance(prompt, str):
            return prompt
        from outsize.training.run_data import chat_text

        return chat_text(self._tokenizer, prompt)

    def write(self, texts: Sequence[str], on_text: Callable[[str], None]) -> "tuple[list[Written], Figures]":
        """Return what the model writes after ``texts``; ``on_text`` gets a single text while it is written."""
        from outsize.wrapped.text import write

        return write(
            self._model,
            self._tokenizer,
            texts,
            max_new_tokens=self._options.max_new_tokens,
            batch_size=self._options.batch_size,
            on_text=on_text,
            add_special_tokens=not self._options.chat,
            **self._choice,
        )

    def reply(self, messages: list[dict[str, Any]]) -> str:
        """Return the reply to a conversation, printed while it is written."""
        written, _ = self.write([self.text_of(messages)], _print)
        return written[0].text

    def _close(self) -> None:
        from outsize.wrapped.module import runner_of

        runner_of(self._model).close()

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


def _tokenizer(model: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    from outsize.checkpoint.files.checkpoint_files import locate_checkpoint

    directory = locate_checkpoint(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers and its tokenizers raise a dozen kinds
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{directory} has no tokenizer that transformers can read: {first_line}; put its files beside the weights"
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = 0
    return tokenizer


def _print(text: str) -> None:
    print(text, end="", file=sys.stdout, flush=True)  # noqa: T201 - text as it is written


def _summary(figures: "Figures") -> str:
    lines = [
        "",
        f"{figures.num_tokens} tokens in {format_seconds(figures.seconds)}, {figures.tokens_per_s:.3g} tokens/s",
        f"{format_bytes(int(figures.bytes_per_pass))} of weights per token batch, "
        f"{100 * figures.stall_share:.0f} % of the time spent waiting for them",
    ]
    if figures.break_even_batch is not None and figures.link_bytes_per_s is not None:
        lines.append(
            f"break-even batch {figures.break_even_batch:.0f}: with so many prompts at once computing takes as long as "
            f"moving weights at {format_rate(figures.link_bytes_per_s)}"
        )
    elif figures.num_kept:
        lines.append("all weights stayed on the device")
    else:
        lines.append(
            "weights were used where they rest, in host memory, and nothing moved: --device-memory bounds what is held "
            "beside them; --home disk streams them"
        )
    return "\n".join(lines)
