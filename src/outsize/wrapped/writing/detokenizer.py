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
It ends at a token that marks it or at a string. A reply comes apart into content, reasoning and calls.
"""

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from outsize.compat.transformers_private import response_templates
from outsize.wrapped.writing.generation_settings import ends_of

UNKNOWN = "\ufffd"
# Tokens of the longest incomplete character: all bytes of four but the last one.
_WITHIN_A_CHARACTER = 3
# Tokens that are decoded again, and of them those that stay when there are more.
_MOST, _LEAST = 64, 16
# Characters that a tokenizer that cleans spaces up looks back by (" n ' t" becomes "n't").
_CLEANED = 6


class Detokenizer:
    """Turns the tokens of one text into pieces of text."""

    def __init__(self, tokenizer: Any, shows_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._left_out = frozenset(() if shows_special else tokenizer.all_special_ids)
        self._cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._ids: list[int] = []
        self._shown = ""  # of the text of these ids
        self._num_complete = 0  # of them, all of whose text is shown

    def put(self, token: int) -> str:
        """Return what is new with a token; empty where it has to wait for the next."""
        if token in self._left_out:  # part of no character that is under way
            return ""
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


_Kind = Literal["content", "reasoning_content", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """A piece of a reply.

    Attributes:
        kind: what it is of.
        text: of a call the arguments, as JSON.
        name: of the tool that is called.
    """

    kind: _Kind
    text: str
    name: str = ""


class ReplyReader:
    """Takes a reply apart as it is written, by transformers' parser: content, reasoning, and calls of tools.

    Space around content and reasoning is left out. Calls that cannot be read are content, as the model wrote them.

    Args:
        template: how, in the form of a ``response_template`` of transformers; None where all of it is content.
        tokenizer: whose special tokens are no content; the reply is put in with them.
        prompt: text that it follows, which may begin it.
        tools: whose schemas say of what kind arguments are.
        most_calls: further ones are left out, and all that follows them; None for any number.
    """

    def __init__(
        self,
        template: dict[str, Any] | None,
        tokenizer: Any,
        prompt: str,
        tools: Sequence[Any],
        most_calls: int | None,
    ) -> None:
        self._parser: Any = None
        self._most_calls = most_calls
        self._spaces = {"content": "", "reasoning_content": ""}  # that wait for more
        self._begun: set[str] = set()
        self._unshown = ""  # what no part has come of yet: a call under way
        if template is not None:
            from transformers.utils.chat_parsing import ResponseParser

            template = copy.deepcopy(template)
            if not tools:  # nobody can call: what looks like one is content
                template["fields"].pop("tool_calls", None)
            for field in template["fields"].values():
                if field.get("content") == "json":
                    field.setdefault("content_args", {})["allow_non_json"] = True
            self._parser = ResponseParser(template, prefix=prompt, tools=list(tools))
            special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
            self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")

    @property
    def reads_special(self) -> bool:
        """Whether special tokens are to be put in as text."""
        return self._parser is not None

    def put(self, text: str) -> list[ReplyPart]:
        """Return what is new with a piece of the reply."""
        if self._parser is None:
            return [ReplyPart("content", text)] if text else []
        self._unshown += text
        try:
            parts = self._parts(self._parser.feed(text))
        except ValueError:  # of a call
            return self._as_written()
        if parts:
            self._unshown = ""
        return parts

    def _as_written(self) -> list[ReplyPart]:
        """Return what no part has come of as content; what follows is content, too."""
        self._parser, text = None, self._special.sub("", self._unshown)
        return [ReplyPart("content", text)] if text else []

    def end(self, *, is_cut: bool = False) -> list[ReplyPart]:
        """Return what has waited for more.

        Args:
            is_cut: whether the reply was ended at the most tokens: a call that is open then is not whole, and left out.
        """
        if self._parser is None:
            return []
        try:
            events = self._parser.finalize()[1]
        except ValueError:  # of a call
            return self._as_written()
        return self._parts([event for event in events if not is_cut or event.get("field") != "tool_calls"])

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> list[ReplyPart]:
        parts = []
        for event in events:
            if self._most_calls == 0:
                break
            if event["type"] == "region_chunk" and not event["dirty"]:
                kind: _Kind = "content" if event["field"] == "content" else "reasoning_content"
                if text := self._stripped(kind, event["text"]):
                    parts.append(ReplyPart(kind, text))
            elif event["type"] == "region_close" and event["field"] == "tool_calls":
                parts.append(self._call(event["value"]))
        return parts

    def _call(self, value: Any) -> ReplyPart:
        function = value.get("function") if isinstance(value, dict) else value
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            return ReplyPart("content", function if isinstance(function, str) else json.dumps(function))
        if self._most_calls is not None:
            self._most_calls -= 1
        arguments = function.get("arguments") or {}
        return ReplyPart(
            "tool_calls",
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
            function["name"],
        )

    def _stripped(self, kind: _Kind, text: str) -> str:
        text = self._spaces[kind] + self._special.sub("", text)
        if kind not in self._begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._spaces[kind] = text[len(shown) :]
        if shown:
            self._begun.add(kind)
        return shown


def response_template_of(tokenizer: Any, model: nn.Module, prompt: str) -> dict[str, Any] | None:
    """Return the first way to take a reply apart that knows where in a prompt it begins; None where none does."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    ways = response_templates(tokenizer, model)
    return next((way for way in ways if load_response_template(way).start_anchor_re.search(prompt)), None)
