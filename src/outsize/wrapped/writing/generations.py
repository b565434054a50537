"""Tokens of many prompts: generations in flight together, each with the tokens that it has alone.

Prompts go in batches, which `generate` of transformers takes as they are, and as many batches are in flight as hide the
loading of weights (`outsize.inference.waves`). Where tokens are drawn, each prompt has draws of its own: those of
``torch.manual_seed(seed + its number)``, whatever runs beside it.
"""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from outsize.compat.transformers_private import reads_padding, sampling_by
from outsize.errors import ConfigError, DataError
from outsize.inference.kv_cache import ForwardExtent, Growth
from outsize.inference.waves import in_order
from outsize.model.sizes.model_spec import num_positions
from outsize.wrapped.module import runner_of
from outsize.wrapped.writing.detokenizer import Endings, TextUntil, Token
from outsize.wrapped.writing.generation_settings import (
    as_tokens,
    check_counts,
    ends_of,
    looks_at_padding,
    settled_in,
)

_SEVERAL = ("num_return_sequences", "return_dict_in_generate")  # what would return more than rows of tokens

Watch = Callable[[int, int, Mapping[str, Any]], dict[str, Any]]


class TextProgress:
    """What transformers calls after each token: counts passes, shows the text of each row, and ends it at a string.

    Args:
        endings: where texts end.
        on_token: given each token; None where beams write, whose texts are known at their end.
        stop: see `write`.
        num_likeliest: see `write`.
        first_row: number of the first text.
        shows_special: see `Detokenizer`.

    Attributes:
        num_passes: forwards of these texts.
        first_row: as above.

    Raises:
        ConfigError: logprobs of beams.
    """

    def __init__(
        self,
        endings: Endings,
        on_token: Callable[[Token], None] | None,
        stop: Sequence[str],
        num_likeliest: int | None,
        first_row: int,
        shows_special: bool = False,
    ) -> None:
        if on_token is None and num_likeliest is not None:
            raise ConfigError("generation_config.json: num_beams: beams have no logprobs; ask for none")
        self.num_passes = self._num_before = 0
        self._endings, self._on_token, self._stop = endings, on_token, stop
        self._num_likeliest, self.first_row = num_likeliest, first_row
        self._shows_special = shows_special
        self._texts: list[TextUntil] = []
        self._logprobs: Tensor | None = None  # of the next token [B, V]

    def watching(self, num_before: int, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return keyword arguments of `generate` that have this called; texts begin behind ``num_before`` tokens."""
        self._num_before = num_before
        criteria = [*asked.get("stopping_criteria", ()), *self._endings.criteria, self]
        scored = {} if self._num_likeliest is None else {"logits_processor": [self.scored]}
        return {**asked, "stopping_criteria": criteria, **scored}

    def scored(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Keep the logprobs that the next token of each row is chosen from; a logits processor of transformers."""
        self._logprobs = scores.log_softmax(-1)
        return scores

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Show the tokens that are new, and return of which rows the text has ended; as a stopping criterion."""
        self.num_passes += 1
        ends = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        if self._on_token is None:
            return ends
        self._texts = self._texts or [
            TextUntil(self._endings.tokenizer, self._stop, self._shows_special) for _ in ids
        ]
        for row, (text, tokens) in enumerate(zip(self._texts, ids.tolist(), strict=True)):
            before, written = tokens[: self._num_before], tokens[self._num_before :]
            if not (text.has_ended or self._endings.is_end(before, written[: text.num_tokens])):
                for token in written[text.num_tokens :]:
                    self._say(row, text.put(token), token)
            ends[row] = text.has_ended
        return ends

    def end(self) -> None:
        """Show what has waited for more."""
        for row, text in enumerate(self._texts):
            if piece := text.end():
                self._say(row, piece)

    def _say(self, row: int, piece: str, token: int | None = None) -> None:
        assert self._on_token is not None
        logprob, likeliest = None, []
        if self._logprobs is not None and token is not None:
            logprobs = self._logprobs[row]
            logprob = float(logprobs[token])
            values, numbers = logprobs.topk(min(self._num_likeliest or 0, len(logprobs)))
            likeliest = list(zip(numbers.tolist(), values.tolist(), strict=True))
        self._on_token(Token(self.first_row + row, piece, token, logprob, likeliest))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChoice:
    """How tokens are generated.

    Attributes:
        settled: a generation config of transformers, with all that is said beside the checkpoint's own.
        choice: keyword arguments of `generate` that are none of it, and ``max_new_tokens``.
        padding: token that fills short rows up.
        batch_size: prompts that are computed together.
        in_flight: batches that share each load of weights, at most; None for as many as hide it.
        seed: of draws; None leaves them to torch's own generator, one batch after the other.
    """

    settled: Any
    choice: Mapping[str, Any]
    padding: int
    batch_size: int
    in_flight: int | None = None
    seed: int | None = None

    @property
    def beams(self) -> int:
        """Of each prompt."""
        return int(self.settled.num_beams or 1)


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int = 1,
    in_flight: int | None = None,
    seed: int = 0,
    on_tokens: Callable[[int, list[int]], None] = lambda number, tokens: None,
    **choice: Any,
) -> list[list[int]]:
    """Return the new tokens of each prompt; weights come up once for all that are in flight.

    Args:
        model: wrapped, and able to generate.
        prompts: tokens of each.
        max_new_tokens: of each, at most.
        batch_size: prompts that are computed together; short ones are padded.
        in_flight: batches that share each load of weights, at most; None for as many as hide it and have room.
        seed: where tokens are drawn, those of prompt i are what `generate` of transformers draws for it alone after
            ``torch.manual_seed(seed + i)``; beams are drawn in one batch after the other.
        on_tokens: given the number and the tokens of each prompt, in order, as soon as it has ended.
        choice: keyword arguments of `generate`.

    Raises:
        DataError: no prompt, an empty one, one that is too long for the model, or no tokens.
        InfeasiblePlanError: a batch takes more of the device than there is.
    """
    check_counts(max_new_tokens, batch_size, in_flight)
    own = cast(Any, model).generation_config
    config = copy.deepcopy(choice.pop("generation_config", None) or own)
    for name in _SEVERAL:
        several = choice.get(name) or getattr(config, name, None)
        if several is True or several not in (None, False, 1):
            raise ConfigError(f"{name}: each prompt gets its new tokens, once; leave it out")
    config.update(**own.to_dict(), defaults_only=True, allow_custom_entries=True)
    choice = config.update(**choice)
    marks = ends_of(config)
    padding = next((one for one in (config.pad_token_id, *sorted(marks)) if one is not None), 0)
    settings = GenerationChoice(
        settled=config,
        choice={**choice, "max_new_tokens": max_new_tokens},
        padding=padding,
        batch_size=batch_size,
        in_flight=in_flight,
        seed=seed,
    )
    rows = [as_tokens(prompt, f"prompt {number}") for number, prompt in enumerate(prompts)]
    check_lengths(model, rows, max_new_tokens, [f"prompt {number}" for number in range(len(rows))])
    written: list[list[int]] = []

    def take(ids: Sequence[list[int]], new: list[list[int]]) -> None:
        for row in new:
            end = next((count for count, token in enumerate(row, 1) if token in marks), None)
            written.append(row[:end])
            on_tokens(len(written) - 1, written[-1])

    generate_batches(model, rows, settings, take)
    return written


def generate_batches(
    model: nn.Module,
    rows: Sequence[list[int]],
    settings: GenerationChoice,
    on_batch: Callable[[Sequence[list[int]], list[list[int]]], None],
    watch: Watch | None = None,
) -> tuple[int, int]:
    """Generate after each row, batches in flight together.

    Args:
        model: wrapped, and able to generate.
        rows: tokens.
        settings: how.
        on_batch: given the rows of each batch and their new tokens, what fills them up among these; in order.
        watch: given the number of the first row of a batch, the tokens before its text, and keyword arguments of
            `generate`, of which it returns those to be used.

    Returns how many passes were made to measure, and the rows of all in flight, at most.

    Raises:
        InfeasiblePlanError: a batch takes more of the device than there is.
    """
    runner = runner_of(model)
    batches = _batches(model, settings, rows)
    growths = [_growth(model, ids, settings) for ids in batches]
    largest = max(growths, key=lambda growth: growth.rows * growth.length, default=None)
    measured = 0
    with settled_in(model, settings.settled), torch.no_grad(), runner.inferring(largest):
        if runner.inference_statistics() is not None:
            measured = _measure(model, batches, settings)
        first_rows = [sum(map(len, batches[:number])) for number in range(len(batches))]
        starts = [
            partial(_rows, model, ids, settings, first, watch)
            for ids, first in zip(batches, first_rows, strict=True)
        ]
        hand_over = in_order(lambda number, new: on_batch(batches[number], new))
        in_flight = settings.in_flight if _flies(model, settings) else 1
        most = runner.generate_together(starts, growths, in_flight, hand_over)
    return measured, most


def encodes(model: nn.Module) -> bool:
    """Return whether a model reads a prompt with an encoder."""
    return bool(cast(Any, model).config.is_encoder_decoder)


def positions_of(model: nn.Module) -> int | None:
    """Return how many tokens a model takes; None where nothing limits them."""
    return num_positions(cast(Any, model).config.get_text_config().to_dict())


def check_lengths(
    model: nn.Module, rows: Sequence[Sequence[int]], max_new_tokens: int, names: Sequence[str]
) -> None:
    """Refuse prompts without a token, and those that are too long with what is to be written.

    Raises:
        DataError: names the prompt.
    """
    most = positions_of(model)
    for row, name in zip(rows, names, strict=True):
        if not row:
            raise DataError("an empty prompt has no token to begin with; write something")
        length = max(len(row), max_new_tokens) if encodes(model) else len(row) + max_new_tokens
        if most and length > most:
            raise DataError(
                f"{name} has {len(row)} tokens, and with {max_new_tokens} new ones would be "
                f"longer than the {most} positions of the model; shorten it, or ask for fewer"
            )


def _growth(model: nn.Module, ids: Sequence[list[int]], settings: GenerationChoice) -> Growth:
    """Return how far a batch goes on; the cache of an encoder-decoder begins with one token."""
    num_new = settings.choice["max_new_tokens"]
    before = 1 if encodes(model) else max(map(len, ids))
    return Growth(settings.beams * len(ids), before + num_new, num_new, reorders=settings.beams > 1)


def _flies(model: nn.Module, settings: GenerationChoice) -> bool:
    """Return whether batches may be in flight together.

    Not those of an encoder-decoder, whose keys and values of the prompt are of another length than those of the text;
    nor drawn beams, whose draws are one batch's after the other's; nor experts that `generate` computes in another way
    for a prompt than for what follows, which it sets for the model as a whole.
    """
    implementations: Mapping[str, str] = getattr(model, "get_experts_implementation", dict)()
    switches = runner_of(model).device.type != "cpu" and "grouped_mm" in implementations.values()
    drawn_together = settings.settled.do_sample and (settings.beams > 1 or settings.seed is None)
    return not (encodes(model) or drawn_together or switches)


def _batches(
    model: nn.Module, settings: GenerationChoice, rows: Sequence[list[int]]
) -> list[Sequence[list[int]]]:
    """Return the rows in batches, in order; where padding would be read as text all of a batch have one length."""
    mixed = not (reads_padding(model) or looks_at_padding(settings.settled, encodes=encodes(model)))
    batches: list[list[list[int]]] = []
    for row in rows:
        if (
            not batches
            or len(batches[-1]) == settings.batch_size
            or not (mixed or len(batches[-1][0]) == len(row))
        ):
            batches.append([])
        batches[-1].append(row)
    return list(batches)


def _measure(model: nn.Module, batches: Sequence[Sequence[list[int]]], settings: GenerationChoice) -> int:
    """Run the prompts that take the most memory once, where others come first: if they are refused, before any text."""
    extents = [ForwardExtent(len(ids), max(map(len, ids))) for ids in batches]
    known: list[ForwardExtent] = []
    choice = {**settings.choice, "max_new_tokens": 1}
    choice.pop("stopping_criteria", None)
    one = GenerationChoice(settled=settings.settled, choice=choice, padding=settings.padding, batch_size=1)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the text itself will warn
        for ids, extent in sorted(
            zip(batches, extents, strict=True), key=lambda one: -one[1].rows * one[1].length
        ):
            if extents[0].covers(extent) or any(each.covers(extent) for each in known):
                continue
            known.append(extent)
            _rows(model, ids, one, 0, None)
    return len(known)


def _rows(
    model: nn.Module,
    ids: Sequence[list[int]],
    settings: GenerationChoice,
    first_row: int,
    watch: Watch | None,
) -> list[list[int]]:
    """Return the new tokens of each row of a batch."""
    inputs = _padded(ids, settings.padding, before=not encodes(model))
    num_before = 1 if encodes(model) else inputs["input_ids"].shape[1]
    asked: dict[str, Any] = dict(settings.choice)
    if watch is not None:
        asked = watch(first_row, num_before, asked)
    if settings.settled.do_sample and settings.seed is not None:
        seed = settings.seed + first_row
        if settings.beams == 1:
            asked["custom_generate"] = sampling_by(_Draws(seed, len(ids)))
        else:
            torch.manual_seed(seed)
    output = cast(Any, model).generate(**inputs, **asked, pad_token_id=settings.padding, use_cache=True)
    rows: list[list[int]] = output[:, num_before:].tolist()
    return rows


class _Draws:
    """Draws a token for each row of a batch, each row by a generator of its own.

    Args:
        seed: of the first row; the next one has the next.
        rows: of the batch.
    """

    def __init__(self, seed: int, rows: int) -> None:
        self._seeds = [seed + row for row in range(rows)]
        self._generators: list[torch.Generator] = []

    def __call__(self, scores: Tensor) -> Tensor:
        """Return the tokens [B] for the scores [B, V], each as if its row were alone."""
        if not self._generators:
            self._generators = [torch.Generator(scores.device).manual_seed(seed) for seed in self._seeds]
        probabilities = scores.softmax(-1)
        drawn = [
            probabilities[row : row + 1].multinomial(1, generator=generator)
            for row, generator in enumerate(self._generators)
        ]
        return torch.cat(drawn)[:, 0]


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
