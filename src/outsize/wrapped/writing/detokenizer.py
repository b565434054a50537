"""Text piece by piece, as tokens come, and where it ends.

Tokenizers decode a text, not a token: a character may lie in several tokens, a space at the beginning of a text or
before a full stop may go, a word may continue the one before. So every new token is decoded together with the tokens
before it, and what the text is longer by is new. Three things keep that exact:

1. What ends within a character waits for the rest of it: at most three tokens, the longest beginning of UTF-8. Bytes
   that turn out to be no text are shown as U+FFFD.
2. Where the tokenizer takes spaces away before punctuation, a space and what follows it closely wait for what comes.
3. Of a long text only the last tokens are decoded again. Those that stay decode to the end of the text as it was, so
   that what is special about the beginning of a text is left behind with it.

The whole of a text is put together from the same pieces, so a stream cannot differ from it.
It ends at a token that marks it or at a string.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outsize.errors import ConfigError
from outsize.wrapped.writing.generation_settings import ends_of

UNKNOWN = "\ufffd"
# Tokens of the longest incomplete character: all bytes of four but the last one.
_WITHIN_A_CHARACTER = 3
# Tokens that are decoded again, and of them those that stay when there are more.
_MOST, _LEAST = 64, 16
# Characters that a tokenizer that cleans spaces up looks back by (" n ' t" becomes "n't").
_CLEANED = 6


class Detokenizer:
    """Turns the tokens of one text into pieces of text.

    Args:
        tokenizer: of transformers.
        shows_special: whether special tokens have text.
    """

    def __init__(self, tokenizer: Any, shows_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._ids: list[int] = []
        self._shown = ""  # of the text of these ids
        self._num_complete = 0  # of them, all of whose text is shown

    def put(self, token: int) -> str:
        """Return what is new with a token; empty where it has to wait for the next."""
        self._ids.append(token)
        num_waiting = len(self._ids) - self._num_complete
        text = self._decode(self._ids)
        count = len(self._ids)
        if text.endswith(UNKNOWN):
            if num_waiting <= _WITHIN_A_CHARACTER:
                return ""
            count -= _WITHIN_A_CHARACTER
            start = self._decode(self._ids[:count])
            if not text.startswith(start):
                return ""
            text = start
        piece = self._show(self._stable(text), text, count)
        if len(self._ids) > _MOST:
            self._forget()
        return piece

    def end(self) -> str:
        """Return what has waited until the end of the text."""
        text = self._decode(self._ids)
        return self._show(text, text, len(self._ids))

    def _show(self, stable: str, text: str, count: int) -> str:
        """Return what ``stable``, a beginning of the text of the first ``count`` ids, has beyond what is shown."""
        if not text.startswith(self._shown):  # bytes that were text are none with those that follow
            del self._ids[: self._num_complete]
            count -= self._num_complete
            text = stable = self._decode(self._ids[:count])
            self._shown = ""
        piece = stable[len(self._shown) :]
        if len(stable) == len(text):
            self._num_complete = count
        self._shown += piece
        return piece

    def _stable(self, text: str) -> str:
        """The part of a text that later tokens do not change."""
        if not self._cleans:
            return text
        tail = max(len(text) - _CLEANED, 0)
        waits = [place for mark in (" ", "'") if (place := text.find(mark, tail)) >= 0]
        return text[: min(waits)] if waits else text

    def _forget(self) -> None:
        """Leave ids behind whose text the last ones can do without."""
        text = self._decode(self._ids)
        for count in range(_LEAST, _MOST):
            start = len(self._ids) - count
            left = self._decode(self._ids[start:])
            waiting = len(text) - len(self._shown)
            if text.endswith(left) and waiting < len(left):
                self._shown = left[: len(left) - waiting]
                self._ids = self._ids[start:]
                self._num_complete = max(self._num_complete - start, 0)
                return

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=not self._shows_special)
        return text


class TextUntil:
    """Turns the tokens of one text into pieces that end before the first of some strings, wherever tokens divide it.

    Args:
        tokenizer: of transformers.
        stop: strings that end the text, none of them empty; what may begin one of them waits.
        shows_special: see `Detokenizer`.

    Attributes:
        num_tokens: that were put in.
        has_ended: whether one of the strings was written.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), shows_special: bool = False) -> None:
        self._detokenizer = Detokenizer(tokenizer, shows_special)
        self._stop = stop
        self._waiting = ""
        self.num_tokens = 0
        self.has_ended = False

    def put(self, token: int) -> str:
        """Return what is new with a token; empty where it has to wait for the next."""
        self.num_tokens += 1
        return self._release(self._detokenizer.put(token))

    def end(self) -> str:
        """Return what has waited until the end of the text."""
        if self.has_ended:
            return ""
        piece = self._release(self._detokenizer.end())
        waited, self._waiting = "" if self.has_ended else self._waiting, ""
        return piece + waited

    def _release(self, piece: str) -> str:
        text = self._waiting + piece
        places = [place for string in self._stop if (place := text.find(string)) >= 0]
        if places:
            self.has_ended = True
            return text[: min(places)]
        begun = (
            count
            for string in self._stop
            for count in range(min(len(string) - 1, len(text)), 0, -1)
            if text.endswith(string[:count])
        )
        count = len(text) - max(begun, default=0)
        self._waiting = text[count:]
        return text[:count]


def text_of(
    tokenizer: Any, tokens: Iterable[int], stop: Sequence[str] = (), shows_special: bool = False
) -> tuple[str, int, bool]:
    """Return the text of tokens, the same as a stream of them, of how many it is, and whether a string has ended it."""
    until = TextUntil(tokenizer, stop, shows_special)
    pieces = []
    for token in tokens:
        pieces.append(until.put(token))
        if until.has_ended:
            break
    return "".join([*pieces, until.end()]), until.num_tokens, until.has_ended


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
        shows_special: see `Detokenizer`.

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
            values, found = logprobs.topk(min(self._num_likeliest or 0, len(logprobs)))
            likeliest = list(zip(found.tolist(), values.tolist(), strict=True))
        self._on_token(Token(self.first_row + row, piece, token, logprob, likeliest))
