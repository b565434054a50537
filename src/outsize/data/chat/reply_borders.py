"""Where a reply begins and ends between the words of two messages, and whether all of the reply is there."""

import contextlib
import re
from collections.abc import Sequence

from outsize.data.chat.reply_spans import (
    KINDS,
    LEXEME,
    NAME,
    NOTHING,
    SENTINELS,
    TEXT,
    Message,
    Reading,
    Render,
    Span,
    begin_of,
    code_of,
    common,
    kept_patterns,
    message_of,
    read,
    veil,
)
from outsize.errors import DataError

_THINKS = re.compile(r"<[^<>\s]*(?:think|thought)[^<>\s]*>|\[THINK\]|◁think▷|<\|channel\|?>", re.IGNORECASE)
_ROLES = re.compile(r"(?<![^\W_])(?:assistant|user|system|human|model|gpt|bot)(?![^\W_])", re.IGNORECASE)
_TAGGED = re.compile(r"\S*>|<\S|\[\S")
_ASKED: list[Message] = [{"role": "user", "content": "x"}]
_ANSWERED: list[Message] = [*_ASKED, {"role": "assistant", "content": "y"}]


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
            return _without_end(header, render)
    return _written_header(render, template)


def _without_end(header: str, render: Render) -> str:
    """Return a header without the end of the turn before, which some templates write when the next one begins."""
    *answered, asked = veil([*_ANSWERED, _ASKED[0]], NOTHING, ()).messages
    try:
        shown = render([*answered, asked])
    except DataError:
        return header
    last = shown.rfind(code_of(1, TEXT))
    end = common(header, shown[last + 1 : max(shown.rfind(code_of(0, TEXT)), 0)]) if last >= 0 else 0
    opening = _opening_of([*answered, asked], render) or shown[: max(shown.find(code_of(0, TEXT)), 0)]
    lexemes = LEXEME.finditer(header, 0, end)
    end = next((one.start() for one in lexemes if one[0].strip() and one[0] in opening), end)
    return header[end:] if header[:end].strip() and header[end:].strip() else header


def _opening_of(messages: Sequence[Message], render: Render) -> str:
    """Return the text that opens a conversation with its system prompt, before any reply has ended."""
    code = code_of(len(messages), TEXT)
    with contextlib.suppress(DataError):
        opening, found, _ = render([{"role": "system", "content": code}, *messages]).partition(code)
        return opening if found else ""
    return ""


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
            if n + 1 < len(blocks) and n == numbers[-1] and turn + 1 == len(self._reading.messages):
                raise DataError("writes words of a message before it behind it")
            # What the reply says elsewhere is taken away to see what stands around this part.
            shown = self._reading.veiled.messages if len(numbers) == 1 else self._without_text(turn)
            if n == numbers[0]:
                start = self._start(floor, start, blocks[n - 1].message if n else None, turn)
            else:
                until = blocks[n + 1].message if n + 1 < len(blocks) else None
                start = floor + self._shared(text[floor:start], shown, blocks[n - 1].message, until)
            if n == numbers[-1]:
                shown = self._reading.veiled.messages
            spans.append((start, end + self._end(turn, shown, text[end:ceiling], in_parts=len(numbers) > 1)))
        return spans

    def closing(
        self, messages: Sequence[Message], code: int, until: int | None = None, **options: bool
    ) -> str | None:
        """Return what stands behind the words of the last of some messages; None where that is not known.

        Args:
            messages: with sentinels.
            code: the number of the message whose sentinels the last one has.
            until: the number of the one behind it, if it is not the last one.
            options: of the template.
        """
        try:
            shown = self._render(messages, **options)
        except DataError:
            return None
        return _behind(shown, code, until)

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
        said = _THINKS.split(text[start:begin], maxsplit=1)[0].strip()
        role = _ROLES.search(text[start:begin].partition("{")[0])
        messages = self._reading.messages
        # A call may begin by a tag of its own, and what ends the reply before it is a reply's.
        is_free = messages[turn].get("tool_calls") or (
            before is not None and messages[before]["role"] == "assistant"
        )
        if role or (self._header and _TAGGED.match(said) and not is_free):
            raise DataError(
                f"writes a header into it that its generation prompt does not have ({role[0] if role else said!r})"
            )
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

    def _shared(self, gap: str, messages: Sequence[Message], code: int, until: int | None = None) -> int:
        """Return how many characters of a gap are the end of the message in front; see `closing`."""
        closing = self.closing(messages, code, until)
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

    def _first_header(self) -> str:
        """Return what stands in front of the first message: a system prompt, or a question."""
        code = code_of(0, TEXT)
        asked = [{"role": "user", "content": code}]
        try:
            return _opening_of(asked, self._render) or self._render(asked).partition(code)[0]
        except DataError:
            return ""

    def _end(self, turn: int, shown: Sequence[Message], gap: str, *, in_parts: bool) -> int:
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
        rests = [closing[common(gap, closing) :] for closing in closings if closing]
        if not in_parts and all(rest.strip() for rest in rests):  # as the last one it would end otherwise
            length = max(length, self._length_within(until, gap, ends=bool(rests)))
        at = gap.find(self._header) if self._header else -1
        length = length if at < 0 else min(length, at)
        if length and shown[turn].get(
            "tool_calls"
        ):  # what opens a result may stand behind a call that has none yet
            length = min(length, begin_of(self._header_of_result(shown, turn), gap))
        return length

    def _length_within(self, until: Sequence[Message], gap: str, *, ends: bool) -> int:
        """Return how much of a gap ends a reply where any message follows: what stands there before users and replies.

        Args:
            until: the reply and what is before it.
            gap: behind the reply.
            ends: whether something ends it as the last one.
        """
        number = len(until)
        behind = []
        for role in ("user", "assistant"):
            follows = {"role": role, "content": code_of(number, TEXT)}
            behind.append(self.closing([*until, follows], number - 1, number))
        one, other = behind
        end = one[: common(one, other)] if one is not None and other is not None else ""
        end = end[: begin_of(self._header, end)]
        opens = end.strip() and end.strip() in self._first_header()  # it begins headers
        is_known = None not in behind and gap.startswith(end) and not opens
        if ends and not is_known:
            raise DataError("ends it in another way where a message follows")
        return len(end) if is_known else 0

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
        between = self.closing([*shown[: turn + 1], first, second], number, number + 1)
        if closing is None or between is None:
            return ""
        end = common(between, closing)
        if not between[:end].strip():  # as the last one it may end otherwise
            user = {"role": "user", "content": code_of(number + 1, TEXT)}
            other = self.closing([*shown[: turn + 1], first, user], number, number + 1) or ""
            end = begin_of(self._header, between[: common(between, other)])
        return between[end:]

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


def _behind(shown: str, number: int, until: int | None = None) -> str | None:
    """Return what stands behind the last sentinel of a message, up to that of the message ``until``, if there is one.

    Returns:
        None where the message is not there, or another one follows.
    """
    last = max(shown.rfind(code_of(number, kind)) for kind in KINDS)
    if last < 0:
        return None
    rest = shown[last + 1 :]
    other = SENTINELS.search(rest)
    if other is None:
        return rest
    behind, kind = message_of(other[1])  # results repeat names of calls
    return rest[: other.start()] if behind == until or kind == NAME else None
