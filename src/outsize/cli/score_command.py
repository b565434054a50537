"""``outsize score``: logprobs, logits, hidden states and embeddings of many texts, by weights streamed once a wave."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outsize import files
from outsize.choices import Scored
from outsize.cli.text.console import Output
from outsize.cli.text.options import with_options
from outsize.cli.text.records_text import ResumedLines, check_made_with, now_and_then, size_of
from outsize.cli.text_writer import ModelOptions, TextWriter
from outsize.errors import ConfigError, DataError
from outsize.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from outsize.wrapped.writing.scoring import ScoredText


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(ModelOptions):
    """What can be asked of the command, option by option."""

    data: Annotated[
        Path,
        typer.Option(
            "--data", help="JSON lines with prompt or messages and completion, or with text; or a text file."
        ),
    ]
    out: Annotated[
        Path,
        typer.Option("--out", help="JSON lines; of logits and hidden states a directory of safetensors."),
    ]
    want: Annotated[Scored, typer.Option("--want", help="What is wanted of each text.")] = "logprobs"
    context: Annotated[
        int, typer.Option("--context", min=2, help="Tokens of the pieces that a text file is cut into.")
    ] = 1024


@with_options(ScoreOptions)
def score(options: ScoreOptions, output: Output) -> None:
    """Score texts with a model that may be larger than the device; run again, it goes on where it ended."""
    from outsize.wrapped.writing.scoring import ScoringFigures

    results = _Results(options)
    figures, tell = ScoringFigures(), now_and_then(output.say)
    with TextWriter(options, "none" if options.want in ("hidden", "embeddings") else "auto") as writer:
        texts = list(_texts(options, writer))
        if results.num_done:
            output.say(f"{results.num_done} of {len(texts)} texts are scored already: going on behind them")
        for result in writer.score(texts[results.num_done :], options.want, figures):
            results.add(result)
            tell(
                lambda: (
                    f"{results.num_done} of {len(texts)} texts, {figures.tokens_per_s:.3g} tokens/s "
                    f"({figures.predicted_tokens_per_s:.3g} predicted)"
                )
            )
    summary = {**asdict(figures), "num_done": results.num_done, **results.totals()}
    summary["tokens_per_s"] = figures.tokens_per_s
    summary["predicted_tokens_per_s"] = figures.predicted_tokens_per_s
    output.emit(summary)
    output.say(
        f"{figures.num_texts} texts of {figures.num_tokens} tokens in {format_seconds(figures.seconds)}, "
        f"{figures.tokens_per_s:.3g} tokens/s ({figures.predicted_tokens_per_s:.3g} predicted); "
        f"{format_bytes(figures.bytes_moved)} of weights came up in {figures.num_waves} waves"
    )
    if "perplexity" in summary:
        output.print_result(f"perplexity {summary['perplexity']:.6g}")


def _texts(options: ScoreOptions, writer: TextWriter) -> "Iterator[ScoredText]":
    from outsize.cli.text.prompts import read_records
    from outsize.training.run_data import read_prompt
    from outsize.wrapped.writing.scoring import ScoredText

    if options.data.suffix != ".jsonl":
        try:
            ids = writer.scored_text(files.read_text(options.data, "utf-8-sig", files.MOST_TEXT), None).ids
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{options.data} cannot be read as text: {error}; name a file in UTF-8"
            ) from error
        for start in range(
            0, max(len(ids) - 1, 1), options.context - 1
        ):  # every token but the first counts once
            yield ScoredText(ids[start : start + options.context])
        return
    for record, where in read_records(options.data):
        completion = record.get("completion")
        if completion is None and isinstance(record.get("text"), str):
            yield writer.scored_text(record["text"], None)
        elif isinstance(completion, str):
            yield writer.scored_text(read_prompt(record, where), completion)
        elif options.want == "logprobs":
            spoken = (
                "" if "messages" not in record else "; of a conversation, put the reply to be scored there"
            )
            raise DataError(
                f"{where}: a record needs 'text', or 'completion' beside 'prompt' or 'messages'{spoken}"
            )
        else:
            yield writer.scored_text(read_prompt(record, where), None)


class _Results:
    """What is written of a scoring: a line or a file for each text, and how far a former one came.

    Args:
        options: of the command; a file beside ``--out`` tells what it was made with.

    Raises:
        ConfigError: it was made with something else.
    """

    def __init__(self, options: ScoreOptions) -> None:
        self._out, self._want = options.out, options.want
        self._as_files = options.want in ("logits", "hidden")
        settings = {
            name: str(getattr(options, name))
            for name in ("model", "base", "dtype", "data", "want", "context")
        }
        settings["data_bytes"] = size_of(options.data)
        check_made_with(options.out, settings)
        self._logprob, self._num_scored = 0.0, 0
        self._lines = None if self._as_files else ResumedLines(options.out)
        self.num_done = self._count_files() if self._lines is None else self._lines.count
        for number, line in enumerate(() if self._lines is None else self._lines.former(), 1):
            try:
                self._count(line.get("token_logprobs", ()))
            except TypeError as error:
                raise ConfigError(
                    f"{options.out}, line {number}: not what this command writes; choose another --out"
                ) from error

    def add(self, result: Any) -> None:
        """Write what is wanted of the next text."""
        if self._lines is None:
            from safetensors.torch import save_file

            place = self._file(self.num_done)
            partial = place.with_name(place.name + files.PARTIAL)
            try:
                save_file({self._want: result.contiguous()}, partial)
                files.sync(partial)  # else a loss of power leaves an empty file of that name
                files.system().rename(partial, place)
            except BaseException:
                with contextlib.suppress(OSError):
                    files.system().unlink(partial)
                raise
        else:
            self._lines.add(self._line(result))
        self.num_done += 1

    def totals(self) -> dict[str, float]:
        """Return the logprob of all tokens, those of former runs among them, and the perplexity."""
        if not self._num_scored:
            return {}
        return {
            "logprob": self._logprob,
            "num_scored_tokens": self._num_scored,
            "perplexity": math.exp(min(-self._logprob / self._num_scored, 700)),
        }

    def _line(self, result: Any) -> dict[str, Any]:
        if not hasattr(result, "tokens"):
            return {"embedding": result.tolist()}
        self._count(result.tokens)
        return {"logprob": result.total, "is_greedy": result.is_greedy, "token_logprobs": list(result.tokens)}

    def _count(self, logprobs: Any) -> None:
        self._logprob += sum(logprobs)
        self._num_scored += len(logprobs)

    def _count_files(self) -> int:
        self._out.mkdir(exist_ok=True)
        number = 0
        while self._file(number).exists():
            number += 1
        return number

    def _file(self, number: int) -> Path:
        return self._out / f"{number:08}.safetensors"
