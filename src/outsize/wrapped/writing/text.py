"""Prompts in, text out, with what it took: the work of ``outsize generate``."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import nn

from outsize.errors import DataError, ModelError
from outsize.inference.experts import ExpertStatistics
from outsize.inference.inference_session import InferenceStatistics
from outsize.planner.search.forward_plan import break_even_batch
from outsize.wrapped.module import runner_of
from outsize.wrapped.writing.detokenizer import Endings, Token, text_of
from outsize.wrapped.writing.generation_settings import check_counts, settle_settings
from outsize.wrapped.writing.generations import (
    GenerationChoice,
    TextProgress,
    check_lengths,
    encodes,
    generate_batches,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a generation took.

    Attributes:
        num_prompts: written to.
        num_tokens: that were written.
        num_passes: forwards; one writes a token for every prompt of a batch.
        seconds: in all, loading the tokenizer and filling the home not counted.
        tokens_per_s: written.
        bytes_per_pass: weights that came up per pass, on average.
        stall_share: of the seconds, how much computing waited for weights.
        link_bytes_per_s: while weights came up; None where none did.
        break_even_batch: prompts at once from which on computing takes longer than moving; None where nothing moves.
        num_kept: units that stayed on the device at the end.
        num_streamed: units that did not.
        cache_bytes: keys and values at the end of the last batch.
        most_rows: texts that were written at once, at most.
        experts: those that are fetched one by one; None where there are none.
    """

    num_prompts: int
    num_tokens: int
    num_passes: int
    seconds: float
    tokens_per_s: float
    bytes_per_pass: float
    stall_share: float
    link_bytes_per_s: float | None
    break_even_batch: float | None
    num_kept: int
    num_streamed: int
    cache_bytes: int
    most_rows: int
    experts: ExpertStatistics | None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to go on from.

    Attributes:
        text: as the tokenizer gets it.
        is_templated: whether a chat template wrote it, and with it the special tokens that a tokenizer adds otherwise.
    """

    text: str
    is_templated: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """A prompt and its completion.

    Attributes:
        prompt: its text.
        text: what was written, without special tokens.
        num_tokens: of it, the mark of the end included.
        finish_reason: ``stop`` where the text ends, by a mark or a string that ends it, and ``length`` where it is cut.
    """

    prompt: str
    text: str
    num_tokens: int
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingOptions:
    """How texts are written.

    Attributes:
        max_new_tokens: per prompt.
        batch_size: prompts that are computed together.
        in_flight: batches that share each load of weights, at most; None for as many as hide it.
        seed: of draws; see `outsize.wrapped.writing.generations.generate`. None leaves them to torch's own generator.
        stop: strings that end a text, which is written up to the first of them.
        num_likeliest: of each token the logprob, and those of so many at its place; None for no logprobs.
        shows_special: whether special tokens have text.
    """

    max_new_tokens: int
    batch_size: int
    in_flight: int | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    num_likeliest: int | None = None
    shows_special: bool = False


class _Texts:
    """Texts on their way, and those that have ended.

    Args:
        prompts: that they follow.
        endings: where they end.
        options: see `write`.
        on_token: see `write`; None where beams write, whose texts are known at their end.
        encodes: whether the model reads prompts with an encoder.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        endings: Endings,
        options: WritingOptions,
        on_token: Callable[[Token], None] | None,
        encodes: bool,
    ) -> None:
        self.written: list[Written] = []
        self.num_passes = 0  # of the batches that have ended
        self._prompts, self._endings, self._options = prompts, endings, options
        self._on_token, self._encodes = on_token, encodes
        self._progress: dict[int, TextProgress] = {}

    def watch(self, first_row: int, num_before: int, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments of `generate` that show a batch as it is written."""
        options = self._options
        self._progress[first_row] = progress = TextProgress(
            self._endings,
            self._on_token,
            options.stop,
            options.num_likeliest,
            first_row,
            options.shows_special,
        )
        return progress.watching(num_before, asked)

    def take(self, ids: Sequence[list[int]], rows: list[list[int]]) -> list[Written]:
        """Return the texts of a batch that has ended; those before it have."""
        progress = self._progress.pop(len(self.written))
        progress.end()
        self.num_passes += progress.num_passes
        texts = []
        for prompt, before, row in zip(self._prompts[len(self.written) :], ids, rows, strict=False):
            tokens, ended = self._endings.cut([] if self._encodes else before, row)
            text, num_tokens, stopped = text_of(
                self._endings.tokenizer, tokens, self._options.stop, self._options.shows_special
            )
            texts.append(Written(prompt.text, text, num_tokens, "stop" if ended or stopped else "length"))
        self.written += texts
        return texts


def write(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    options: WritingOptions,
    *,
    on_token: Callable[[Token], None] = lambda _: None,
    on_written: Callable[[Written], None] = lambda _: None,
    **choice: Any,
) -> tuple[list[Written], Figures]:
    """Write after each prompt.

    Args:
        model: wrapped, and able to generate.
        tokenizer: its own.
        prompts: texts.
        options: how.
        on_token: given each token as it is written, of all prompts in flight; put together its pieces are the text.
        on_written: given each text when it has ended, in order.
        choice: keyword arguments of `generate`; its ``stopping_criteria`` are called after a token, before it is shown.

    Raises:
        DataError: no prompt, an empty one, or one that is too long for the model.
        ConfigError: the checkpoint's generation_config.json asks for what is not done.
    """
    settled = settle_settings(model, tokenizer, choice)
    choice = settled.update(**choice)
    encoded = [_encode(model, tokenizer, prompt) for prompt in prompts]
    names = [f"the prompt {prompt.text[:40]!r}" for prompt in prompts]
    check_lengths(model, encoded, options.max_new_tokens, names)
    endings = Endings(tokenizer, settled)
    how = GenerationChoice(
        settled=endings.settled,
        choice={**choice, "max_new_tokens": options.max_new_tokens},
        padding=tokenizer.pad_token_id,
        batch_size=options.batch_size,
        in_flight=options.in_flight,
        seed=options.seed,
    )
    texts = _Texts(prompts, endings, options, on_token if how.beams == 1 else None, encodes(model))

    def take(ids: Sequence[list[int]], rows: list[list[int]]) -> None:
        first = len(texts.written)
        for number, one in enumerate(texts.take(ids, rows), first):
            if how.beams > 1:
                on_token(Token(number, one.text))
            on_written(one)

    started, former = time.perf_counter(), _moved(model)
    num_measured, most_rows = generate_batches(model, encoded, how, take, texts.watch)
    took, now = time.perf_counter() - started, _moved(model)
    # Where nothing streams, nobody counts passes but the batches themselves, one after the other.
    num_passes = num_measured + texts.num_passes
    if now is not None:
        num_passes = now.num_passes - (former.num_passes if former else 0)
    return texts.written, _figures(texts.written, num_passes, took, most_rows, former, now)


def check_question(num_prompts: int, max_new_tokens: int, batch_size: int) -> None:
    """Refuse what cannot be written, whatever the model.

    Raises:
        ConfigError: a count below one.
        DataError: no prompt.
    """
    check_counts(max_new_tokens, batch_size, None)
    if not num_prompts:
        raise DataError("there is no prompt; give --prompt, a file with one per line as --prompts, or --chat")


def check_model(model: nn.Module) -> None:
    """Refuse a model that writes no text.

    Raises:
        ModelError: it has no head that gives the next token.
    """
    can = getattr(model, "can_generate", None)
    if can is None or not can():
        raise ModelError(
            f"{type(model).__name__} writes no text; outsize generate takes causal language models. For embeddings, "
            "call outsize.load(..., trainable=False) in Python (docs/generate.md)"
        )


def _encode(model: nn.Module, tokenizer: Any, prompt: Prompt) -> list[int]:
    check_text(prompt.text, "the prompt")
    ids: list[int] = tokenizer(prompt.text, add_special_tokens=not prompt.is_templated)["input_ids"]
    rows = getattr(cast(Any, model).config.get_text_config(), "vocab_size", None)
    if rows is not None and max(ids, default=0) >= rows:
        token = next(token for token in ids if token >= rows)
        raise DataError(
            f"the prompt {prompt.text[:40]!r} has the token {tokenizer.convert_ids_to_tokens(token)!r}, and its id "
            f"{token} is outside the {rows} rows of the model's embedding; leave it out, or use the model's tokenizer"
        )
    return ids


def check_text(text: str, what: str) -> None:
    """Refuse what is no text: half of a character, as escapes of JSON and bytes that are not UTF-8 leave it.

    Raises:
        DataError: says where.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} is no text: at character {error.start} is an unpaired surrogate, {text[error.start]!r}; write the "
            "character as a whole, in UTF-8"
        ) from error


def _moved(model: nn.Module) -> InferenceStatistics | None:
    return runner_of(model).inference_statistics()


def _figures(
    written: Sequence[Written],
    num_passes: int,
    seconds: float,
    most_rows: int,
    before: InferenceStatistics | None,
    after: InferenceStatistics | None,
) -> Figures:
    def since(values: Callable[[InferenceStatistics], float]) -> float:
        return (values(after) if after else 0.0) - (values(before) if before else 0.0)

    moved, load_s, stall_s = (
        since(lambda s: s.bytes_moved),
        since(lambda s: s.load_s),
        since(lambda s: s.stall_s),
    )
    num_tokens = sum(one.num_tokens for one in written)
    rate = moved / load_s if load_s > 0 and moved else None
    compute_s = (seconds - stall_s) / max(num_passes, 1)
    streams = after is not None and after.num_streamed > 0
    return Figures(
        num_prompts=len(written),
        num_tokens=num_tokens,
        num_passes=num_passes,
        seconds=seconds,
        tokens_per_s=num_tokens / seconds,
        bytes_per_pass=moved / max(num_passes, 1),
        stall_share=stall_s / seconds,
        link_bytes_per_s=rate,
        break_even_batch=break_even_batch(
            after.bytes_per_pass, rate, compute_s, max(round(num_tokens / max(num_passes, 1)), 1)
        )
        if streams and after is not None and rate is not None
        else None,
        num_kept=after.num_kept if after else 0,
        num_streamed=after.num_streamed if after else 0,
        cache_bytes=after.cache_bytes if after else 0,
        most_rows=most_rows,
        experts=after.experts.since(before.experts if before else None) if after and after.experts else None,
    )
