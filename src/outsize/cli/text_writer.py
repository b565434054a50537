"""A model and its tokenizer, open for writing: what the commands that write text have in common."""

import contextlib
import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from outsize import files
from outsize.choices import Dtype, Home
from outsize.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from outsize.training.run_data import Conversation
    from outsize.wrapped.writing.scoring import ScoredText, ScoringFigures, Want
    from outsize.wrapped.writing.text import Figures, Prompt, Written


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model writes, and where its weights are."""

    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model directory, hub id, run directory, or adapters.")
    ]
    base: Annotated[
        str | None, typer.Option("--base", metavar="MODEL", help="The model of adapters, if not as they say.")
    ] = None
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:N, emulated:1 or auto.")] = "auto"
    device_memory: Annotated[
        str | None, typer.Option("--device-memory", help="Budget on the device, e.g. 64MiB or 20GiB.")
    ] = None
    home: Annotated[Home, typer.Option("--home", help="Where the weights rest.")] = "auto"
    store_dir: Annotated[
        Path | None, typer.Option("--store-dir", help="Directory of a disk home, best on a local NVMe.")
    ] = None
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of weights and computation.")] = "auto"
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let Python code that comes with the model run.")
    ] = False


_Kind = Literal["content", "reasoning_content", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """A piece of a reply.

    Attributes:
        kind: what it is of.
        text: of a call the arguments, as JSON.
        name: of the tool that is called.
    """

    kind: _Kind
    text: str
    name: str = ""


class ReplyReader:
    """Takes a reply apart as it is written, by transformers' parser: content, reasoning, and calls of tools.

    Space around content and reasoning is left out. Calls that cannot be read are content, as the model wrote them.

    Args:
        template: how, in the form of a ``response_template`` of transformers; None where all of it is content.
        tokenizer: whose special tokens are no content; the reply is put in with them.
        prompt: text that it follows, which may begin it.
        tools: whose schemas say of what kind arguments are.
        most_calls: further ones are left out, and all that follows them; None for any number.
    """

    def __init__(
        self,
        template: dict[str, Any] | None,
        tokenizer: Any,
        prompt: str,
        tools: Sequence[Any],
        most_calls: int | None,
    ) -> None:
        self._parser: Any = None
        self._most_calls = most_calls
        self._spaces = {"content": "", "reasoning_content": ""}  # that wait for more
        self._begun: set[str] = set()
        if template is not None:
            from transformers.utils.chat_parsing import ResponseParser

            template = copy.deepcopy(template)
            for field in template["fields"].values():
                if field.get("content") == "json":
                    field.setdefault("content_args", {})["allow_non_json"] = True
            self._parser = ResponseParser(template, prefix=prompt, tools=list(tools))
            special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
            self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")

    @property
    def reads_special(self) -> bool:
        """Whether special tokens are to be put in as text."""
        return self._parser is not None

    def put(self, text: str) -> list[ReplyPart]:
        """Return what is new with a piece of the reply."""
        if self._parser is not None:
            with contextlib.suppress(ValueError):  # of a call
                return self._parts(self._parser.feed(text))
            self._parser = None
        return [ReplyPart("content", text)] if text else []

    def end(self) -> list[ReplyPart]:
        """Return what has waited for more."""
        return [] if self._parser is None else self._parts(self._parser.finalize()[1])

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> list[ReplyPart]:
        parts = []
        for event in events:
            if self._most_calls == 0:
                break
            if event["type"] == "region_chunk" and not event["dirty"]:
                kind: _Kind = "content" if event["field"] == "content" else "reasoning_content"
                if text := self._stripped(kind, event["text"]):
                    parts.append(ReplyPart(kind, text))
            elif event["type"] == "region_close" and event["field"] == "tool_calls":
                parts.append(self._call(event["value"]))
        return parts

    def _call(self, value: Any) -> ReplyPart:
        function = value.get("function") if isinstance(value, dict) else value
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            return ReplyPart("content", function if isinstance(function, str) else json.dumps(function))
        if self._most_calls is not None:
            self._most_calls -= 1
        arguments = function.get("arguments") or {}
        return ReplyPart(
            "tool_calls",
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
            function["name"],
        )

    def _stripped(self, kind: _Kind, text: str) -> str:
        text = self._spaces[kind] + self._special.sub("", text)
        if kind not in self._begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._spaces[kind] = text[len(shown) :]
        if shown:
            self._begun.add(kind)
        return shown


class TextWriter:
    """A model and its tokenizer, open for writing; a context manager."""

    def __init__(self, options: ModelOptions, head: Literal["auto", "none"] = "auto") -> None:
        import outsize
        from outsize.checkpoint.begun_adapters import servable
        from outsize.model.stored_adapters import find_adapters
        from outsize.wrapped.writing.text import check_model

        place = servable(options.model)
        with contextlib.ExitStack() as stack:
            self._model = outsize.load(
                place,
                base=options.base,
                dtype=options.dtype,
                trust_remote_code=options.trust_remote_code,
                trainable=False,
                head=head,
                device=options.device,
                device_memory=options.device_memory,
                home=options.home,
                store_dir=options.store_dir,
            )
            stack.callback(self._close)
            if head == "auto":
                check_model(self._model)
            adapters = find_adapters(place, options.base)
            places: list[str | Path] = [place]
            if adapters is not None:
                places = [adapters.directory, adapters.base]
            self._tokenizer = _tokenizer(places, options.trust_remote_code)
            self._stack = stack.pop_all()

    def check_settings(self) -> None:
        """Refuse what the checkpoint's generation_config.json says and is not done, whether tokens are drawn or not.

        Raises:
            ConfigError: names the key.
        """
        from outsize.wrapped.writing.generation_settings import settle_settings

        for draws in (True, False):
            settle_settings(self._model, self._tokenizer, {"do_sample": draws})

    def reply_reader(
        self, prompt: "str | Conversation", tools: Sequence[Any] = (), most_calls: int | None = None
    ) -> ReplyReader:
        """Return what takes apart the reply to a conversation, and gives a text back as it is.

        Raises:
            ConfigError: there are tools, and nobody knows how the model writes calls of them.
        """
        text = self.text_of(prompt)
        template = None if isinstance(prompt, str) else self._response_template(text)
        if tools and template is None:
            raise ConfigError(
                "tools: neither the tokenizer (response_template in tokenizer_config.json) nor transformers or TRL say "
                f"how a {type(self._model).__name__} with this chat template writes calls of tools, so an answer could "
                "not have tool_calls; leave tools out, or offer them as text in a message of the system"
            )
        return ReplyReader(template, self._tokenizer, text, tools, most_calls)

    def _response_template(self, prompt: str) -> dict[str, Any] | None:
        """Return the first way to take a reply apart that knows where in a prompt it begins."""
        from transformers.utils.chat_parsing.response_templates import load_response_template

        from outsize.compat.transformers_private import response_templates

        ways = response_templates(self._tokenizer, self._model)
        return next((way for way in ways if load_response_template(way).start_anchor_re.search(prompt)), None)

    def text_of(self, prompt: "str | Conversation") -> str:
        """Return a prompt as text; a conversation by the tokenizer's template, open for a reply.

        Raises:
            DataError: the template refuses the conversation.
        """
        if isinstance(prompt, str):
            return prompt
        from outsize.training.run_data import chat_text

        return chat_text(self._tokenizer, prompt)

    def num_tokens(self, prompt: "str | Conversation") -> int:
        """Return how many tokens a prompt has.

        Raises:
            DataError: it is no text.
        """
        from outsize.wrapped.writing.text import check_text

        text_prompt = self._prompt_of(prompt)
        check_text(text_prompt.text, "the prompt")
        return len(
            self._tokenizer(text_prompt.text, add_special_tokens=not text_prompt.is_templated)["input_ids"]
        )

    def token_text(self, token: int) -> str:
        """Return the text of one token, special ones among them."""
        text: str = self._tokenizer.decode([token])
        return text

    @property
    def num_positions(self) -> int | None:
        """Tokens that the model takes at most; None where nothing limits them."""
        from outsize.wrapped.writing.generations import positions_of

        return positions_of(self._model)

    def write(
        self, prompts: "Sequence[str | Conversation]", on_text: Callable[[str], None], **choice: Any
    ) -> "tuple[list[Written], Figures]":
        """Return what the model writes after texts and conversations; see `outsize.wrapped.writing.text.write`."""
        from outsize.wrapped.writing.text import WritingOptions, write

        text_prompts = [self._prompt_of(prompt) for prompt in prompts]
        names = [field.name for field in fields(WritingOptions) if field.name in choice]
        options = WritingOptions(**{name: choice.pop(name) for name in names})
        choice = {"on_token": lambda token: on_text(token.text), **choice}
        return write(self._model, self._tokenizer, text_prompts, options, **choice)

    def scored_text(self, prompt: "str | Conversation", completion: str | None) -> "ScoredText":
        """Return the tokens of a completion behind its prompt, or of a text, all of which but the first count.

        Space between the two counts to the completion, as lm-evaluation-harness has it.
        """
        from outsize.wrapped.writing.scoring import ScoredText
        from outsize.wrapped.writing.text import check_text

        text_prompt = self._prompt_of(prompt)
        before = (
            text_prompt.text if completion is None or text_prompt.is_templated else text_prompt.text.rstrip()
        )
        text = text_prompt.text + (completion or "")
        check_text(text, "the text")
        ids = self._tokenizer(text, add_special_tokens=not text_prompt.is_templated)["input_ids"]
        if completion is None:
            return ScoredText(ids)
        return ScoredText(
            ids, len(self._tokenizer(before, add_special_tokens=not text_prompt.is_templated)["input_ids"])
        )

    def score(self, texts: "Iterable[ScoredText]", want: "Want", figures: "ScoringFigures") -> Iterator[Any]:
        """Yield what is wanted of each text; see `outsize.wrapped.writing.scoring.score`."""
        from outsize.wrapped.writing.scoring import score

        return score(self._model, texts, want=want, figures=figures)

    def _prompt_of(self, prompt: "str | Conversation") -> "Prompt":
        from outsize.wrapped.writing.text import Prompt

        return Prompt(self.text_of(prompt), is_templated=not isinstance(prompt, str))

    def _close(self) -> None:
        from outsize.wrapped.module import runner_of

        runner_of(self._model).close()

    def __enter__(self) -> "TextWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


def _tokenizer(places: Sequence[str | Path], trust_remote_code: bool) -> Any:
    """Return the tokenizer of the first of ``places`` that has one."""
    from outsize.checkpoint.files.checkpoint_files import has_tokenizer, locate_checkpoint, lone_template
    from outsize.checkpoint.tokenizer_files import load_tokenizer

    *before, last = places
    directories = (Path(each) for each in before if has_tokenizer(Path(each)))
    directory = next(directories, None) or locate_checkpoint(last)
    try:
        tokenizer = load_tokenizer(directory, trust_remote_code=trust_remote_code)
    except StorageError:
        raise
    except Exception as error:  # transformers and its tokenizers raise a dozen kinds
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{directory} has no tokenizer that transformers can read: {first_line}; put its files beside the weights"
        ) from error
    template = next((path for each in before if (path := lone_template(Path(each)))), None)
    if template is not None:
        tokenizer.chat_template = files.read_text(template)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = 0
    return tokenizer
