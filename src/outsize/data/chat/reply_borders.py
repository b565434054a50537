"""Where a reply begins and ends between the words of two messages, and whether all of the reply is there."""

import contextlib
import functools
import re
from collections.abc import Sequence

from outsize.data.chat.reply_spans import (
    ENDS,
    LEXEME,
    NOTHING,
    TAGS,
    TEXT,
    Message,
    Reading,
    Render,
    Span,
    begin_of,
    behind,
    code_of,
    common,
    common_end,
    kept_patterns,
    opening_of,
    read,
    tail_of,
    veil,
)
from outsize.errors import DataError

_THINKS = re.compile(r"<[^<>\s]*(?:think|thought)[^<>\s]*>|\[THINK\]|◁think▷|<\|channel\|?>", re.IGNORECASE)
_ROLES = re.compile(
    r"(?<![^\W_])(?:assistant|user|system|human|model|gpt|bot|chatbot)(?![^\W_])", re.IGNORECASE
)
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
            bare, prompted = render(context), render(context, add_generation_prompt=True)
        except DataError:
            continue
        # Behind which a template may go on in both with what ends a conversation.
        shared = common(bare, prompted)
        header = prompted[shared:].removesuffix(bare[shared:])
        if opening := _THINKS.search(header):
            header = header[: opening.start()]
        if header.strip():
            return _without_end(header, render)
    # Some templates describe tools in a message of its own, behind the system prompt.
    return _written_header(functools.partial(render, tools=None), template)


def _without_end(header: str, render: Render) -> str:
    """Return a header without the end of the turn before, which some templates write when the next one begins."""
    *answered, question = veil([*_ANSWERED, _ASKED[0]], NOTHING, ()).messages
    try:
        shown = render([*answered, question])
    except DataError:
        return header
    last = shown.rfind(code_of(1, TEXT))
    end = common(header, shown[last + 1 : max(shown.rfind(code_of(0, TEXT)), 0)]) if last >= 0 else 0
    openings = opening_of([*answered, question], render), shown[: max(shown.find(code_of(0, TEXT)), 0)]
    end = _header_in(header[:end], *openings)
    return header[end:] if header[:end].strip() and header[end:].strip() else header


def _header_in(shared: str, *openings: str) -> int:
    """Return where a header begins in what headers of several roles share; the first one of all opens the text."""
    for opening in openings:
        begins = (
            one
            for one in LEXEME.finditer(shared)
            if one[0].strip(" \t\r\n>]|)") and shared[one.start() :] in opening
        )
        first = min(begins, key=lambda one: opening.index(one[0]), default=None)
        if first:
            return first.start()
    return len(shared)


def _written_header(render: Render, template: str) -> str:
    """Return the header of a reply under a template that does not ask for replies, or always does."""
    try:
        reading = read(_ANSWERED, render, template)
        if reading is None or len(reading.blocks) != 2:
            return ""
        question, answered = reading.blocks
        between = reading.text[question.end : answered.start]
        borders, shown = Borders(reading, render, ""), reading.veiled.messages
        closing = borders.closing(shown[:1], 0) or ""
    except DataError:
        return ""
    # What stands behind all messages alike, but not where a user follows, is a question for one more reply.
    last = borders.closing(shown, 1) or ""
    header = last[len(last) - common_end(last, closing) :]
    again = borders.closing([*shown, {"role": "user", "content": code_of(2, TEXT)}], 1, 2)
    is_asked = header.strip() and (header.strip() in between or _ROLES.search(header))
    if is_asked and again is not None and not again.startswith(header.strip()):
        openings = opening_of(shown, render), reading.text[: question.start]
        header = last[_header_in(last[: common(last, again)], *openings) :]
        lengths = (one.end() for one in LEXEME.finditer(header) if header[: one.end()] in between)
        return header[: max(lengths, default=0)]
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
            shown = list(self._reading.veiled.messages)
            if len(numbers) > 1:
                shown[turn] = {**shown[turn], "content": ""}
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
        return behind(shown, code, until)

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
        spoken = _THINKS.split(text[start:begin], maxsplit=1)[0].strip()
        role = _ROLES.search(text[start:begin].partition("{")[0])
        messages = self._reading.messages
        # A call may begin by a tag of its own, and what ends the reply before it is a reply's.
        is_free = messages[turn].get("tool_calls") or (
            before is not None and messages[before]["role"] == "assistant"
        )
        if role or (self._header and _TAGGED.match(spoken) and not is_free):
            raise DataError(
                f"writes a header into it that its generation prompt does not have ({role[0] if role else spoken!r})"
            )
        return start

    def _end_before(self, gap: str, before: int | None, turn: int) -> int:
        """Return how many characters of a gap are not the reply's, nor its header."""
        if before is None:
            first, end = 0, common(gap, opening_of([], self._render, "user"))
        else:
            messages = self._reading.messages  # those of others may be alike
            same = messages[before] if messages[before]["role"] != "assistant" else None
            first = max(i for i in range(turn) if i == before or messages[i] == same)
            end = self._shared(gap, self._reading.veiled.messages[: first + 1], before)
        for number in range(first + (before is not None), turn):
            if not self._reading.has_words(number):
                raise DataError(f"gives nothing to tell message {number + 1} by, which is before it")
        return end

    def _shared(self, gap: str, messages: Sequence[Message], code: int, until: int | None = None) -> int:
        """Return how many characters of a gap are the end of the message in front; see `closing`."""
        closing = self.closing(messages, code, until)
        if closing is None:
            raise DataError("cannot render the conversation up to it")
        return common(gap, closing)

    def _end(self, turn: int, shown: Sequence[Message], gap: str, *, in_parts: bool) -> int:
        """Return how many characters of a gap are the end of a reply."""
        until = shown[: turn + 1]
        at = gap.find(self._header) if self._header else -1
        limit = at if at >= 0 else len(gap)
        if turn + 1 == len(shown) and at < 0:
            # What is no tag and stands behind a question as well is nobody's.
            prompted = self.closing([{"role": "user", "content": code_of(0, TEXT)}], 0) or ""
            tail = gap[len(gap) - common_end(gap, prompted) :]
            if any(map(str.isalnum, TAGS.sub("", tail))):
                within = self._length_within(until, gap)
                if within is None:
                    raise DataError("ends a conversation in words of its own")
                return within
        if turn + 1 == len(shown) and not until[-1].get("tool_calls"):
            return limit
        length = min(limit, self._ending(until, turn, gap, is_whole=not in_parts))
        if length and until[-1].get("tool_calls"):
            # what opens a result may stand behind a call that has none
            header = self._header_of_result(shown, turn)
            length = min(begin_of(header, gap), begin_of(header, gap[:length]))
        return length

    def _ending(self, until: Sequence[Message], code: int, gap: str, *, is_whole: bool) -> int:
        """Return how many characters of a gap end the message in front.

        They are looked for where the message is the last one, where one more reply is asked for, which some templates
        end as they do within, and, if neither is there as a whole, in front of other messages.
        """
        tail = tail_of(until[-1], gap)
        closings = [self.closing(until, code), self.closing(until, code, add_generation_prompt=True)]
        known = [
            (text.rpartition(self._header)[0] if self._header and self._header in text else text)
            for text in closings
            if text is not None
        ]
        if not known:
            return self._usual_length(gap)
        known = [closing.removeprefix(tail) for closing in known]
        lengths = [common(gap[len(tail) :], closing) for closing in known]
        ends = list(zip(known, lengths, strict=True))
        if not is_whole or any(end.strip() and not end[length:].strip() for end, length in ends):
            length = len(tail) + max(lengths)
            return length + self._mark_behind_calls(until, gap, length)
        within = self._length_within(until, gap)
        if within is None and any(map(str.strip, known)):
            raise DataError("ends it in another way where a message follows")
        partial = [n for n in lengths if within is None or not gap[len(tail) :][:n].strip()]
        return max([within or 0, *(len(tail) + n for n in partial)])

    def _mark_behind_calls(self, until: Sequence[Message], gap: str, length: int) -> int:
        """Return the length of a mark that ends words where a user follows, if it stands behind calls there as well."""
        if not until[-1].get("tool_calls"):
            return 0
        number = len(until)
        reply = {"role": "assistant", "content": code_of(number - 1, TEXT)}
        user = {"role": "user", "content": code_of(number, TEXT)}
        within = self.closing([*until[:-1], reply, user], number - 1, number) or ""
        mark = within[: len(within) - common_end(within, opening_of([], self._render, "user"))]
        is_new = ENDS.fullmatch(mark) and not gap[:length].rstrip().endswith(mark.strip())
        return len(mark) if is_new and gap.startswith(mark, length) else 0

    def _length_within(self, until: Sequence[Message], gap: str) -> int | None:
        """Return how much of a gap ends a message where any other follows; None where that cannot be told.

        It is what stands there before users and replies alike; or else the tags that stand before a user, but not
        before one who begins.
        """
        number = len(until)
        user, reply = ({"role": role, "content": code_of(number, TEXT)} for role in ("user", "assistant"))
        before_user, before_reply = (
            self.closing([*until, follows], number - 1, number) for follows in (user, reply)
        )
        if before_user is None:
            return None
        tail = tail_of(until[-1], gap)
        before_user = before_user.removeprefix(tail)
        first = opening_of([], self._render, "user")
        ends = [before_user[: len(before_user) - common_end(before_user, first)]]
        if not ENDS.fullmatch(ends[0]) or not before_user[len(ends[0]) :].strip():
            ends = []
        if before_reply is not None:
            end = before_user[: common(before_user, before_reply.removeprefix(tail))]
            at = begin_of(self._header, end)
            end = end[: at if at < len(end) else _header_in(end, opening_of([user], self._render), first)]
            ends.insert(0, end) if end.strip() else ends.append(end)
        return next((len(tail + end) for end in ends if gap.startswith(tail + end)), None)

    def _header_of_result(self, shown: Sequence[Message], turn: int) -> str:
        """Return what stands in front of one more result of a tool; nothing where that is not known."""
        number, call = len(shown), shown[turn]["tool_calls"][0]
        result = {
            "role": "tool",
            "name": "x",
            "tool_call_id": call.get("id") if isinstance(call, dict) else None,
        }
        first, second = ({**result, "content": code_of(number + n, TEXT)} for n in (0, 1))
        until = [*shown[:turn], {**shown[turn], "content": ""}]  # results may stand before the text
        closing = self.closing([*until, first], number)
        between = self.closing([*until, first, second], number, number + 1)
        if closing is None or between is None:
            return ""
        end = common(between, closing)
        if not between[:end].strip():  # as the last one it may end otherwise
            user = {"role": "user", "content": code_of(number + 1, TEXT)}
            other = self.closing([*until, first, user], number, number + 1) or ""
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
