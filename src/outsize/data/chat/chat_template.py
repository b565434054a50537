"""Conversations to text, and which of its characters the assistant wrote.

Two ways to know:

1. the chat template marks the assistant's words with ``{% generation %}``, as those of ours do;
2. it does not: sentinels in the place of words tell whose words are where, see `outsize.data.chat.reply_spans`.

Either way no word of another message is trained, and none of the assistant's is left out, or the conversation is
refused. ``data.template`` takes the place of the tokenizer's template: a file, one of the tokenizer's named ones, or
one of `TEMPLATES`. A tokenizer without a template gets `FALLBACK_TEMPLATE`.
"""

import contextlib
import functools
import itertools
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from outsize import files
from outsize.data.chat.chat_forms import (
    MARKED,
    UnreadFields,
    check_reasoning,
    forms,
    is_misread,
    mark,
    marked_spans,
    spans_of,
)
from outsize.data.chat.reply_borders import Borders, header_of
from outsize.data.chat.reply_spans import USERS, Message, Reading, Render, Span, read
from outsize.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

FALLBACK_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '### ' + message['role'] + ':\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + (eos_token or '') }}{% endgeneration %}{{ '\n' }}"
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
# What a call of the template is given here, whatever a record says.
_OWN_OPTIONS = {
    *(
        "conversation",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
    ),
    *("tokenize", "return_dict", "return_assistant_tokens_mask", "return_tensors", "tokenizer_kwargs"),
    *("padding", "truncation", "max_length"),
}
_UNMARKED = "{% generation %} of the chat template does not enclose all that replies say"
_MARK_THEM = "mark the assistant's words in the template with {% generation %}...{% endgeneration %}"


class ChatTemplate:
    """The template of a tokenizer, one that is named, or the fallback.

    Args:
        tokenizer: whose template it is, unless ``name`` says otherwise.
        name: a file, one of the tokenizer's named templates, or one of `TEMPLATES`; None for the tokenizer's own.

    Attributes:
        templates: the template by the name ``default``, or all those that a tokenizer names.
        mask_source: where the mask comes from: ``"generation tags"``, ``"sentinels"`` or ``"fallback template"``.
        written: the template that conversations were written with, if it is not the tokenizer's own and there were any.

    Raises:
        ConfigError: there is no such template.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", name: str | None = None) -> None:
        self._tokenizer = tokenizer
        templates = _find_templates(tokenizer, name)
        self.templates = templates or {"default": FALLBACK_TEMPLATE}
        self.mask_source = "fallback template"
        if templates:
            self.mask_source = (
                "generation tags" if all(map(MARKED.search, templates.values())) else "sentinels"
            )
        self.written: str | None = None
        self._is_own = self.templates == _find_templates(tokenizer, None)
        self._headers: dict[tuple[str, bool, str], str] = {}
        self._said: set[str] = set()
        self._looked_at: set[str] = set()
        self._unread = UnreadFields()

    @property
    def text(self) -> str:
        """The templates in one; part of what identifies tokenised data."""
        return self.templates["default"] if len(self.templates) == 1 else json.dumps(self.templates)

    def render(
        self,
        messages: list[Message],
        turns: tuple[int, ...] | None,
        tools: list[Any] | None,
        where: str,
        options: Mapping[str, Any] = MappingProxyType({}),
        num_asked: int = 0,
    ) -> tuple[str, list[Span]]:
        """Return the rendered conversation and the character spans that are trained.

        Args:
            messages: the conversation.
            turns: numbers of the assistant's messages that are trained; None trains all of the text.
            tools: JSON schemas offered to the template.
            where: ``file:line``, for errors.
            options: further variables of the template, e.g. ``enable_thinking``.
            num_asked: messages of a prompt that the rest completes. As in TRL, nothing is trained of what the
                template writes of the prompt alone, opened for a reply.

        Raises:
            DataError: the template refuses the conversation, or its turns cannot be told apart.
        """
        template = self._choose(tools, where)
        self._check_options(options, template, where)
        given = {"tools": tools, **options}
        form, text, reading = self._read(messages, turns, template, where, given)
        self.written = None if self._is_own else template
        if turns is None:
            return text, [(0, len(text))]
        render = functools.partial(self._apply, template=template, where=where, given=given)
        key = (template, bool(tools), repr(sorted(options.items())))
        spans = self._trained(form, text, reading, turns, render, key, where)
        if num_asked:
            spans = _behind(text, form[:num_asked], spans, render)
        return text, spans

    def _trained(
        self,
        form: list[Message],
        text: str,
        reading: Reading | None,
        turns: tuple[int, ...],
        render: Render,
        key: tuple[str, bool, str],
        where: str,
    ) -> list[Span]:
        """Return the characters of some replies; ``key`` is the template and what decides its headers."""
        template = key[0]
        if key not in self._headers:
            self._headers[key] = header_of(form, render, template)
        if MARKED.search(template):
            marked, spans = marked_spans(render(form, template=mark(template)))
            if marked != text:
                raise DataError(
                    f"{where}: the chat template changes the text that it marks with {{% generation %}}"
                )
            trained = spans_of(spans, form, turns, reading, where)
            self._tell_unmarked(trained, turns, reading, where)
            if reading is not None and turns and template not in self._looked_at:
                self._looked_at.add(template)
                self._tell_open(trained, Borders(reading, render, self._headers[key]), turns[-1], where)
            return trained
        if reading is None:
            raise DataError(
                f"{where}: cannot tell whose words are whose, since the chat template decides by the words of a "
                f"message; {_MARK_THEM}"
            )
        if (header := self._headers[key].strip()) and header in json.dumps(form, ensure_ascii=False):
            reading = read(form, render, template, keeps_tags=False)
            if reading is None:
                raise DataError(
                    f"{where}: a message says {header!r}, as the chat template writes before a reply"
                )
        return self._spans(Borders(reading, render, self._headers[key]), turns, where)

    def _spans(self, borders: Borders, turns: Sequence[int], where: str) -> list[Span]:
        spans: list[Span] = []
        for turn in turns:
            try:
                written = borders.spans(turn)
            except DataError as error:
                raise DataError(
                    f"{where}: cannot tell which part of the rendered conversation is message {turn + 1}: the chat "
                    f"template {error}; {_MARK_THEM}"
                ) from error
            spans += written
        spans.sort()
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
        return spans

    def open(
        self,
        messages: list[Message],
        tools: list[Any] | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return a conversation as text, up to where the assistant's reply begins; arguments as of `render`.

        Raises:
            DataError: the template refuses the conversation.
        """
        where = "the conversation"
        template = self._choose(tools, where)
        self._check_options(options, template, where)
        given = {"tools": tools, **options}
        form, _, _ = self._read(messages, (), template, where, given)
        return self._apply(form, template=template, where=where, given=given, add_generation_prompt=True)

    def form(
        self, messages: list[Message], tools: list[Any] | None, where: str, options: Mapping[str, Any]
    ) -> list[Message]:
        """Return a conversation as the template reads it: arguments of calls and contents in the form that it writes.

        Raises:
            DataError: the template refuses the conversation.
        """
        template = self._choose(tools, where)
        self._check_options(options, template, where)
        return self._read(messages, (), template, where, {"tools": tools, **options})[0]

    def _read(
        self,
        messages: list[Message],
        turns: Sequence[int] | None,
        template: str,
        where: str,
        given: Mapping[str, Any],
    ) -> tuple[list[Message], str, Reading | None]:
        """Return the first form of a conversation that the template writes in full, rendered and read."""
        check_reasoning(messages, where)
        render = functools.partial(self._apply, template=template, where=where, given=given)
        error: DataError | None = None
        partial: tuple[list[Message], str, Reading | None] | None = None
        for form in forms(messages):
            try:
                reading = read(form, render, template)
                text = render(form) if reading is None else reading.text
                self._check(form, text, reading, turns, where)
            except DataError as found:
                error = error or found
                continue
            partial = partial or (form, text, reading)
            if reading is None or USERS not in (what for _, what in reading.left_out()):
                partial = form, text, reading
                break
        if partial is None:
            assert error is not None
            raise error
        form, text, reading = partial
        unread = self._unread.of(form, given, text, template, render)
        self._tell([*(reading.left_out() if reading else ()), *unread], where)
        return partial

    def _check(
        self,
        form: list[Message],
        text: str,
        reading: Reading | None,
        turns: Sequence[int] | None,
        where: str,
    ) -> None:
        if is_misread(form, text):
            raise DataError(
                f"{where}: the chat template writes arguments of tool calls as a string within a string, or contents "
                "as a list; arguments have to be a JSON object, contents text"
            )
        if reading is None:
            return
        for turn, what in reading.lost():
            if turns is None or turn in turns:
                raise DataError(
                    f"{where}: message {turn + 1} cannot be trained: the chat template {what}; have the record as "
                    "the template writes it, or set data.template"
                )

    def _tell_unmarked(
        self, spans: Sequence[Span], turns: Sequence[int], reading: Reading | None, where: str
    ) -> None:
        """Say once that a template marks less than what the assistant says."""
        for block in reading.blocks if reading is not None and _UNMARKED not in self._said else ():
            is_marked = any(start <= block.start and block.end <= end for start, end in spans)
            if block.message in turns and not is_marked:
                self._said.add(_UNMARKED)
                logger.warning(
                    "%s: %s (here message %d); what is outside is not trained",
                    where,
                    _UNMARKED,
                    block.message + 1,
                )
                return

    def _tell_open(self, spans: Sequence[Span], borders: Borders, turn: int, where: str) -> None:
        """Say that a template's marks end before the reply does, so that nobody learns to end it."""
        with contextlib.suppress(DataError):
            _, end = borders.spans(turn)[-1]
            rest = borders.text[spans[-1][1] : end].strip() if spans else ""
            if rest:
                logger.warning(
                    "%s: {%% generation %%} of the chat template ends before %r, which ends a reply and is not trained",
                    where,
                    rest,
                )

    def _check_options(self, options: Mapping[str, Any], template: str, where: str) -> None:
        """Refuse variables that a template cannot be given, and say once which it does not read."""
        if refused := sorted(_OWN_OPTIONS & set(options)):
            raise DataError(
                f"{where}: field 'chat_template_kwargs' sets {', '.join(refused)}, which training decides; take it out"
            )
        for name in options:
            if name not in self._said and not re.search(rf"\b{re.escape(name)}\b", template):
                self._said.add(name)
                logger.warning(
                    "%s: the chat template reads no %s, which chat_template_kwargs sets", where, name
                )

    def _tell(self, left_out: Sequence[tuple[int, str]], where: str) -> None:
        """Say once what a template leaves out beside what is trained."""
        for turn, what in left_out:
            if what not in self._said:
                self._said.add(what)
                logger.warning(
                    "%s: the chat template leaves out %s (here message %d); that part of such records is not used",
                    where,
                    what,
                    turn + 1,
                )

    def _choose(self, tools: list[Any] | None, where: str) -> str:
        """Return the template for a conversation, as transformers chooses."""
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise DataError(
                f"{where}: the tokenizer has the chat templates {', '.join(sorted(self.templates))} and none that is "
                "the default; name one in data.template"
            )
        return self.templates[name]

    def _apply(
        self,
        messages: list[Message],
        *,
        template: str,
        where: str,
        given: Mapping[str, Any],
        **options: Any,
    ) -> str:
        try:
            rendered: Any = self._tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, **{**given, **options}
            )
        except Exception as error:  # a template is a program of its own: it raises what it likes
            raise DataError(f"{where}: the chat template refuses this conversation: {error}") from error
        return str(rendered)


def _behind(text: str, context: list[Message], spans: Sequence[Span], render: Render) -> list[Span]:
    """Return what of spans is behind a prompt that is opened for a reply, as far as the conversation begins with it."""
    try:
        opened = render(context, add_generation_prompt=True)
    except DataError:  # the template writes no such prompt alone
        return list(spans)
    border = sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, opened, strict=False))
    )
    return [(max(start, border), end) for start, end in spans if end > border]


def _find_templates(tokenizer: "PreTrainedTokenizerBase", name: str | None) -> dict[str, str]:
    """Return the template of a name as the default, or the tokenizer's own ones; none where that has none."""
    own_template: Any = tokenizer.chat_template
    named: dict[str, str] = own_template if isinstance(own_template, dict) else {}
    if name is None:
        return named or ({"default": own_template} if own_template else {})
    if named_template := {**TEMPLATES, **named}.get(name):
        return {"default": str(named_template)}
    try:
        return {"default": files.read_text(Path(os.path.expanduser(name)))}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.template: {name} is neither a file that can be read nor one of {', '.join({**TEMPLATES, **named})}"
        ) from error
