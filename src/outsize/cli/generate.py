"""``outsize generate``: text from a model whose weights are streamed."""

import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outsize.cli.console import Output
from outsize.cli.options import JsonOption
from outsize.errors import ConfigError, DataError
from outsize.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from outsize.wrapped.text import Figures


class Home(StrEnum):
    """Where weights rest."""

    AUTO = "auto"
    HOST = "host"
    DISK = "disk"


class Dtype(StrEnum):
    """Dtypes of weights and computation."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model directory or hub id.")],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="Text to go on from; repeatable.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="File with a prompt on each line.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Tokens to write per prompt.")] = 64,
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Prompts at once; weights come up once for all.")
    ] = 1,
    sample: Annotated[
        bool, typer.Option("--sample", help="Draw tokens; otherwise the likeliest one.")
    ] = False,
    temperature: Annotated[float, typer.Option("--temperature", help="Of --sample.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of --sample.")] = 0,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:N, emulated:1 or auto.")] = "auto",
    device_memory: Annotated[
        str | None, typer.Option("--device-memory", help="Budget on the device, e.g. 64MiB or 20GiB.")
    ] = None,
    home: Annotated[Home, typer.Option("--home", help="Where the weights rest.")] = Home.AUTO,
    store_dir: Annotated[
        Path | None, typer.Option("--store-dir", help="Directory of a disk home, best on a local NVMe.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of weights and computation.")] = Dtype.AUTO,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let Python code that comes with the model run.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write text with a model that may be larger than the device, its weights streamed once per token batch."""
    output = Output(as_json=as_json)
    with output.guarded():
        import torch

        import outsize
        from outsize.wrapped.module import runner_of
        from outsize.wrapped.text import check_model, check_question, write

        texts = _prompts(prompt or [], prompts)
        check_question(texts, max_new_tokens, batch_size)
        if sample and temperature <= 0:
            raise ConfigError(
                f"--temperature is {temperature:g}; it has to be above zero; leave --sample out for the likeliest token"
            )
        if not sample and temperature != 1.0:
            output.say("note: --temperature has no effect without --sample")

        streamed = outsize.load(
            model,
            dtype=dtype.value,
            trust_remote_code=trust_remote_code,
            trainable=False,
            device=device,
            device_memory=device_memory,
            home=home.value,
            store_dir=store_dir,
        )
        try:
            check_model(streamed)
            tokenizer = _tokenizer(model, trust_remote_code)
            torch.manual_seed(seed)
            choice: dict[str, Any] = {"do_sample": sample}
            if sample:
                choice["temperature"] = temperature
            written, figures = write(
                streamed,
                tokenizer,
                texts,
                max_new_tokens=max_new_tokens,
                batch_size=batch_size,
                on_text=(lambda _: None) if as_json else _print,
                **choice,
            )
        finally:
            runner_of(streamed).close()
        if not as_json and batch_size > 1:
            for one in written:
                output.print_result(f"{one.prompt}{one.text}\n")
        output.say(_summary(figures))
        output.emit({"written": [asdict(one) for one in written], **asdict(figures)})


def _prompts(given: list[str], file: Path | None) -> list[str]:
    from outsize.wrapped.text import lines_of

    if file is None:
        return given
    try:
        return [*given, *lines_of(file.read_text(encoding="utf-8"))]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as text: {error}") from error


def _tokenizer(model: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    from outsize.model.checkpoint_files import locate_checkpoint

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
