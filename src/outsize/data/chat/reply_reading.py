"""A rendered conversation and whose words are where in it, and what a template leaves out, or writes twice."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outsize.data.chat.reply_spans import (
    CALL,
    KINDS,
    NAME,
    NOTHING,
    REASONING,
    TEXT,
    Block,
    Message,
    Render,
    Veiled,
    align,
    code_of,
    kept_patterns,
    message_of,
    veil,
)
from outsize.errors import DataError

_OF_ROLE = "messages of the role "
USERS = _OF_ROLE + "user"


@dataclass(frozen=True)
class Reading:
    """A rendered conversation, and whose words are where.

    Attributes:
        messages: the conversation.
        text: the conversation, rendered.
        veiled: the conversation with sentinels for its words.
        blocks: of the text, in order.
        seen: how often there is each sentinel.
    """

    messages: Sequence[Message]
    text: str
    veiled: Veiled
    blocks: list[Block]
    seen: Counter[str]

    def has_words(self, number: int) -> bool:
        """Return whether a message has sentinels: its own, or those of an equal one."""
        alike = (i for i, message in enumerate(self.messages) if message == self.messages[number])
        return any(self.veiled.num_words[code_of(i, kind)] for i in alike for kind in KINDS)

    def lost(self) -> Iterator[tuple[int, str]]:
        """Yield the replies that the template does not write as they are, and what becomes of them."""
        for i, message in enumerate(self.messages):
            if message["role"] != "assistant":
                continue
            for kind, name in (
                (TEXT, "text"),
                (CALL, "tool calls"),
                (NAME, "tool calls"),
                (REASONING, "reasoning"),
            ):
                num, want = (words[code_of(i, kind)] for words in (self.seen, self.veiled.num_words))
                if num > want and kind != NAME:
                    yield i, f"writes a part of the {name} twice"
                elif num < want and kind != REASONING:
                    yield i, f"leaves out {'the' if not num else 'a part of the'} {name}"

    def left_out(self) -> Iterator[tuple[int, str]]:
        """Yield what else the template does not write: reasoning of replies, messages of others."""
        for i, message in enumerate(self.messages):
            if message["role"] == "assistant":
                code = code_of(i, REASONING)
                if self.seen[code] < self.veiled.num_words[code]:
                    yield i, "the reasoning of replies"
                continue
            codes = [code_of(i, kind) for kind in (TEXT, REASONING)]
            if any(self.veiled.num_words[code] for code in codes) and not any(
                self.seen[code] for code in codes
            ):
                yield i, _OF_ROLE + message["role"]


def read(
    messages: Sequence[Message], render: Render, template: str, *, keeps_tags: bool = True
) -> Reading | None:
    """Render a conversation and tell whose words are where; None where the template decides by words.

    Args:
        messages: the conversation.
        render: the template.
        template: its text.
        keeps_tags: whether tags of contents stay as they are; those that the template writes as well are confused.

    Raises:
        DataError: the template refuses the conversation.
    """
    text = render(messages)
    roles = {message["role"] for message in messages}
    kinds = kept_patterns(template) if keeps_tags else (NOTHING,)
    for kept, into in itertools.product(kinds, (roles, ("assistant",), ())):
        veiled = veil(messages, kept, into)
        try:
            aligned = align(text, render(veiled.messages), _num_names(veiled, render))
        except DataError:
            continue
        if aligned is not None:
            return Reading(messages, text, veiled, *aligned)
    return None


def _num_names(veiled: Veiled, render: Render) -> dict[str, int]:
    """Return how often a template writes the names that have sentinels, where nothing follows the call."""
    return {
        code: render(veiled.messages[: message_of(code)[0] + 1]).count(code)
        for code in veiled.num_words
        if message_of(code)[1] == NAME
    }
