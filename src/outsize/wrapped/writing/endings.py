"""Where a text ends, at a token that marks it or at a string, and what is shown of it until then."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outsize.errors import ConfigError
from outsize.wrapped.writing.detokenizer import TextUntil
from outsize.wrapped.writing.generation_settings import ends_of


class Endings:
    """Cuts what is written behind its end: of a batch, `generate` goes on until the last text has ended.

    Args:
        tokenizer: of transformers.
        settled: see `settle_settings`.

    Attributes:
        settled: the same without strings, which `generate` would ask the tokenizer for; see `criteria`.
    """

    def __init__(self, tokenizer: Any, settled: Any) -> None:
        from transformers import StopStringCriteria

        self.tokenizer = tokenizer
        self._marks = ends_of(settled)
        strings = settled.stop_strings
        self._strings = StopStringCriteria(tokenizer, strings) if strings else None
        self.settled = copy.copy(settled)
        self.settled.stop_strings = None

    @property
    def criteria(self) -> list[Any]:
        """What ends texts at strings, as `generate` takes it."""
        return [] if self._strings is None else [self._strings]

    def cut(self, before: Sequence[int], row: list[int]) -> tuple[list[int], bool]:
        """Return the tokens of a text up to its end, and whether it has one.

        Args:
            before: tokens that it follows.
            row: the tokens written, and what fills them up.
        """
        for count in range(1, len(row) + 1):
            if self.is_end(before, row[:count]):
                return row[:count], True
        return row, False

    def is_end(self, before: Sequence[int], row: Sequence[int]) -> bool:
        """Return whether a text ends with the last token of a row."""
        return bool(row) and (row[-1] in self._marks or self._is_said(before, row))

    def _is_said(self, before: Sequence[int], row: Sequence[int]) -> bool:
        if self._strings is None:
            return False
        most = self._strings.maximum_token_len
        ids = [*before[-most:], *row[-most:]][-most:]
        return bool(self._strings(torch.tensor([ids]), None))


@dataclass(frozen=True, slots=True)
class Token:
    """A token as it is written.

    Attributes:
        row: of the prompts, the one that it is written after.
        text: what is new of the text; empty where that waits for the next token.
        token: its id; None for text that has waited until the end.
        logprob: of the token, before temperature and what else a draw is made from; None where nobody wants it.
        likeliest: ids and their logprobs, the likeliest first.
    """

    row: int
    text: str
    token: int | None = None
    logprob: float | None = None
    likeliest: Sequence[tuple[int, float]] = ()


class TextProgress:
    """What transformers calls after each token: counts passes, shows the text of each row, and ends it at a string.

    Args:
        endings: where texts end.
        on_token: given each token; None where beams write, whose texts are known at their end.
        stop: see `write`.
        num_likeliest: see `write`.
        first_row: number of the first text.

    Attributes:
        num_passes: forwards of these texts.
        first_row: as above.

    Raises:
        ConfigError: logprobs of beams.
    """

    def __init__(
        self,
        endings: "Endings",
        on_token: Callable[[Token], None] | None,
        stop: Sequence[str],
        num_likeliest: int | None,
        first_row: int,
    ) -> None:
        if on_token is None and num_likeliest is not None:
            raise ConfigError("generation_config.json: num_beams: beams have no logprobs; ask for none")
        self.num_passes = self._num_before = 0
        self._endings, self._on_token, self._stop = endings, on_token, stop
        self._num_likeliest, self.first_row = num_likeliest, first_row
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
        self._texts = self._texts or [TextUntil(self._endings.tokenizer, self._stop) for _ in ids]
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
            values, found = logprobs.topk(min(self._num_likeliest or 0, len(logprobs)))
            likeliest = list(zip(found.tolist(), values.tolist(), strict=True))
        self._on_token(Token(self.first_row + row, piece, token, logprob, likeliest))
