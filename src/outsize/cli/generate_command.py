"""``outsize generate``: text from a model whose weights are streamed."""

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outsize.cli.text.console import Output
from outsize.cli.text.options import with_options
from outsize.cli.text.records_text import ResumedLines, digest_of, now_and_then, results_at
from outsize.cli.text_writer import ModelOptions, TextWriter, state_of_model
from outsize.errors import ConfigError
from outsize.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from outsize.cli.text.prompts import Prompt
    from outsize.training.run_data import Conversation
    from outsize.wrapped.writing.text import Figures, Written


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ModelOptions):
    """What can be asked of the command, option by option."""

    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Text to go on from; repeatable.")
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with a prompt on each line, or as .jsonl with prompt or messages; - is standard input.",
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON lines, one for each prompt; given again, the command goes on behind the last.",
        ),
    ] = None
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Prompts are a user's messages; without one, a conversation line by line."
        ),
    ] = False
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message of --chat.")] = None
    json_lines: Annotated[
        bool, typer.Option("--json-lines", help="Print a JSON object for each prompt on stdout.")
    ] = False
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write per prompt.")] = 64
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="String that a text is written up to; repeatable."),
    ] = None
    batch_size: Annotated[int, typer.Option(help="Prompts that are computed together.")] = 1
    in_flight: Annotated[
        int | None,
        typer.Option(
            min=1, help="Batches that share each load of weights, at most; by default as many as hide it."
        ),
    ] = None
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens; otherwise the likeliest one.")] = (
        False
    )
    temperature: Annotated[float | None, typer.Option(help="Of --sample.")] = None
    top_k: Annotated[int | None, typer.Option(help="Of --sample: the likeliest tokens.")] = None
    top_p: Annotated[
        float | None, typer.Option(help="Of --sample: the likeliest tokens of that probability.")
    ] = None
    min_p: Annotated[
        float | None, typer.Option(help="Of --sample: least share of the likeliest token's probability.")
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Of --sample: prompt number i is drawn by this and i; default: 0.")
    ] = None


_SIGN = "> "  # before what a user is to type

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
    from outsize.checkpoint.begun_adapters import servable
    from outsize.cli.text.prompts import conversation, read_prompts
    from outsize.wrapped.writing.text import check_question

    _check_drawing(options, output)
    prompts = read_prompts(options.prompt or [], options.prompts, chat=options.chat, system=options.system)
    talks = options.chat and not (prompts or output.as_json or options.json_lines or options.out)
    check_question(len(prompts) + talks, options.max_new_tokens, options.batch_size)
    if talks:
        _tell_idle(options, output, ("batch_size", "in_flight"), "in a conversation")
    options = replace(options, model=servable(options.model), seed=options.seed or 0)
    how, seed = _how(options), options.seed or 0
    with contextlib.ExitStack() as stack:
        if options.out is not None:
            stack.enter_context(results_at(options.out, _settings(options, prompts)))
        writer = stack.enter_context(TextWriter(options))
        if talks:
            turns = count()

            def reply(conversation: "Conversation") -> str:
                alone = {**how, "batch_size": 1, "seed": seed + next(turns)}
                text = writer.write([conversation], _print, **alone)[0][0].text
                output.print_result("")
                return text

            conversation(reply, options.system, _lines_of_a_user(), output.say)
            return
        lines = None if options.out is None else ResumedLines(options.out)
        num_done = 0 if lines is None else lines.count
        if num_done:
            output.say(f"{num_done} of {len(prompts)} prompts are answered already: going on behind them")
        streams = lines is None and _streams(options, output, len(prompts))
        show = _shown(options, output, lines, streams, len(prompts))
        written, figures = writer.write(
            prompts[num_done:],
            _print if streams else (lambda _: None),
            on_written=show,
            **{**how, "seed": seed + num_done},
        )
    output.say(_summary(figures))
    summary = {} if options.out is not None else {"written": [asdict(one) for one in written]}
    output.emit({**summary, **asdict(figures)})


def _streams(options: GenerateOptions, output: Output, num_prompts: int) -> bool:
    """Return whether text is shown as it is written: where only one text is, at a time."""
    alone = options.batch_size == 1 and (num_prompts == 1 or options.in_flight == 1)
    return alone and not (output.as_json or options.json_lines)


def _shown(
    options: GenerateOptions, output: Output, lines: ResumedLines | None, streams: bool, num_prompts: int
) -> "Callable[[Written], None]":
    """Return what becomes of a text that has ended."""
    tell = now_and_then(output.say)

    def show(one: "Written") -> None:
        if lines is not None:
            lines.add(asdict(one))
            tell(lambda: f"{lines.count} of {num_prompts} prompts")
        elif options.json_lines:
            print(json.dumps(asdict(one)), file=sys.stdout, flush=True)  # noqa: T201 - a line for each prompt
        else:
            output.print_result("" if streams else f"{one.prompt}{one.text}\n")

    return show


def _settings(options: GenerateOptions, prompts: "Sequence[Prompt]") -> dict[str, str]:
    """Return what the lines of ``--out`` are made with: options, and digests of prompts and of the model's files."""
    settled = (
        *("model", "base", "dtype", "prompt", "prompts", "chat", "system", "max_new_tokens", "batch_size"),
        *("stop", "sample", *_DRAWING, "seed"),
    )
    settings = {name: str(getattr(options, name)) for name in settled}
    words = [each if isinstance(each, str) else [each.messages, each.tools, each.options] for each in prompts]
    settings |= {"prompts_digest": digest_of(words)}
    return settings | {"model_files": state_of_model(options.model, options.base)}


def _lines_of_a_user() -> Iterator[str]:
    """Return the lines of standard input, each asked for by a sign where somebody types them."""
    while True:
        if sys.stdin.isatty():
            print(_SIGN, end="", file=sys.stderr, flush=True)  # noqa: T201 - beside the text itself
        line = sys.stdin.readline()
        if not line:
            return
        yield line


def _check_drawing(options: GenerateOptions, output: Output) -> None:
    """Refuse what tokens cannot be drawn by, and say what has no effect."""
    if options.json_lines and output.as_json:
        raise ConfigError("--json-lines prints an object for each prompt, and --json one for all; choose one")
    if options.json_lines and options.out is not None:
        raise ConfigError("--json-lines prints what --out writes; choose one")
    if "" in (options.stop or ()):
        raise ConfigError("--stop is an empty string, which every text begins with; leave it out")
    if options.system is not None and not options.chat:
        raise ConfigError("--system is the system message of --chat; add --chat, or leave it out")
    if not options.sample:
        _tell_idle(options, output, (*_DRAWING, "seed"), "without --sample")
        return
    for name, (least, most) in _DRAWING.items():
        value, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if value is not None and not least < value <= most:
            bound = "above zero" if math.isinf(most) else f"above {least:g} and at most {most:g}"
            raise ConfigError(
                f"{flag} is {value:g}; it has to be {bound}; leave --sample out for the likeliest token"
            )


def _tell_idle(options: GenerateOptions, output: Output, names: Sequence[str], where: str) -> None:
    for name in names:
        if getattr(options, name) != getattr(GenerateOptions, name):
            output.say(f"note: --{name.replace('_', '-')} has no effect {where}")


def _how(options: GenerateOptions) -> dict[str, Any]:
    """Return how many tokens are written, and how each is chosen."""
    drawn = {name: getattr(options, name) for name in _DRAWING if options.sample}
    return {
        "max_new_tokens": options.max_new_tokens,
        "batch_size": options.batch_size,
        "in_flight": options.in_flight,
        "seed": options.seed,
        "stop": options.stop or [],
        "do_sample": options.sample,
        **{name: value for name, value in drawn.items() if value is not None},
    }


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
    elif figures.num_kept and not figures.num_streamed:
        apart = " but experts" if figures.experts else ""
        lines.append(
            f"all weights{apart} stayed on the device, rows of embeddings came as they were asked for"
        )
    elif not figures.num_streamed:
        lines.append(
            "weights were used where they rest, in host memory, and nothing moved, so --device-memory bounded nothing; "
            "--home disk streams them"
        )
    if (experts := figures.experts) is not None:
        lines.append(
            f"experts: {experts.num_hits} of {experts.num_uses} were on the device when a layer asked for them, "
            f"{format_bytes(experts.bytes_moved)} came up; {experts.num_hot} hot ones of {experts.num_experts} stay, "
            f"{format_bytes(experts.hot_bytes)}"
        )
    return "\n".join(lines)
