"""Locate the replies of an assistant in a conversation that a chat template has rendered.

A template is a program: it moves, drops, trims and repeats. So nothing is searched for by its words.

1. Sentinels take the place of the words of every message, one character for each, another one for each message. White
   space, punctuation and tags (``<think>``) stay, since templates decide by them. What the template makes of that is
   laid beside what the template makes of the conversation itself: they agree wherever there is no sentinel, so the
   sentinels tell which characters are whose.
2. Between the words of two messages stand the end of the one and the header of the other. The header is what the
   template writes where a reply is asked for; the end is what stands behind a message that is the last one. Both are
   compared by tokens of a kind (`LEXEME`), so that ``<|im_end|>`` and ``<|im_start|>`` have nothing in common.
3. The rule is checked: a span holds every word of its message that can be trained, and no word or header of another.
"""

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from outsize.errors import DataError

Message = dict[str, Any]
Span = tuple[int, int]
Render = Callable[..., str]

TEXT, REASONING, CALL, NAME, INSERTED = KINDS = range(5)
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# CJK ideographs that hardly any text holds: letters without case, and printable, as words are.
_FIRST_CODE, _LAST_CODE = 0x20000, 0x323A0
_CODES = f"[{chr(_FIRST_CODE)}-{chr(_LAST_CODE)}]"
SENTINELS = re.compile(rf"({_CODES})\1*")
NOTHING = re.compile(r"((?!))")
_WORD = re.compile(r"[^\W_]|[^\x00-\x7f\s]")
_MARK = re.compile(r"[^\s\w\"'\\<>]")
_TAG = r"<[^<>\s]{1,64}>|\[/?[A-Z_]{2,40}\]"
TAGS = re.compile(rf"{_TAG}|\[\|[^\[\]\s]+\|\]")
ENDS = re.compile(rf"(?:\s*(?:{TAGS.pattern}))+\s*")
LEXEME = re.compile(r"<[^<>\s]*>|\[/?\w+\]|\s|\w+|.")
_THOUGHT = re.compile(
    r".*(?:</[^<>\s]*(?:think|thought)[^<>\s]*>|\[/THINK\]|◁/think▷|<channel\|>)", re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """Characters of a rendered conversation that begin and end with words of one message, and hold none of another.

    Attributes:
        message: its number.
        start: of the first word.
        end: behind the last word.
    """

    message: int
    start: int
    end: int


@dataclass
class Veiled:
    """A conversation with sentinels for its words.

    Attributes:
        messages: of the conversation.
        num_words: of each sentinel, how many there are.
    """

    messages: list[Message] = field(default_factory=list)
    num_words: Counter[str] = field(default_factory=Counter)


def code_of(message: int, kind: int) -> str:
    """Return the sentinel of a message's words of a kind."""
    code = _FIRST_CODE + len(KINDS) * message + kind
    if code > _LAST_CODE:
        raise DataError(f"a conversation of more than {message} messages; cut it")
    return chr(code)


def message_of(code: str) -> tuple[int, int]:
    """Return the message of a sentinel, and the kind of its words."""
    return divmod(ord(code) - _FIRST_CODE, len(KINDS))


def veil(messages: Sequence[Message], visible: re.Pattern[str], into: Collection[str]) -> Veiled:
    """Put sentinels in the place of words.

    Args:
        messages: a conversation, contents text.
        visible: what stays as it is, the whole of it a group.
        into: roles of whose messages those without words get a sentinel, so that their places are seen.
    """
    veiled = Veiled()
    for i, message in enumerate(messages):
        # A template may compare messages; those of others that are alike stay so.
        first = (
            i if message["role"] == "assistant" else next(j for j, m in enumerate(messages) if m == message)
        )
        veiled.messages.append(_Veil(veiled, first, visible).message(message, message["role"] in into))
    return veiled


def has_text(content: Any) -> bool:
    """Return whether a content is more than white space."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return any(part["text"].strip() for part in parts)


@dataclass
class _Veil:
    """Puts sentinels into one message."""

    veiled: Veiled
    number: int
    kept: re.Pattern[str]

    def message(self, message: Message, inserts: bool) -> Message:
        veiled = {**message, "content": self._content(message["content"])}
        if message["role"] != "assistant":
            written = self.veiled.num_words
            wordless = not any(written[code_of(self.number, kind)] for kind in (TEXT, REASONING))
            return (
                {**veiled, "content": self._inserted(veiled["content"])} if inserts and wordless else veiled
            )
        thoughts = [name for name in REASONING_FIELDS if isinstance(message.get(name), str)]
        for name in thoughts:
            veiled[name] = self._words(message[name], REASONING, counts=name == thoughts[0])
        if message.get("tool_calls"):
            veiled["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        text, *calls = (self.veiled.num_words[code_of(self.number, kind)] for kind in (TEXT, CALL, NAME))
        if inserts and not text and (has_text(message["content"]) or not any(calls)):
            veiled["content"] = self._inserted(veiled["content"])
        return veiled

    def _content(self, content: Any) -> Any:
        if isinstance(content, list):
            return [{**part, "text": self._content(part["text"])} for part in content]
        thought = _THOUGHT.match(content)
        split = thought.end() if thought else 0
        return self._words(content[:split], REASONING) + self._words(content[split:], TEXT)

    def _inserted(self, content: Any) -> Any:
        code = code_of(self.number, INSERTED)
        self.veiled.num_words[code] += 1
        if isinstance(content, list):
            return [*content[:-1], {**content[-1], "text": content[-1]["text"] + code}]
        return content + code

    def _call(self, call: Any) -> Any:
        """Return a call with sentinels in its arguments; in its name, where those are none of text."""
        body = call.get("function") if isinstance(call, dict) else None
        holder = body if isinstance(body, dict) else call
        if not isinstance(holder, dict):
            return call
        code = code_of(self.number, CALL)
        before = self.veiled.num_words[code]
        veiled = {**holder, "arguments": self._leaves(holder.get("arguments"))}
        if self.veiled.num_words[code] == before and isinstance(holder.get("name"), str):
            veiled = {**holder, "name": self._words(holder["name"], NAME)}
        return {**call, "function": veiled} if holder is body else veiled

    def _leaves(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._words(value, CALL)
        if isinstance(value, dict):
            return {key: self._leaves(each) for key, each in value.items()}
        return [self._leaves(each) for each in value] if isinstance(value, list) else value

    def _words(self, text: str, kind: int, counts: bool = True) -> str:
        code = code_of(self.number, kind)
        pieces = self.kept.split(text)
        for words in (_WORD, _MARK):
            codes = [words.sub(code, piece) for piece in pieces[::2]]
            if num := sum(piece.count(code) for piece in codes):
                self.veiled.num_words[code] += num * counts
                pieces[::2] = codes
                break
        return "".join(pieces)


@cache
def kept_patterns(template: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return what stays in texts under a template: tags; and tags with every text that the template itself names."""
    import jinja2

    try:
        tokens = list(jinja2.Environment().lex(template))
    except jinja2.TemplateError:
        tokens = []
    literals = {value[1:-1] for _, name, value in tokens if name == "string"}
    longest = sorted(
        (text for text in literals if len(text.strip()) > 1), key=lambda text: (-len(text), text)
    )
    named = "|".join([_TAG, *map(re.escape, longest)])
    return re.compile(f"({_TAG})"), re.compile(f"({named})")


def align(text: str, shown: str, num_names: Mapping[str, int]) -> tuple[list[Block], Counter[str]] | None:
    """Return the blocks of a rendered conversation, and how often there is each sentinel.

    Args:
        text: the conversation, rendered.
        shown: the conversation with sentinels, rendered.
        num_names: of each sentinel of names, how many are the message's own; the result of a tool may repeat them.

    Returns:
        None where the two differ in more than the sentinels.
    """
    blocks: list[Block] = []
    counts: Counter[str] = Counter()
    at = begin = 0
    for run in SENTINELS.finditer(shown):
        if text[at + run.start() - begin : at + run.end() - begin] == run[0]:
            continue  # such a text
        length = run.start() - begin
        if text[at : at + length] != shown[begin : run.start()]:
            return None
        at, begin, code = at + length, run.end(), run[1]
        number, kind = message_of(code)
        counts[code] += run.end() - run.start()
        end = at if kind == INSERTED else at + run.end() - run.start()
        if kind == NAME and counts[code] > num_names[code]:
            pass
        elif blocks and blocks[-1].message == number:
            blocks[-1] = Block(number, blocks[-1].start, end)
        else:
            blocks.append(Block(number, at, end))
        at = end
    return (blocks, counts) if text[at:] == shown[begin:] else None


def common(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike, in steps of `LEXEME`."""
    length = 0
    for a, b in zip(LEXEME.finditer(one), LEXEME.finditer(other), strict=False):
        if a[0] != b[0]:
            break
        length = a.end()
    return length


def behind(shown: str, number: int, until: int | None = None) -> str | None:
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


def common_end(one: str, other: str) -> int:
    """Return how many characters two texts end with alike, in steps of `LEXEME`."""
    length = 0
    pieces = (reversed(LEXEME.findall(text)) for text in (one, other))
    for a, b in zip(*pieces, strict=False):
        if a != b:
            break
        length += len(a)
    return length


def begin_of(header: str, gap: str) -> int:
    """Return where a header begins in what stands between words, or, cut off, at the end of that; else its length."""
    if header and (at := gap.rfind(header)) >= 0:
        return at
    cut = (header[: lexeme.end()] for lexeme in LEXEME.finditer(header))
    return len(gap) - max((len(part) for part in cut if part.strip() and gap.endswith(part)), default=0)


def opening_of(messages: Sequence[Message], render: Render, role: str = "system") -> str:
    """Return the text in front of a system prompt, or of a first message of another role; nothing if it is refused."""
    code = code_of(len(messages), TEXT)
    with contextlib.suppress(DataError):
        opening, shown, _ = render([{"role": role, "content": code}, *messages]).partition(code)
        return opening if shown else ""
    return ""


def tail_of(message: Message, gap: str) -> str:
    """Return what the text of a message ends in behind its last word, if a gap begins with it."""
    content = message["content"]
    tail = SENTINELS.split(content if isinstance(content, str) else content[-1]["text"])[-1]
    return next((each for each in (tail, tail.strip()) if gap.startswith(each)), "")


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
    for visible, into in itertools.product(kinds, (roles, ("assistant",), ())):
        veiled = veil(messages, visible, into)
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
