"""Prompts in, text out, with what it took: the work of ``outsize generate``."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from outsize.compat.transformers_private import reads_padding
from outsize.errors import ConfigError, DataError, ModelError
from outsize.inference.forward_extent import ForwardExtent, Growth
from outsize.inference.inference_session import InferenceStatistics
from outsize.model.sizes.config_sizes import num_positions
from outsize.planner.search.forward_plan import break_even_batch
from outsize.wrapped.module import runner_of
from outsize.wrapped.writing.detokenizer import text_of
from outsize.wrapped.writing.endings import Endings, TextProgress, Token
from outsize.wrapped.writing.generation_settings import looks_at_padding, settle_settings, settled_in


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


def write(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch_size: int,
    on_token: Callable[[Token], None] = lambda _: None,
    on_written: Callable[[Written], None] = lambda _: None,
    stop: Sequence[str] = (),
    num_likeliest: int | None = None,
    **choice: Any,
) -> tuple[list[Written], Figures]:
    """Write after each prompt.

    Args:
        model: wrapped, and able to generate.
        tokenizer: its own.
        prompts: texts.
        max_new_tokens: per prompt.
        batch_size: prompts at once; weights come up once for all of them.
        on_token: given each token as it is written, of all prompts of a batch; put together its pieces are the text.
        on_written: given each text when it has ended.
        stop: strings that end a text, which is written up to the first of them.
        num_likeliest: of each token the logprob, and those of so many at its place; None for no logprobs.
        choice: keyword arguments of `generate`; its ``stopping_criteria`` are called after a token, before it is shown.

    Raises:
        DataError: no prompt, an empty one, or one that is too long for the model.
        ConfigError: the checkpoint's generation_config.json asks for what is not done.
    """
    settled = settle_settings(model, tokenizer, choice)
    beams = settled.num_beams or 1
    encoded = [_encode(model, tokenizer, prompt) for prompt in prompts]
    _check_lengths(model, prompts, encoded, max_new_tokens)
    written: list[Written] = []
    num_passes, started, former = 0, time.perf_counter(), _moved(model)
    asked = {**choice, "max_new_tokens": max_new_tokens}
    endings = Endings(tokenizer, settled)
    batches = _batches(model, settled, encoded, batch_size)
    growths = (_growth(model, ids, beams, max_new_tokens) for ids in batches)
    largest = max(growths, key=lambda growth: growth.rows * growth.length, default=None)
    with settled_in(model, settled), torch.no_grad(), runner_of(model).inferring(largest):
        if _moved(model) is not None:
            num_passes = _measure(model, tokenizer, batches, settled, asked)
        for ids in batches:
            shown = on_token if beams == 1 else None
            progress = TextProgress(endings, shown, stop, num_likeliest, first_row=len(written))
            rows = _rows(model, tokenizer, ids, settled, asked, progress)
            num_passes += progress.num_passes
            for before, row in zip(ids, rows, strict=True):
                tokens, ended = endings.cut([] if _encodes(model) else before, row)
                text, num_tokens, stopped = text_of(tokenizer, tokens, stop)
                if shown is None:
                    on_token(Token(len(written), text))
                prompt, done = prompts[len(written)].text, ended or stopped
                written.append(Written(prompt, text, num_tokens, "stop" if done else "length"))
                on_written(written[-1])
    seconds = time.perf_counter() - started
    return written, _figures(written, num_passes, seconds, batch_size, former, _moved(model))


def _growth(model: nn.Module, ids: Sequence[list[int]], beams: int, num_new: int) -> Growth:
    """Return how far a batch goes on; the cache of an encoder-decoder begins with one token."""
    return Growth(beams * len(ids), (1 if _encodes(model) else max(map(len, ids))) + num_new, num_new)


def _encodes(model: nn.Module) -> bool:
    return bool(cast(Any, model).config.is_encoder_decoder)


def _batches(
    model: nn.Module, settled: Any, rows: Sequence[list[int]], size: int
) -> list[Sequence[list[int]]]:
    """Return the rows in batches, in order; where padding would be read as text all of a batch have one length."""
    mixed = not (reads_padding(model) or looks_at_padding(settled, encodes=_encodes(model)))
    batches: list[list[list[int]]] = []
    for row in rows:
        if not batches or len(batches[-1]) == size or not (mixed or len(batches[-1][0]) == len(row)):
            batches.append([])
        batches[-1].append(row)
    return list(batches)


def _measure(
    model: nn.Module,
    tokenizer: Any,
    batches: Sequence[Sequence[list[int]]],
    settled: Any,
    asked: dict[str, Any],
) -> int:
    """Run the prompts that take the most memory once, where others come first: if they are refused, before any text."""
    extents = [ForwardExtent(len(ids), max(map(len, ids))) for ids in batches]
    known: list[ForwardExtent] = []
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the text itself will warn
        for ids, extent in sorted(
            zip(batches, extents, strict=True), key=lambda one: -one[1].rows * one[1].length
        ):
            if extents[0].covers(extent) or any(one.covers(extent) for one in known):
                continue
            known.append(extent)
            _rows(model, tokenizer, ids, settled, {**asked, "max_new_tokens": 1})
    return len(known)


def _rows(
    model: nn.Module,
    tokenizer: Any,
    ids: Sequence[list[int]],
    settled: Any,
    asked: dict[str, Any],
    progress: TextProgress | None = None,
) -> list[list[int]]:
    """Return the new tokens of each row of a batch."""
    encodes = _encodes(model)
    inputs = _padded(ids, tokenizer.pad_token_id, before=not encodes)
    num_before = 1 if encodes else inputs["input_ids"].shape[1]
    if progress is not None:
        asked = progress.watching(num_before, asked)
    output = cast(Any, model).generate(
        **inputs,
        **asked,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
        **({"tokenizer": tokenizer} if settled.stop_strings else {}),
    )
    if progress is not None:
        progress.end()
    rows: list[list[int]] = output[:, num_before:].tolist()
    return rows


def check_question(num_prompts: int, max_new_tokens: int, batch_size: int) -> None:
    """Refuse what cannot be written, whatever the model.

    Raises:
        ConfigError: a count below one.
        DataError: no prompt.
    """
    if max_new_tokens < 1 or batch_size < 1:
        raise ConfigError(
            f"max_new_tokens is {max_new_tokens} and batch_size {batch_size}; both are at least 1"
        )
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


def positions_of(model: nn.Module) -> int | None:
    """Return how many tokens a model takes; None where nothing limits them."""
    return num_positions(cast(Any, model).config.get_text_config().to_dict())


def _encode(model: nn.Module, tokenizer: Any, prompt: Prompt) -> list[int]:
    check_text(prompt.text, "the prompt")
    ids: list[int] = tokenizer(prompt.text, add_special_tokens=not prompt.is_templated)["input_ids"]
    if not ids:
        raise DataError("an empty prompt has no token to begin with; write something")
    rows = getattr(cast(Any, model).config.get_text_config(), "vocab_size", None)
    if rows is not None and max(ids) >= rows:
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


def _check_lengths(
    model: nn.Module, prompts: Sequence[Prompt], encoded: Sequence[list[int]], max_new_tokens: int
) -> None:
    most = positions_of(model)
    encodes = _encodes(model)
    for prompt, ids in zip(prompts, encoded, strict=True):
        length = max(len(ids), max_new_tokens) if encodes else len(ids) + max_new_tokens
        if most and length > most:
            raise DataError(
                f"the prompt {prompt.text[:40]!r} has {len(ids)} tokens, and with {max_new_tokens} new ones would be "
                f"longer than the {most} positions of the model; shorten it, or ask for fewer"
            )


def _padded(rows: Sequence[list[int]], padding: int, *, before: bool) -> dict[str, Tensor]:
    """Ids [B, S] and their mask; shorter rows are padded ``before`` they begin, or, as encoders are trained, behind."""
    length = max(map(len, rows))

    def filled(row: list[int], value: int) -> list[int]:
        gap = [value] * (length - len(row))
        return gap + row if before else row + gap

    return {
        "input_ids": torch.tensor([filled(row, padding) for row in rows]),
        "attention_mask": torch.tensor([filled([1] * len(row), 0) for row in rows]),
    }


def _moved(model: nn.Module) -> InferenceStatistics | None:
    return runner_of(model).inference_statistics()


def _figures(
    written: Sequence[Written],
    num_passes: int,
    seconds: float,
    batch_size: int,
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
            after.bytes_per_pass, rate, compute_s, min(batch_size, len(written))
        )
        if streams and after is not None and rate is not None
        else None,
        num_kept=after.num_kept if after else 0,
        num_streamed=after.num_streamed if after else 0,
        cache_bytes=after.cache_bytes if after else 0,
    )
