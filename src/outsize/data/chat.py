"""Conversations to tokens, and which of those tokens the assistant wrote.

Three ways to know, best first:

1. the tokenizer's chat template marks the assistant's words with ``{% generation %}``;
2. it does not: the conversation is rendered up to each assistant turn and up to its end, and what the second
   has more than the first is the turn, closing token included. Templates that rewrite earlier turns
   (reasoning that is dropped once the user answers) are not prefixes of one another; there, the turn is found
   by its content and its closing;
3. the tokenizer has no template: `FALLBACK_TEMPLATE`, which marks them.
"""

import re
from typing import TYPE_CHECKING, Any

from outsize.errors import DataError

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
_GENERATION_TAG = re.compile(r"{%-?\s*generation\s*-?%}")


class ChatTemplate:
    """The template of a tokenizer, or the fallback.

    Attributes:
        mask_source: where the mask comes from: ``"generation tags"``, ``"prefix differences"`` or
            ``"fallback template"``.
        text: the template itself; part of what identifies tokenised data.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        own = tokenizer.get_chat_template() if tokenizer.chat_template else None
        self.text: str = own or FALLBACK_TEMPLATE
        self.mask_source = "fallback template"
        if own is not None:
            self.mask_source = "generation tags" if _GENERATION_TAG.search(own) else "prefix differences"
        # The fallback writes the EOS token; a tokenizer without one has an empty string there.
        self._variables = {} if own or tokenizer.eos_token else {"eos_token": ""}

    @property
    def is_marked(self) -> bool:
        """Whether the template itself says what the assistant wrote."""
        return self.mask_source != "prefix differences"

    def encode(
        self, messages: list[Message], tools: list[Any] | None, where: str
    ) -> tuple[list[int], list[int]]:
        """Return token ids and, per token, 1 where the assistant wrote it; for templates that `is_marked`."""
        options = {"return_assistant_tokens_mask": True, "tokenizer_kwargs": {"verbose": False}}
        encoded: Any = self._apply(messages, tools, where, tokenize=True, **options)
        return encoded["input_ids"], encoded["assistant_masks"]

    def render(self, messages: list[Message], tools: list[Any] | None, where: str) -> tuple[str, list[Span]]:
        """Return the rendered conversation and the character spans that the assistant wrote.

        Raises:
            DataError: the template refuses the conversation, or its turns cannot be told apart.
        """
        full: str = self._apply(messages, tools, where)
        spans: list[Span] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before: str = self._apply(messages[:i], tools, where, add_generation_prompt=True) if i else ""
            through: str = full if i + 1 == len(messages) else self._apply(messages[: i + 1], tools, where)
            floor = spans[-1][1] if spans else 0
            span = _turn_span(full, before, through, message["content"].strip())
            if span is None or span[0] < floor:
                raise DataError(
                    f"{where}: cannot tell which part of the rendered conversation is message {i + 1}; "
                    "mark the assistant's words in the template with {% generation %}...{% endgeneration %}"
                )
            spans.append(span)
        return full, spans

    def _apply(self, messages: list[Message], tools: list[Any] | None, where: str, **options: Any) -> Any:
        options = {"tokenize": False, **self._variables, **options}
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=self.text, return_dict=options["tokenize"], **options
            )
        except Exception as error:  # a template is a program of its own: it raises what it likes
            raise DataError(f"{where}: the chat template refuses this conversation: {error}") from error


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
