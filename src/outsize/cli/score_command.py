"""``outsize score``: logprobs, logits, hidden states and embeddings of many texts, by weights streamed once a wave."""

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outsize import files
from outsize.choices import Scored
from outsize.cli.text.console import Output
from outsize.cli.text.options import with_options
from outsize.cli.text.records_text import ResumedLines, digest_of, digest_of_data, now_and_then, results_at
from outsize.cli.text_writer import ModelOptions, TextWriter, state_of_model
from outsize.errors import ConfigError, DataError, StorageError
from outsize.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from outsize.wrapped.writing.scoring import ScoredText, ScoringFigures

_log = logging.getLogger(__name__)

_CONTEXT = 1024
_MOST_NAMED = 5  # of records that have no token


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(ModelOptions):
    """What can be asked of the command, option by option."""

    data: Annotated[
        Path,
        typer.Option(
            help="JSON lines with prompt or messages and completion, or with text; a text file; or the YAML file of a "
            "run that learns from a teacher, for its sequences."
        ),
    ]
    out: Annotated[
        Path, typer.Option(help="JSON lines; of logits and hidden states a directory of safetensors.")
    ]
    want: Annotated[Scored, typer.Option(help="What is wanted of each text.")] = "logprobs"
    context: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of the pieces that a text file is cut into; default: 1024."),
    ] = None
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Of logits write the K largest alone; less than all of them.")
    ] = None

    @property
    def in_files(self) -> bool:
        """Whether what is wanted of each text is a file."""
        return self.want in ("logits", "hidden")


@with_options(ScoreOptions)
def score(options: ScoreOptions, output: Output) -> None:
    """Score texts with a model that may be larger than the device; run again, it goes on where it ended."""
    from outsize.checkpoint.begun_adapters import servable
    from outsize.checkpoint.files.checkpoint_files import locate_checkpoint
    from outsize.wrapped.writing.scoring import ScoringFigures

    if options.top_k is not None and options.want != "logits":
        raise ConfigError("--top-k is of --want logits; leave it out")
    if options.context is not None and (_is_run(options) or options.data.suffix == ".jsonl"):
        raise ConfigError(f"--context cuts a text file into pieces, and {options.data} is none; leave it out")
    # A run may save a newer checkpoint meanwhile.
    options = replace(options, model=servable(options.model), context=options.context or _CONTEXT)
    figures, tell = ScoringFigures(), now_and_then(output.say)
    with contextlib.ExitStack() as stack:
        stack.enter_context(results_at(options.out, _settings(options), in_files=options.in_files))
        results = _Results(options)
        sequences, opened = _sequences(options, stack, output)
        writer = stack.enter_context(
            TextWriter(opened, "none" if options.want in ("hidden", "embeddings") else "auto")
        )
        if options.want == "embeddings" and (locate_checkpoint(options.model) / "modules.json").exists():
            _log.warning(
                "modules.json: embeddings are the mean of the last hidden states, and by none of its modules"
            )
        texts = _texts(options, writer) if sequences is None else sequences
        choice: dict[str, Any] = {"top_k": options.top_k, "figures": figures}
        if sequences is not None:
            choice["group_tokens"] = sequences.step_sequences * sequences.seq_len
            results.num_done -= results.num_done % sequences.step_sequences
        if results.num_done:
            output.say(f"{results.num_done} of {len(texts)} texts are scored already: going on behind them")
        to_do = range(results.num_done, len(texts))
        if options.in_files:
            output.say(_tell_size(options, writer, (texts[number] for number in to_do)))
        scored = (text for text in (texts[number] for number in to_do) if text is not None)
        scores = writer.score(scored, options.want, **choice)
        for number in to_do:
            text = texts[number]
            results.add(None if text is None else next(scores), text)
            tell(lambda: f"{results.num_done} of {len(texts)} texts, {_rate(figures)}")
    summary = {**asdict(figures), "num_done": results.num_done, **results.totals()}
    summary["tokens_per_s"] = figures.tokens_per_s
    summary["predicted_tokens_per_s"] = figures.predicted_tokens_per_s
    output.emit(summary)
    output.say(
        f"{figures.num_texts} texts of {figures.num_tokens} tokens in {format_seconds(figures.seconds)}, "
        f"{_rate(figures)}; "
        f"{format_bytes(figures.bytes_moved)} of weights came up in {figures.num_waves} waves"
    )
    if "perplexity" in summary:
        output.print_result(f"perplexity {summary['perplexity']:.6g}")


def _rate(figures: "ScoringFigures") -> str:
    predicted = figures.predicted_tokens_per_s
    beside = "" if predicted is None else f" ({predicted:.3g} predicted)"
    return f"{figures.tokens_per_s:.3g} tokens/s{beside}"


def _sequences(
    options: ScoreOptions, stack: contextlib.ExitStack, output: Output
) -> "tuple[Any, ScoreOptions]":
    """Return the sequences of the run that ``--data`` describes, or None, and the options with its dtype."""
    if not _is_run(options):
        return None, options
    from outsize.config import load_config
    from outsize.objectives.objective_data import ScoredSequences

    if options.want != "logits":
        raise ConfigError(f"--data {options.data}: of the sequences of a run, --want logits are written")
    config = load_config(options.data)
    dtype = config.model.dtype if options.dtype == "auto" else options.dtype
    return ScoredSequences(config, stack, output.say), replace(options, dtype=dtype)


def _texts(options: ScoreOptions, writer: TextWriter) -> "list[ScoredText | None]":
    """Return what is to be scored, and None for a record that has no token to score; says which these are."""
    texts: list[ScoredText | None] = []
    empty = []
    most, counts = writer.num_positions, options.want in ("logprobs", "logits")
    for text, where in _records(options, writer):
        if most and len(text.ids) > most:
            raise DataError(
                f"{where}: {len(text.ids)} tokens are more than the {most} positions of the model; cut the text, one "
                "that is no record by --context"
            )
        has_token = 1 <= text.start < len(text.ids) if counts else bool(text.ids)
        texts.append((text if counts else replace(text, start=1)) if has_token else None)
        if not has_token:
            empty.append(where)
    if empty:
        named = ", ".join(empty[:_MOST_NAMED]) + (", …" if len(empty) > _MOST_NAMED else "")
        problem = (
            f"of {len(texts)} texts {len(empty)} have no token to score, or none before the first: {named}"
        )
        if len(empty) == len(texts):
            raise DataError(f"{problem}; name a file with texts")
        _log.warning("%s; their results are empty", problem)
    return texts


def _records(options: ScoreOptions, writer: TextWriter) -> "Iterator[tuple[ScoredText, str]]":
    """Yield the texts of a file, and where each stands."""
    from outsize.cli.text.prompts import read_records, read_text, tell_unread
    from outsize.training.run_data import read_prompt, unread_of
    from outsize.wrapped.writing.scoring import ScoredText

    if options.data.suffix != ".jsonl":
        ids = writer.scored_text(read_text(options.data), None).ids
        context = options.context or _CONTEXT
        for start in range(0, max(len(ids) - 1, 1), context - 1):  # every token but the first counts once
            yield ScoredText(ids[start : start + context]), str(options.data)
        return
    records = read_records(options.data)
    tell_unread((name for record, _ in records for name in unread_of(record, is_scored=True)), options.data)
    for record, where in records:
        completion = record.get("completion")
        if completion is None and isinstance(record.get("text"), str):
            yield writer.scored_text(record["text"], None), where
        elif isinstance(completion, str):
            text = writer.scored_text(read_prompt(record, where), completion)
            yield text if completion else replace(text, start=len(text.ids)), where
        elif options.want == "logprobs":
            spoken = (
                "" if "messages" not in record else "; of a conversation, put the reply to be scored there"
            )
            raise DataError(
                f"{where}: a record needs 'text', or 'completion' beside 'prompt' or 'messages'{spoken}"
            )
        else:
            yield writer.scored_text(read_prompt(record, where), None), where


def _tell_size(options: ScoreOptions, writer: TextWriter, texts: "Iterable[ScoredText | None]") -> str:
    """Return how much will be written."""
    num_tokens = 0
    for text in texts:
        if text is not None:
            counts = len(text.ids) - text.start if text.counts is None else int(text.counts.sum())
            num_tokens += len(text.ids) if options.want == "hidden" else counts
    num_bytes = num_tokens * writer.bytes_per_token(options.want, options.top_k)
    size = f"{options.want} of {num_tokens} tokens take {format_bytes(num_bytes)} in {options.out}"
    if num_bytes > (free := files.free_bytes(options.out)):
        fewer = ", or write fewer by --top-k" if options.want == "logits" and options.top_k is None else ""
        raise StorageError(
            f"{size}, and {format_bytes(free)} are free; choose a place on another disk{fewer}"
        )
    return size


def _settings(options: ScoreOptions) -> dict[str, str]:
    """Return what results are made with: the options, and digests of the data and of the files of the model."""
    names = ("model", "base", "dtype", "data", "want", "context", "top_k")
    settings = {name: str(getattr(options, name)) for name in names}
    settings |= {"data_digest": digest_of_data(options.data)}
    if _is_run(options):
        settings["data_files"] = _state_of_data(options.data)
    return settings | {"model_files": state_of_model(options.model, options.base)}


def _is_run(options: ScoreOptions) -> bool:
    """Whether the sequences of a run are scored, and no texts."""
    return options.data.suffix in (".yaml", ".yml")


def _state_of_data(run: Path) -> str:
    """Return a digest of the files that the sequences of a run are made of, those of its tokenizer among them."""
    from outsize.config import load_config
    from outsize.session.steps import list_files

    config = load_config(run)
    sources = [(str(each.path), each.glob) for each in (config.data, *config.data.more)]
    if config.eval.data is not None:
        sources.append((str(config.eval.data), config.data.glob))
    return digest_of([list_files(sources), state_of_model(str(config.model.path))])


class _Results:
    """What is written of a scoring: a line or a file for each text, and how far a former one came.

    Raises:
        ConfigError: there is something else.
    """

    def __init__(self, options: ScoreOptions) -> None:
        self._out, self._want = options.out, options.want
        self._logprob, self._num_scored = 0.0, 0
        self._lines = None if options.in_files else ResumedLines(options.out)
        self.num_done = self._count_files() if self._lines is None else self._lines.count
        for number, line in enumerate(() if self._lines is None else self._lines.former(), 1):
            try:
                self._count(line.get("token_logprobs", ()))
            except TypeError as error:
                raise ConfigError(
                    f"{options.out}, line {number}: not what this command writes; choose another --out"
                ) from error

    def add(self, result: Any, text: "ScoredText | None") -> None:
        """Write what is wanted of ``text``, the next one; beside logits what they were computed from."""
        if self._lines is None:
            import torch
            from safetensors.torch import save_file

            result = torch.empty(0) if text is None else result
            is_one = isinstance(result, torch.Tensor)
            tensors: dict[str, Any] = {self._want: result} if is_one else asdict(result)
            if self._want == "logits" and text is not None:
                tensors["logits"] = tensors.pop("values", result)
                vocab_size = tensors.get("vocab_size", tensors["logits"].shape[-1])
                ids = torch.tensor(text.ids, dtype=torch.int32)
                counts = torch.arange(len(ids)) >= text.start if text.counts is None else text.counts
                tensors |= {"input_ids": ids, "counts": counts, "vocab_size": torch.tensor(vocab_size)}
                tensors |= {name: value.int() for name, value in text.inputs.items()}

            place = self._file(self.num_done)
            partial = place.with_name(place.name + files.PARTIAL)
            try:
                save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
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
        if self._want == "embeddings":
            return {"embedding": None if result is None else result.tolist()}
        if result is None:
            return {"logprob": None, "is_greedy": None, "token_logprobs": []}
        self._count(result.tokens)
        return {"logprob": result.total, "is_greedy": result.is_greedy, "token_logprobs": list(result.tokens)}

    def _count(self, logprobs: Any) -> None:
        self._logprob += sum(logprobs)
        self._num_scored += len(logprobs)

    def _count_files(self) -> int:
        number = 0
        while self._file(number).exists():
            number += 1
        return number

    def _file(self, number: int) -> Path:
        return self._out / f"{number:08}.safetensors"
