"""Prompts in, text out, with what it took: the work of ``outsize generate``."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from outsize.errors import ConfigError, DataError, ModelError
from outsize.inference.inference_session import InferenceStatistics
from outsize.planner.search.forward_plan import break_even_batch
from outsize.wrapped.module import runner_of

Say = Callable[[str], None]


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
class Written:
    """One prompt and what was written after it."""

    prompt: str
    text: str
    num_tokens: int


def write(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    batch_size: int,
    on_text: Say,
    add_special_tokens: bool = True,
    **choice: Any,
) -> tuple[list[Written], Figures]:
    """Write after each prompt.

    Args:
        model: wrapped, and able to generate.
        tokenizer: its own.
        prompts: texts.
        max_new_tokens: per prompt.
        batch_size: prompts at once; weights come up once for all of them.
        on_text: given pieces of text as they are written, where ``batch_size`` is 1.
        add_special_tokens: whether the tokenizer adds its own, which a chat template has written already.
        choice: keyword arguments of transformers' `generate` on how tokens are chosen.

    Raises:
        DataError: no prompt, an empty one, or one that is too long for the model.
    """
    encoded = [_encode(tokenizer, prompt, add_special_tokens) for prompt in prompts]
    _check_lengths(model, prompts, encoded, max_new_tokens)
    written: list[Written] = []
    ends = _ends(model, tokenizer)
    num_passes, started = 0, time.perf_counter()
    before = _moved(model)
    for ids in (encoded[start : start + batch_size] for start in range(0, len(encoded), batch_size)):
        counter = _Streamer(tokenizer, on_text if batch_size == 1 else None)
        inputs = _padded(ids, tokenizer.pad_token_id)
        output = cast(Any, model).generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            streamer=counter,
            pad_token_id=tokenizer.pad_token_id,
            use_cache=True,
            **choice,
        )
        num_passes += counter.num_tokens
        for row in output[:, inputs["input_ids"].shape[1] :].tolist():
            new = _until_end(row, ends)
            text = tokenizer.decode(new, skip_special_tokens=True)
            written.append(Written(prompts[len(written)], text, len(new)))
    seconds = time.perf_counter() - started
    return written, _figures(written, num_passes, seconds, batch_size, before, _moved(model))


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
    found: int | None = getattr(cast(Any, model).config.get_text_config(), "max_position_embeddings", None)
    return found


class _Streamer:
    """What transformers hands each new token to: counts passes, and shows the text of a single prompt."""

    def __init__(self, tokenizer: Any, on_text: Say | None) -> None:
        from transformers import TextStreamer

        self.num_tokens = 0
        self._is_prompt = True
        self._text: Any = None
        if on_text is not None:
            self._text = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self._text.on_finalized_text = lambda text, stream_end=False: on_text(text)

    def put(self, value: Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
        else:
            self.num_tokens += 1
        if self._text is not None:
            self._text.put(value)

    def end(self) -> None:
        if self._text is not None:
            self._text.end()
            self._text.on_finalized_text("\n")


def _encode(tokenizer: Any, prompt: str, add_special_tokens: bool) -> list[int]:
    ids: list[int] = tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"]
    if not ids:
        raise DataError("an empty prompt has no token to begin with; write something")
    return ids


def _check_lengths(
    model: nn.Module, prompts: Sequence[str], encoded: Sequence[list[int]], max_new_tokens: int
) -> None:
    most = positions_of(model)
    for prompt, ids in zip(prompts, encoded, strict=True):
        if most and len(ids) + max_new_tokens > most:
            raise DataError(
                f"the prompt {prompt[:40]!r} has {len(ids)} tokens, and with {max_new_tokens} new ones would be longer "
                f"than the {most} positions of the model; shorten it, or ask for fewer"
            )


def _padded(rows: Sequence[list[int]], padding: int) -> dict[str, Tensor]:
    """Ids [B, S], shorter rows padded on the left, and their mask."""
    length = max(map(len, rows))
    ids = torch.tensor([[padding] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def _ends(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """The ids that end a text: those that generation stops at, of which a model may have several."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = tokenizer.eos_token_id if found is None else found
    return frozenset(found if isinstance(found, list) else () if found is None else (found,))


def _until_end(ids: list[int], ends: frozenset[int]) -> list[int]:
    """The ids up to the end of the text, the mark of the end included."""
    return ids[: next((count for count, token in enumerate(ids, 1) if token in ends), None)]


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
