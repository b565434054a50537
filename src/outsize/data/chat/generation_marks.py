"""What a chat template marks as the assistant's words, by characters.

transformers tells it by tokens, which runs on to the end where a mark ends in white space that the tokenizer drops. So
the tags get characters of their own into what they enclose, which are read and taken out again.
"""

import re
from collections.abc import Sequence

from outsize.data.chat.reply_spans import Message, Reading, Span
from outsize.errors import DataError

MARKED = re.compile(r"{%-?\s*generation\s*-?%}")
_BEGIN = re.compile(r"({%-?\s*generation\s*)(-?%})")
_END = re.compile(r"({%-?)(\s*endgeneration\s*-?%})")
_OPENS, _CLOSES = "\U000323ae", "\U000323af"
_BORDER = re.compile(f"[{_OPENS}{_CLOSES}]")


def mark(template: str) -> str:
    """Return a template that writes a character at each end of what it marks, and is the same otherwise."""
    template = _BEGIN.sub(rf'\1%}}{{{{ "{_OPENS}" }}}}{{% if true %}}{{% endif \2', template)
    return _END.sub(rf'\1 if true %}}{{% endif %}}{{{{ "{_CLOSES}" }}}}{{%\2', template)


def marked_spans(rendered: str) -> tuple[str, list[Span]]:
    """Return what a template of `mark` has rendered without those characters, and what they enclose."""
    pieces, spans, length, begin, start = [], [], 0, 0, 0
    for border in _BORDER.finditer(rendered):
        pieces.append(rendered[begin : border.start()])
        length, begin = length + len(pieces[-1]), border.end()
        if border[0] == _OPENS:
            start = length
        else:
            spans.append((start, length))
    return "".join([*pieces, rendered[begin:]]), spans


def spans_of(
    spans: list[Span], messages: Sequence[Message], turns: Sequence[int], reading: Reading | None, where: str
) -> list[Span]:
    """Return the spans of some replies out of those of all.

    Args:
        spans: in order.
        messages: the conversation.
        turns: numbers of the replies.
        reading: of the conversation, where the template can be read.
        where: ``file:line``, for errors.

    Raises:
        DataError: the marks enclose words of others, or it cannot be told whose a span is.
    """
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    owners: list[int | None] = [None] * len(spans)
    for block in reading.blocks if reading else ():
        for n, (start, end) in enumerate(spans):
            if block.start < end and start < block.end:
                if block.message not in replies:
                    raise DataError(
                        f"{where}: the chat template marks message {block.message + 1} with {{% generation %}}, which "
                        f"is one of the role {messages[block.message]['role']}"
                    )
                owners[n] = block.message
    if len(turns) == len(replies):
        return spans
    if len(spans) == len(replies):
        owners = list(replies)
    for n, owner in enumerate(owners):  # a mark of no words goes on with the reply before, e.g. with its end
        owners[n] = owners[n - 1] if owner is None and n else owner
    if reading is None and len(spans) != len(replies):
        raise DataError(
            f"{where}: the chat template marks {len(spans)} parts as the assistant's, but the conversation has "
            f"{len(replies)} of its messages, so they cannot be trained apart; use data.train_on=replies"
        )
    return [span for span, owner in zip(spans, owners, strict=True) if owner in turns]
