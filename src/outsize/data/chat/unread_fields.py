"""What of a conversation a chat template does not read: fields that it does not name are dropped without a word."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from outsize.data.chat.reply_spans import REASONING_FIELDS, Message
from outsize.errors import DataError

# What is looked after elsewhere, of an assistant; and what says nothing that a model would learn.
_OF_REPLIES = {"tool_calls", *REASONING_FIELDS}
_OF_RESULTS = {"name"}
# fmt: off
_BOOKKEEPING = {
    "role", "content", "id", "tool_call_id", "call_id", "uuid", "message_id", "parent_id", "parent", "index", "idx",
    "turn", "created", "created_at", "timestamp", "time", "date", "lang", "language", "model", "source", "metadata",
    "tokens", "num_tokens", "token_count", "finish_reason", "usage", "annotations", "status", "type",
}
# fmt: on


class UnreadFields:
    """Finds fields that change nothing of what templates write; each is looked at once for a template and a role."""

    def __init__(self) -> None:
        self._looked_at: set[tuple[str, ...]] = set()

    def of(
        self,
        messages: Sequence[Message],
        given: Mapping[str, Any],
        text: str,
        template: str,
        render: Callable[..., str],
    ) -> Iterator[tuple[int, str]]:
        """Yield the numbers of messages and what a template does not read of them.

        Args:
            messages: a conversation.
            given: to the template beside it; its tools are looked at as well.
            text: the conversation, rendered.
            template: of the conversation.
            render: renders messages by the template, with ``given`` or what is given instead.
        """
        for number, message in enumerate(messages):
            looked_after = _looked_after(message["role"])
            for name, value in message.items():
                if name in looked_after or value in (None, "", [], {}):
                    continue
                if not self._is_new(template, message["role"], name):
                    continue
                without = {key: value for key, value in message.items() if key != name}
                if _is_same(text, render, [*messages[:number], without, *messages[number + 1 :]], given):
                    yield number, f"the field {name!r} of messages of the role {message['role']}"
        if (
            given.get("tools")
            and self._is_new(template, "tools")
            and _is_same(text, render, messages, {**given, "tools": None})
        ):
            yield 0, "the tools that a record offers"

    def _is_new(self, *what: str) -> bool:
        is_new = what not in self._looked_at
        self._looked_at.add(what)
        return is_new


def _looked_after(role: str) -> set[str]:
    return _BOOKKEEPING | {"assistant": _OF_REPLIES, "tool": _OF_RESULTS}.get(role, set())


def _is_same(
    text: str, render: Callable[..., str], messages: Sequence[Message], given: Mapping[str, Any]
) -> bool:
    try:
        return render(messages, given=given) == text
    except DataError:  # the template needs it
        return False
