"""``outsize generate``: text from a model whose weights are streamed."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outsize.choices import Dtype, Home
from outsize.cli.text.console import Output
from outsize.cli.text.options import with_options
from outsize.errors import ConfigError, DataError
from outsize.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from outsize.wrapped.text import Figures, Written


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What can be asked of the command, option by option."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model directory or hub id.")]
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="Text to go on from; repeatable.")
    ] = None
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="File with a prompt on each line.")
    ] = None
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Tokens to write per prompt.")] = 64
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Prompts at once; weights come up once for all.")
    ] = 1
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens; otherwise the likeliest one.")] = (
        False
    )
    temperature: Annotated[float, typer.Option("--temperature", help="Of --sample.")] = 1.0
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


@with_options(GenerateOptions)
def generate(options: GenerateOptions, output: Output) -> None:
    """Write text with a model that may be larger than the device, its weights streamed once per token batch."""
    from outsize.wrapped.text import check_question

    texts = _prompts(options.prompt or [], options.prompts)
    check_question(texts, options.max_new_tokens, options.batch_size)
    if options.sample and options.temperature <= 0:
        raise ConfigError(
            f"--temperature is {options.temperature:g}; it has to be above zero; leave --sample out for the likeliest "
            "token"
        )
    if not options.sample and options.temperature != 1.0:
        output.say("note: --temperature has no effect without --sample")
    written, figures = _written(options, texts, shows=not output.as_json)
    if options.batch_size > 1:
        for one in written:
            output.print_result(f"{one.prompt}{one.text}\n")
    output.say(_summary(figures))
    output.emit({"written": [asdict(one) for one in written], **asdict(figures)})


def _written(
    options: GenerateOptions, texts: Sequence[str], *, shows: bool
) -> "tuple[list[Written], Figures]":
    """Return what the model writes after ``texts``; ``shows`` prints a single text while it is written."""
    import torch

    import outsize
    from outsize.wrapped.module import runner_of
    from outsize.wrapped.text import check_model, write

    streamed = outsize.load(
        options.model,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
        trainable=False,
        device=options.device,
        device_memory=options.device_memory,
        home=options.home,
        store_dir=options.store_dir,
    )
    try:
        check_model(streamed)
        tokenizer = _tokenizer(options.model, options.trust_remote_code)
        torch.manual_seed(options.seed)
        choice: dict[str, Any] = {"do_sample": options.sample}
        if options.sample:
            choice["temperature"] = options.temperature
        return write(
            streamed,
            tokenizer,
            texts,
            max_new_tokens=options.max_new_tokens,
            batch_size=options.batch_size,
            on_text=_print if shows else (lambda _: None),
            **choice,
        )
    finally:
        runner_of(streamed).close()


def _prompts(given: list[str], file: Path | None) -> list[str]:
    from outsize.wrapped.text import lines_of

    if file is None:
        return given
    try:
        return [*given, *lines_of(file.read_text(encoding="utf-8"))]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file} cannot be read as text: {error}; name a file in UTF-8 with a prompt on each line"
        ) from error


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
    else:
        lines.append("all weights stayed on the device")
    return "\n".join(lines)
