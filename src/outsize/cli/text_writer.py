"""A model and its tokenizer, open for writing: what the commands that write text have in common."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from outsize import files
from outsize.choices import Dtype, Home, Scored
from outsize.cli.text.records_text import digest_of
from outsize.errors import Closing, ConfigError, StorageError

if TYPE_CHECKING:
    from outsize.training.run_data import Conversation
    from outsize.wrapped.writing.detokenizer import ReplyReader
    from outsize.wrapped.writing.scoring import ScoredText
    from outsize.wrapped.writing.text import Figures, Prompt, Written


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model writes, and where its weights are."""

    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model directory, hub id, run directory, or adapters.")
    ]
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model of adapters, if not as they say.")
    ] = None
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N, emulated:1 or auto.")] = "auto"
    device_memory: Annotated[str | None, typer.Option(help="Budget on the device, e.g. 64MiB or 20GiB.")] = (
        None
    )
    home: Annotated[Home, typer.Option(help="Where the weights rest.")] = "auto"
    store_dir: Annotated[
        Path | None, typer.Option(help="Directory of a disk home, best on a local NVMe.")
    ] = None
    dtype: Annotated[Dtype, typer.Option(help="Of weights and computation.")] = "auto"
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let Python code that comes with the model run.")
    ] = False


def state_of_model(model: str, base: str | None = None) -> str:
    """Return a digest of where a model lies, and of its files as they are now; of adapters also of their base.

    Args:
        model: a directory or hub id, as `servable` returns it.
        base: the model that adapters are of, where it is not the one that they name.

    Raises:
        OutsizeError: there is no such model.
    """
    from outsize.checkpoint.files.checkpoint_files import locate_checkpoint, state_of_files

    directories = [locate_checkpoint(place).resolve() for place in _places(model, base)]
    return digest_of([[str(each), state_of_files(each)] for each in directories])


def _places(model: str, base: str | None) -> list[str | Path]:
    """Return where a model lies, or adapters and their base."""
    from outsize.model.stored_adapters import find_adapters

    adapters = find_adapters(model, base)
    return [model] if adapters is None else [adapters.directory, adapters.base]


class TextWriter(Closing):
    """A model and its tokenizer, open for writing; a context manager."""

    def __init__(self, options: ModelOptions, head: Literal["auto", "none"] = "auto") -> None:
        import outsize
        from outsize.checkpoint.begun_adapters import servable
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
            self._tokenizer = _tokenizer(_places(place, options.base), options.trust_remote_code)
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
    ) -> "ReplyReader":
        """Return what takes apart the reply to a conversation, and gives a text back as it is.

        Raises:
            ConfigError: there are tools, and nobody knows how the model writes calls of them.
        """
        from outsize.wrapped.writing.detokenizer import ReplyReader, response_template_of

        text = self.text_of(prompt)
        template = (
            None if isinstance(prompt, str) else response_template_of(self._tokenizer, self._model, text)
        )
        if tools and template is None:
            raise ConfigError(
                "tools: neither the tokenizer (response_template in tokenizer_config.json) nor transformers or TRL say "
                f"how a {type(self._model).__name__} with this chat template writes calls of tools, so an answer could "
                "not have tool_calls; leave tools out, or offer them as text in a message of the system"
            )
        return ReplyReader(template, self._tokenizer, text, tools, most_calls)

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
        return len(self.scored_text(prompt, None).ids)

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

        Space between the two counts to the completion, as lm-evaluation-harness has it, and so does a token that holds
        the end of the prompt and the beginning of the completion: all of the completion is scored.
        """
        from outsize.wrapped.writing.scoring import ScoredText
        from outsize.wrapped.writing.text import check_text

        text_prompt = self._prompt_of(prompt)
        special = not text_prompt.is_templated
        text = text_prompt.text + (completion or "")
        check_text(text, "the text")
        ids = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        if completion is None:
            return ScoredText(ids)
        before = text_prompt.text if text_prompt.is_templated else text_prompt.text.rstrip()
        prompt_ids = self._tokenizer(before, add_special_tokens=special)["input_ids"]
        return ScoredText(ids, sum(takewhile(bool, map(eq, ids, prompt_ids))))

    def bytes_per_token(self, want: Scored, top_k: int | None) -> int:
        """Return the bytes of a token's logits, of the largest K with their tokens and mass, or of its hidden state."""
        model: Any = self._model
        config, size = model.config.get_text_config(), model.dtype.itemsize
        if want == "hidden":
            return int(config.hidden_size * size)
        rows, each = int(config.vocab_size), int(size)
        return rows * each if top_k is None else min(top_k, rows) * (each + 4) + 4

    def score(self, texts: "Iterable[ScoredText]", want: Scored, **choice: Any) -> Iterator[Any]:
        """Yield what is wanted of each text; see `outsize.wrapped.writing.scoring.score`."""
        from outsize.wrapped.writing.scoring import score

        return score(self._model, texts, want=want, **choice)

    def _prompt_of(self, prompt: "str | Conversation") -> "Prompt":
        from outsize.wrapped.writing.text import Prompt

        return Prompt(self.text_of(prompt), is_templated=not isinstance(prompt, str))

    def _close(self) -> None:
        from outsize.wrapped.module import runner_of

        runner_of(self._model).close()

    def close(self) -> None:
        """See `Closing`."""
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
