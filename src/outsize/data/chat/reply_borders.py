"""Where a reply begins and ends between the words of two messages, and whether all of the reply is there."""

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outsize.data.chat.reply_spans import (
    CALL,
    KINDS,
    NAME,
    REASONING,
    SENTINELS,
    TEXT,
    Block,
    Message,
    Render,
    Span,
    Veiled,
    align,
    begin_of,
    code_of,
    common,
    kept_patterns,
    message_of,
    veil,
)
from outsize.errors import DataError

_THINKS = re.compile(r"<[^<>\s]*(?:think|thought)[^<>\s]*>|\[THINK\]|◁think▷|<\|channel\|?>", re.IGNORECASE)
_ROLES = re.compile(r"(?<![^\W_])(?:assistant|user|system|human|model|gpt|bot)(?![^\W_])", re.IGNORECASE)
_OF_ROLE = "messages of the role "
USERS = _OF_ROLE + "user"
_ASKED: list[Message] = [{"role": "user", "content": "x"}]
_ANSWERED: list[Message] = [*_ASKED, {"role": "assistant", "content": "y"}]


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


def read(messages: Sequence[Message], render: Render, template: str) -> Reading | None:
    """Render a conversation and tell whose words are where; None where the template decides by words.

    Raises:
        DataError: the template refuses the conversation.
    """
    text = render(messages)
    roles = {message["role"] for message in messages}
    for kept, into in itertools.product(kept_patterns(template), (roles, ("assistant",), ())):
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


def header_of(messages: Sequence[Message], render: Render, template: str) -> str:
    """Return what a template writes in front of a reply, as far as a reply does not say it; nothing if nothing.

    A tag that opens the reasoning stands in many prompts and is still the reply's.
    """
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for context in (_ASKED, messages[: replies[0]] if replies else [], messages):
        if not context:
            continue
        try:
            bare, asked = render(context), render(context, add_generation_prompt=True)
        except DataError:
            continue
        shared = common(
            bare, asked
        )  # behind which a template may go on in both with what ends a conversation
        header = asked[shared:].removesuffix(bare[shared:])
        if opening := _THINKS.search(header):
            header = header[: opening.start()]
        if header.strip():
            return header
    return _written_header(render, template)


def _written_header(render: Render, template: str) -> str:
    """Return the header of a reply under a template that does not ask for replies."""
    try:
        reading = read(_ANSWERED, render, template)
        if reading is None or len(reading.blocks) != 2:
            return ""
        asked, answered = reading.blocks
        between = reading.text[asked.end : answered.start]
        closing = Borders(reading, render, "").closing(reading.veiled.messages[:1], 0) or ""
    except DataError:
        return ""
    header = between[common(between, closing) :]
    return header if _ROLES.search(header) else ""


class Borders:
    """Finds the spans of replies in a rendered conversation.

    Args:
        reading: of the conversation.
        render: the template.
        header: see `header_of`.
    """

    def __init__(self, reading: Reading, render: Render, header: str) -> None:
        self._reading = reading
        self._render = render
        self._header = header if header.strip() else ""

    @property
    def text(self) -> str:
        """The conversation, rendered."""
        return self._reading.text

    def spans(self, turn: int) -> list[Span]:
        """Return the characters of a reply: its words, what stands around them, and its end; parts where others cut in.

        Raises:
            DataError: with what the template does that keeps the reply from being told apart.
        """
        blocks, text = self._reading.blocks, self._reading.text
        numbers = [n for n, block in enumerate(blocks) if block.message == turn]
        if not numbers:
            return [self._empty(turn)]
        spans = []
        for n in numbers:
            floor = blocks[n - 1].end if n else 0
            ceiling = blocks[n + 1].start if n + 1 < len(blocks) else len(text)
            start, end = blocks[n].start, blocks[n].end
            # What the reply says elsewhere is taken away to see what stands around this part.
            shown = self._reading.veiled.messages if len(numbers) == 1 else self._without_text(turn)
            if n == numbers[0]:
                start = self._start(floor, start, blocks[n - 1].message if n else None, turn)
            else:
                start = floor + self._shared(text[floor:start], shown, blocks[n - 1].message)
            if n == numbers[-1]:
                shown = self._reading.veiled.messages
            spans.append((start, end + self._end(turn, shown, text[end:ceiling])))
        return spans

    def closing(self, messages: Sequence[Message], code: int, **options: bool) -> str | None:
        """Return what stands behind the words of the last of some messages; None where that is not known.

        Args:
            messages: with sentinels.
            code: the number of the message whose sentinels the last one has.
            options: of the template.
        """
        try:
            shown = self._render(messages, **options)
        except DataError:
            return None
        return _behind(shown, code)

    def _start(self, floor: int, begin: int, before: int | None, turn: int) -> int:
        text = self._reading.text
        gap = text[floor:begin]
        for header in (self._header, self._header.rstrip()):
            num = gap.count(header) if header else 0
            if num == 1:
                return floor + gap.index(header) + len(header)
            if num:  # one of them is the header, what the reply or the message before it says is none
                return floor + gap.index(header, self._end_before(gap, before, turn)) + len(header)
        start = floor + self._end_before(gap, before, turn)
        if role := _ROLES.search(text[start:begin].partition("{")[0]):
            raise DataError(f"writes a header into it that its generation prompt does not have ({role[0]!r})")
        return start

    def _end_before(self, gap: str, before: int | None, turn: int) -> int:
        """Return how many characters of a gap are not the reply's, nor its header."""
        if before is None:
            first, end = 0, common(gap, self._opening())
        else:
            first = max(i for i in range(turn) if i == before or self._is_alike(i, before))
            end = self._shared(gap, self._reading.veiled.messages[: first + 1], before)
        for number in range(first + (before is not None), turn):
            if not self._reading.has_words(number):
                raise DataError(f"gives nothing to tell message {number + 1} by, which is before it")
        return end

    def _is_alike(self, one: int, other: int) -> bool:
        messages = self._reading.messages
        return messages[other]["role"] != "assistant" and messages[one] == messages[other]

    def _shared(self, gap: str, messages: Sequence[Message], code: int) -> int:
        """Return how many characters of a gap are the end of the message in front."""
        closing = self.closing(messages, code)
        if closing is None:
            raise DataError("cannot render the conversation up to it")
        return common(gap, closing)

    def _without_text(self, turn: int) -> list[Message]:
        messages = list(self._reading.veiled.messages)
        return [*messages[:turn], {**messages[turn], "content": ""}, *messages[turn + 1 :]]

    def _opening(self) -> str:
        """Return what stands in front of the first message."""
        try:
            return self._render(_ASKED)
        except DataError:
            return ""

    def _end(self, turn: int, shown: Sequence[Message], gap: str) -> int:
        """Return how many characters of a gap are the end of a reply."""
        until = shown[: turn + 1]
        if turn + 1 == len(shown) and not until[-1].get("tool_calls"):
            return len(gap)
        closings = [self.closing(until, turn)]
        # Some end in another way where nothing follows; asked for one more reply, they end it as they do within.
        asked = self.closing(until, turn, add_generation_prompt=True)
        if asked is not None and self._header and self._header in asked:
            closings.append(asked[: asked.rindex(self._header)])
        lengths = [common(gap, closing) for closing in closings if closing is not None]
        length = max(lengths) if lengths else self._usual_length(gap)
        at = gap.find(self._header) if self._header else -1
        length = length if at < 0 else min(length, at)
        if length and shown[turn].get(
            "tool_calls"
        ):  # what opens a result may stand behind a call that has none yet
            length = min(length, begin_of(self._header_of_result(shown, turn), gap))
        return length

    def _header_of_result(self, shown: Sequence[Message], turn: int) -> str:
        """Return what stands in front of one more result of a tool; nothing where that is not known."""
        number, call = len(shown), shown[turn]["tool_calls"][0]
        result = {
            "role": "tool",
            "name": "x",
            "tool_call_id": call.get("id") if isinstance(call, dict) else None,
        }
        first, second = ({**result, "content": code_of(number + n, TEXT)} for n in (0, 1))
        closing = self.closing([*shown[: turn + 1], first], number)
        between = self.closing([*shown[: turn + 1], first, second], number)
        return "" if closing is None or between is None else between[common(between, closing) :]

    def _usual_length(self, gap: str) -> int:
        """Return how much of a gap is the end that replies have elsewhere."""
        messages = veil(_ANSWERED, kept_patterns("")[0], ()).messages
        closing = self.closing(messages, 1) or ""
        if not closing.strip() or not gap.startswith(closing.rstrip()):
            raise DataError("cannot render the conversation up to its end")
        return common(gap, closing)

    def _empty(self, turn: int) -> Span:
        """Return the characters of a reply of no words: what stands behind its header."""
        messages, blocks, text = self._reading.messages, self._reading.blocks, self._reading.text
        shown = {block.message for block in blocks}
        before = max((block.end for block in blocks if block.message < turn), default=0)
        after = next((block for block in blocks if block.start >= before and block.message > turn), None)
        last = after.message if after else len(messages)
        first = max((block.message for block in blocks if block.message < turn), default=-1) + 1
        among = [
            i
            for i in range(first, min(last + 1, len(messages)))
            if messages[i]["role"] == "assistant" and (i not in shown or i == last)
        ]
        gap = text[before : after.start if after else len(text)]
        if not self._header or gap.count(self._header) != len(among):
            raise DataError("gives nothing to tell it by; it is empty, or the template decides by its words")
        at = 0
        for _ in range(among.index(turn) + 1):
            at = gap.index(self._header, at) + len(self._header)
        if turn + 1 == len(messages):
            return before + at, len(text)
        rest = gap[at:].partition(self._header)[0]
        # What the reply has thought is not there, or it would have words.
        until = [
            *self._reading.veiled.messages[:turn],
            {"role": "assistant", "content": messages[turn]["content"]},
        ]
        lengths = [0]
        for options in ({}, {"add_generation_prompt": True}):
            with contextlib.suppress(DataError):
                pieces = self._render(until, **options).split(self._header)
                closing = pieces[-2 if options else -1]
                lengths.append(len(closing) if rest.startswith(closing) else 0)
        if rest.strip() and not max(lengths):
            raise DataError("does not end it, which is empty, as it ends it elsewhere")
        return before + at, before + at + max(lengths)


def _behind(shown: str, number: int) -> str | None:
    """Return what stands behind the last sentinel of a message, up to that of another."""
    last = max(shown.rfind(code_of(number, kind)) for kind in KINDS)
    if last < 0:
        return None
    rest = shown[last + 1 :]
    other = SENTINELS.search(rest)
    return rest[: other.start()] if other else rest
