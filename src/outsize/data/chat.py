"""Conversations to tokens, and which of those tokens the assistant wrote.

Three ways to know, best first:

1. the tokenizer's chat template marks the assistant's words with ``{% generation %}``;
2. it does not: the conversation is rendered up to each assistant turn and up to its end, and what the second
   has more than the first is the turn, closing token included. Templates that rewrite earlier turns
   (reasoning that is dropped once the user answers) are not prefixes of one another; there, the turn is found
   by its content and its closing;
3. the tokenizer has no template: `FALLBACK_TEMPLATE`, which marks them.

``data.template`` takes the place of the tokenizer's: a file, one of the tokenizer's named ones, or one of `TEMPLATES`.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outsize.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Span = tuple[int, int]

FALLBACK_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '### ' + message['role'] + ':\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '\n\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML_TEMPLATE, "plain": FALLBACK_TEMPLATE}
_GENERATION_TAG = re.compile(r"{%-?\s*generation\s*-?%}")


class ChatTemplate:
    """The template of a tokenizer, one that is named, or the fallback.

    Args:
        tokenizer: whose template it is, unless ``name`` says otherwise.
        name: a file, one of the tokenizer's named templates, or one of `TEMPLATES`; None for the tokenizer's own.

    Attributes:
        mask_source: where the mask comes from: ``"generation tags"``, ``"prefix differences"`` or
            ``"fallback template"``.
        text: the template itself; part of what identifies tokenised data.

    Raises:
        ConfigError: there is no such template.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", name: str | None = None) -> None:
        self._tokenizer = tokenizer
        own = _find_template(tokenizer, name)
        self.text: str = own or FALLBACK_TEMPLATE
        self.mask_source = "fallback template"
        if own is not None:
            self.mask_source = "generation tags" if _GENERATION_TAG.search(own) else "prefix differences"
        # A template of ours may write the EOS token; a tokenizer without one has an empty string there.
        is_ours = own is None or own in TEMPLATES.values()
        self._variables = {"eos_token": ""} if is_ours and not tokenizer.eos_token else {}

    @property
    def is_marked(self) -> bool:
        """Whether the template itself says what the assistant wrote."""
        return self.mask_source != "prefix differences"

    def encode(
        self,
        messages: list[Message],
        turns: tuple[int, ...] | None,
        tools: list[Any] | None,
        where: str,
    ) -> tuple[list[int], list[int]]:
        """Return token ids and, per token, 1 where it is trained; for templates that `is_marked`.

        Args:
            messages: the conversation.
            turns: numbers of the assistant's messages that are trained; None trains every token.
            tools: JSON schemas offered to the template.
            where: ``file:line``, for errors.

        Raises:
            DataError: the template refuses the conversation, or its turns cannot be told apart.
        """
        options = {"return_assistant_tokens_mask": True, "tokenizer_kwargs": {"verbose": False}}
        encoded: Any = self._apply(messages, tools, where, tokenize=True, **options)
        ids: list[int] = encoded["input_ids"]
        if turns is None:
            return ids, [1] * len(ids)
        replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        mask: list[int] = encoded["assistant_masks"]
        if len(turns) < len(replies):
            mask = _only(mask, [replies.index(turn) for turn in turns], len(replies), where)
        return ids, mask

    def render(
        self,
        messages: list[Message],
        turns: tuple[int, ...] | None,
        tools: list[Any] | None,
        where: str,
    ) -> tuple[str, list[Span]]:
        """Return the rendered conversation and the character spans that are trained; arguments as of `encode`.

        Raises:
            DataError: the template refuses the conversation, or its turns cannot be told apart.
        """
        full: str = self._apply(messages, tools, where)
        if turns is None:
            return full, [(0, len(full))]
        spans: list[Span] = []
        for i in turns:
            before: str = self._apply(messages[:i], tools, where, add_generation_prompt=True) if i else ""
            through: str = full if i + 1 == len(messages) else self._apply(messages[: i + 1], tools, where)
            floor = spans[-1][1] if spans else 0
            span = _turn_span(full, before, through, messages[i]["content"].strip())
            if span is None or span[0] < floor:
                raise DataError(
                    f"{where}: cannot tell which part of the rendered conversation is message {i + 1}; "
                    "mark the assistant's words in the template with {% generation %}...{% endgeneration %}"
                )
            spans.append(span)
        return full, spans

    def open(self, messages: list[Message]) -> str:
        """Return a conversation as text, up to where the assistant's reply begins.

        Raises:
            DataError: the template refuses the conversation.
        """
        text: str = self._apply(messages, None, "the conversation", add_generation_prompt=True)
        return text

    def _apply(self, messages: list[Message], tools: list[Any] | None, where: str, **options: Any) -> Any:
        options = {"tokenize": False, **self._variables, **options}
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=self.text, return_dict=options["tokenize"], **options
            )
        except Exception as error:  # a template is a program of its own: it raises what it likes
            raise DataError(f"{where}: the chat template refuses this conversation: {error}") from error


def _find_template(tokenizer: "PreTrainedTokenizerBase", name: str | None) -> str | None:
    """Return the template of a name, or the tokenizer's own; None where that has none."""
    if name is None:
        return tokenizer.get_chat_template() if tokenizer.chat_template else None
    named: Any = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if found := {**TEMPLATES, **named}.get(name):
        return str(found)
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.template: {name} is neither a file that can be read nor one of {', '.join({**TEMPLATES, **named})}"
        ) from error


def _only(mask: list[int], wanted: list[int], num_replies: int, where: str) -> list[int]:
    """Return the mask of some replies, by their number, out of that of all of them."""
    begins = [i for i, here in enumerate(mask) if here and (i == 0 or not mask[i - 1])]
    if len(begins) != num_replies:
        raise DataError(
            f"{where}: the chat template marks {len(begins)} parts as the assistant's, but the conversation has "
            f"{num_replies} of its messages, so they cannot be trained apart; use data.train_on=replies"
        )
    number, chosen = -1, []
    for i, here in enumerate(mask):
        number += i in begins
        chosen.append(int(bool(here) and number in wanted))
    return chosen


def _turn_span(full: str, before: str, through: str, content: str) -> Span | None:
    """Return where a turn stands in ``full``, given renderings up to its start and up to its end."""
    start = len(before) if full.startswith(before) else _common_prefix(full, before)
    if full.startswith(through):
        return (start, len(through)) if content in full[start : len(through)] else None
    found, own = full.find(content, start), through.rfind(content)
    if found < 0 or own < 0:
        return None
    closing = through[own + len(content) :]
    end = found + len(content)
    return start, end + _common_prefix(full[end:], closing)


def _common_prefix(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
