"""Numbers out of a model: logprobs of completions, logits, hidden states and embeddings of many sequences.

Sequences go through the model in waves. A wave visits the units in order, and each unit's weights come up once for all
of its sequences, so a wave of enough tokens costs computing and not moving. How many are enough is measured: after
every wave the next one is made as large as it takes for computing to last longer than loading, if there is room for
what its sequences hold between units. Sequences of one length are computed together, and nothing is padded: the numbers
are those of transformers for the same sequences, bit by bit.
"""

import inspect
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from outsize.choices import Scored
from outsize.errors import ConfigError, DataError, InfeasiblePlanError
from outsize.inference.experts import ExpertStatistics
from outsize.inference.waves import LoadHiding
from outsize.wrapped.module import runner_of
from outsize.wrapped.writing.generation_settings import as_tokens
from outsize.wrapped.writing.generations import positions_of
from outsize.wrapped.writing.text import check_model

FIRST_TOKENS = 1024  # of the first wave, which measures
GROUP_TOKENS = 2048  # of sequences of one length that are computed together


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A sequence of tokens to be scored.

    Attributes:
        ids: its tokens.
        start: the first token whose logprob counts, at least 1, since the first token follows nothing.
        counts: bool [S], which tokens count in place of all from ``start`` on.
        inputs: what else the forward takes of it, such as a mask, each [S].
    """

    ids: Sequence[int]
    start: int = 1
    counts: Tensor | None = None
    inputs: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """How likely a model finds the tokens of a text that count.

    Attributes:
        tokens: the logprob of each.
        is_greedy: whether each is the likeliest one at its place.
    """

    tokens: Sequence[float]
    is_greedy: bool

    @property
    def total(self) -> float:
        """The logprob of all of them."""
        return sum(self.tokens)


@dataclass(frozen=True, slots=True)
class TopLogits:
    """The largest logits at places of a text.

    Attributes:
        values: [T, k], the largest first.
        indices: int32 [T, k], their tokens.
        mass: fp32 [T], the probability of these tokens together.
        vocab_size: logits that there were.
    """

    values: Tensor
    indices: Tensor
    mass: Tensor
    vocab_size: int


@dataclass(slots=True, kw_only=True)
class ScoringFigures:
    """What scoring took.

    Attributes:
        num_texts: that were scored.
        num_tokens: of them, those that do not count among them.
        num_waves: times that the weights were visited.
        seconds: of all waves.
        predicted_s: what all but the first were to take, by the rates of the waves before.
        predicted_tokens: of these.
        bytes_moved: weights that came up.
        stall_s: seconds that computing waited for them.
        wave_tokens: of the largest wave.
        experts: those that are fetched one by one, since the model was opened; None where there are none.
    """

    num_texts: int = 0
    num_tokens: int = 0
    num_waves: int = 0
    seconds: float = 0.0
    predicted_s: float = 0.0
    predicted_tokens: int = 0
    bytes_moved: int = 0
    stall_s: float = 0.0
    wave_tokens: int = 0
    experts: ExpertStatistics | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the texts over the seconds."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def predicted_tokens_per_s(self) -> float | None:
        """Tokens over the seconds predicted; None before the second wave, since the first tells the rates."""
        return self.predicted_tokens / self.predicted_s if self.predicted_s else None


def score(
    model: nn.Module,
    texts: Iterable[ScoredText | Sequence[int]],
    *,
    want: Scored = "logprobs",
    wave_tokens: int | None = None,
    group_tokens: int | None = None,
    top_k: int | None = None,
    figures: ScoringFigures | None = None,
) -> Iterator[Any]:
    """Yield for each text what is wanted of it, in order; whole waves are computed at once.

    Args:
        model: wrapped; for hidden states and embeddings one without a head (``outsize.load(…, head="none")``).
        texts: tokens, of which those from ``start`` on count.
        want: ``logprobs``: `Logprobs`. ``logits``: those that the tokens that count are chosen from [T, V].
            ``hidden``: the last hidden states of all tokens [S, d]. ``embeddings``: their mean [d], in fp32.
        wave_tokens: of a wave; None has it chosen past the break-even, as far as there is room.
        group_tokens: of sequences of one length that are computed together, as far as there is room; waves are cut
            between such groups. None for as many as leave a unit room to come up, at most `GROUP_TOKENS`, and waves
            cut anywhere.
        top_k: of logits only so many, the largest, as `TopLogits`; None for all.
        figures: counts what it takes.

    Raises:
        DataError: a text has no token to score, more than the model has positions, or is no list of tokens.
        ConfigError: no such thing to want, or the model has a head and should have none, or the other way round.
        InfeasiblePlanError: a text takes more of the device than there is.
    """
    _check_kind(model, want)
    pace = _Pace(model, wave_tokens, ScoringFigures() if figures is None else figures, top_k)
    pace.group_tokens = group_tokens
    for wave in _waves(model, texts, pace, group_tokens or 1, want):
        yield from pace.run(wave, want)


class _Pace:
    """Runs waves, and chooses how many tokens the next one has by what the last ones took."""

    def __init__(
        self, model: nn.Module, wave_tokens: int | None, figures: ScoringFigures, top_k: int | None
    ) -> None:
        self._model, self._runner = model, runner_of(model)
        self._given, self.figures, self._top_k = wave_tokens, figures, top_k
        self.group_tokens: int | None = None
        self._waiting_per_token = 0.0
        self._break_even = LoadHiding()

    @property
    def tokens(self) -> int:
        """Of the next wave."""
        if self._given is not None:
            return self._given
        if not self.figures.num_waves:
            return FIRST_TOKENS
        enough: float = self._break_even.enough
        if not enough:  # nothing streams
            return max(FIRST_TOKENS, GROUP_TOKENS)
        if self._runner.streaming is not None and self._waiting_per_token:
            enough = min(enough, self._runner.streaming.room_for_waiting / self._waiting_per_token)
        return max(int(enough), FIRST_TOKENS)

    def run(self, wave: Sequence[ScoredText], want: Scored) -> list[Any]:
        """Return what is wanted of the texts of a wave; one that takes too much of the device is run in halves."""
        try:
            return self._run(wave, want)
        except InfeasiblePlanError:
            if len(wave) == 1:
                raise
        self.group_tokens = max((self.group_tokens or GROUP_TOKENS) // 2, 1)
        middle = len(wave) // 2
        return self.run(wave[:middle], want) + self.run(wave[middle:], want)

    def _most_grouped(self, waiting_bytes: int) -> int:
        """Return the tokens of sequences that are computed together: as many as leave a unit room to come up beside."""
        if self.group_tokens is not None or self._runner.streaming is None:
            return self.group_tokens or GROUP_TOKENS
        return min(
            GROUP_TOKENS, max(self._runner.streaming.tokens_beside_loading(waiting_bytes), FIRST_TOKENS)
        )

    def _run(self, wave: Sequence[ScoredText], want: Scored) -> list[Any]:
        num_tokens = sum(len(text.ids) for text in wave)
        expected = int(self._waiting_per_token * num_tokens)
        groups = _groups(wave, self._most_grouped(expected))
        results: list[Any] = [None] * len(wave)

        def keep(number: int, output: Any) -> None:
            states = output.last_hidden_state if want in ("hidden", "embeddings") else output.logits
            for row, text in zip(states, groups[number], strict=True):
                results[text] = _result(row, wave[text], want, self._top_k)

        inputs = [_inputs(self._model, [wave[text] for text in group]) for group in groups]
        before, began = self._runner.inference_statistics(), time.perf_counter()
        waiting = self._runner.forward_together(inputs, expected, keep)
        took = time.perf_counter() - began
        after = self._runner.inference_statistics()
        figures, pace = self.figures, self._break_even
        if figures.num_waves:
            figures.predicted_s += max(pace.load_s, pace.compute_s * num_tokens)
            figures.predicted_tokens += num_tokens
        figures.num_texts += len(wave)
        figures.num_tokens += num_tokens
        figures.num_waves += 1
        figures.seconds += took
        if after is not None:
            figures.experts = after.experts
            figures.bytes_moved += after.bytes_moved - (before.bytes_moved if before else 0)
            figures.stall_s += after.stall_s - (before.stall_s if before else 0.0)
        figures.wave_tokens = max(figures.wave_tokens, num_tokens)
        self._waiting_per_token = max(self._waiting_per_token, waiting / num_tokens)
        pace.took(num_tokens, took, before, after)
        return results


def _waves(
    model: nn.Module,
    texts: Iterable[ScoredText | Sequence[int]],
    pace: _Pace,
    multiple: int,
    want: Scored,
) -> Iterator[list[ScoredText]]:
    """Yield the texts in waves of as many tokens as there are to be, a ``multiple``, at least one text in each."""
    most = positions_of(model)
    wave: list[ScoredText] = []
    count = 0
    for number, given in enumerate(texts):
        text, least = given, 0
        if not isinstance(text, ScoredText):
            text, least = ScoredText(as_tokens(text, f"text {number}")), 1 + (want in ("logprobs", "logits"))
        if not 1 <= text.start <= len(text.ids) or len(text.ids) < least:
            raise DataError(
                f"text {number} has {len(text.ids)} tokens, and scores from {text.start} on, since the first follows "
                "nothing; give it one more"
            )
        if most and len(text.ids) > most:
            raise DataError(
                f"text {number} has {len(text.ids)} tokens, more than the {most} positions of the model; cut it"
            )
        if wave and count % multiple == 0 and count + len(text.ids) > pace.tokens:
            yield wave
            wave, count = [], 0
        wave.append(text)
        count += len(text.ids)
    if wave:
        yield wave


def _groups(wave: Sequence[ScoredText], most_tokens: int) -> list[list[int]]:
    """Return the numbers of texts of one length in groups, the longest texts first."""
    groups: list[list[int]] = []
    for number in sorted(range(len(wave)), key=lambda number: -len(wave[number].ids)):
        length = len(wave[number].ids)
        group = groups[-1] if groups else []
        alike = group and len(wave[group[0]].ids) == length
        if alike and (len(group) + 1) * length <= most_tokens:
            group.append(number)
        else:
            groups.append([number])
    return groups


def _inputs(model: nn.Module, texts: Sequence[ScoredText]) -> dict[str, Any]:
    inputs: dict[str, Any] = {"input_ids": torch.tensor([list(text.ids) for text in texts])}
    # A mask is left out if all ones.
    for name in dict.fromkeys(name for text in texts for name in text.inputs):
        rows = [text.inputs.get(name) for text in texts]
        inputs[name] = torch.stack(
            [torch.ones(len(texts[0].ids), dtype=torch.int64) if x is None else x for x in rows]
        )
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    return inputs


def _check_kind(model: nn.Module, want: Scored) -> None:
    if want not in get_args(Scored):
        raise ConfigError(
            f"want is {want!r}; write {', '.join(get_args(Scored)[:-1])} or {get_args(Scored)[-1]}"
        )
    can = getattr(model, "can_generate", lambda: False)()
    if want in ("hidden", "embeddings"):
        if can:
            raise ConfigError(
                f'{want} are of a model without its head: outsize.load(…, trainable=False, head="none")'
            )
        return
    check_model(model)
    if cast(Any, model).config.is_encoder_decoder:
        raise ConfigError(
            "scores are of causal language models; an encoder-decoder has a text of its own to score"
        )


def _result(row: Tensor, text: ScoredText, want: Scored, top_k: int | None) -> Any:
    """Return what is wanted of a text, by its hidden states [S, d] or its logits [S, V]."""
    if want == "hidden":
        return row.to("cpu", copy=True)
    if want == "embeddings":
        return row.float().mean(0).cpu()
    ids = torch.tensor(list(text.ids), device=row.device)
    if text.counts is None:
        logits, targets = row[text.start - 1 : len(text.ids) - 1], ids[text.start :]
    else:
        counts = text.counts[1:].to(row.device)
        logits, targets = row[:-1][counts], ids[1:][counts]
    if want == "logits" and top_k is not None:
        values, indices = logits.topk(min(top_k, logits.shape[-1]), -1)
        mass = (values.float() - logits.float().logsumexp(-1, keepdim=True)).exp().sum(-1)
        return TopLogits(values.cpu(), indices.int().cpu(), mass.cpu(), logits.shape[-1])
    if want == "logits":
        return logits.to("cpu", copy=True)
    logprobs = logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    is_greedy = bool((logits.argmax(-1) == targets).all())
    return Logprobs(logprobs.tolist(), is_greedy)
