"""OpenAI's interface: what a request may ask for, in one table of pydantic's, and how its answer looks.

What is not done is refused where leaving it out would change the answer; a field that asks for nothing is taken.
"""

import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from outsize.errors import ConfigError, DataError
from outsize.training.run_data import Conversation, read_prompt
from outsize.wrapped.writing.detokenizer import UNKNOWN, ReplyPart

try:
    from openai import types
    from openai.types import chat
except ImportError as error:
    raise ConfigError(
        f"outsize serve needs the package openai ({error}): pip install 'outsize[serve]'"
    ) from error

if TYPE_CHECKING:
    from outsize.wrapped.writing.detokenizer import ReplyReader, Token
    from outsize.wrapped.writing.text import Written

# What is not done, and the values of it that ask for nothing; of what is named nowhere only None does.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "tools": (None, []),  # of a prompt: there is no template
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "logit_bias": (None, {}),
    "echo": (None, False),
    "suffix": (None, ""),
    "response_format": (None, {"type": "text"}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "ignore_eos": (None, False),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
}
_MOST_LIKELIEST = 20

_Texts = Annotated[
    list[str],
    Field(min_length=1, max_length=128),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
_Stop = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(max_length=16),
    BeforeValidator(lambda value: ([value] if value else []) if isinstance(value, str) else value or []),
]


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against who watches the length of events


class TextRequest(BaseModel):
    """What chats and prompts have in common; `None` is as good as unsaid.

    Attributes:
        top_k: -1 and 0 are all tokens.
        model: whichever it names, there is one.
        user: as those below it, about the account of a client, which there is none of.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: Any = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, lt=2**63)
    n: int | None = Field(None, ge=1, le=128)
    stop: _Stop = []
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def prompts(self) -> list[str | Conversation]:
        """What is to be gone on from, or answered."""
        raise NotImplementedError

    @property
    def num_likeliest(self) -> int | None:
        """Of how many tokens at each place the logprobs are wanted; None for no logprobs."""
        raise NotImplementedError

    @property
    def most_tokens(self) -> int | None:
        """At most so many are written; None for as many as the server writes unasked."""
        return self.max_tokens

    @property
    def choice(self) -> dict[str, Any]:
        """How tokens are chosen, as `generate` of transformers takes it."""
        named = {"temperature": self.temperature, "top_p": self.top_p, "min_p": self.min_p}
        choice = {name: value for name, value in named.items() if value is not None}
        if self.top_k is not None:
            choice["top_k"] = max(self.top_k, 0)
        # Below these the likeliest token is the only one.
        draws = choice.get("temperature", 1) >= 1e-5 and choice.get("top_p", 1) >= 1e-9
        return {**choice, "do_sample": True} if draws else {"do_sample": False}


class PromptRequest(TextRequest):
    """A request to ``/v1/completions``."""

    prompt: _Texts
    logprobs: int | None = Field(None, ge=0, le=_MOST_LIKELIEST)

    @property
    def prompts(self) -> list[str | Conversation]:
        """The texts to go on from."""
        return list(self.prompt)

    @property
    def num_likeliest(self) -> int | None:
        """As in `TextRequest`."""
        return self.logprobs


class ChatRequest(TextRequest):
    """A request to ``/v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**63)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=_MOST_LIKELIEST)
    tools: list[Any] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # as vLLM and llama.cpp have them

    @property
    def prompts(self) -> list[str | Conversation]:
        """The conversation; calls of tools and their results may be among its messages."""
        for message in self.messages:
            parts = message.get("content")
            if isinstance(parts, list) and not all(
                isinstance(part, dict) and part.get("type") == "text" for part in parts
            ):
                raise DataError("content has to be a text, or a list of parts that are texts")
        for number, tool in enumerate(self.offered):
            if not (isinstance(tool, dict) and tool.get("type") == "function" and "function" in tool):
                raise DataError(f"tools.{number} has to be of the type 'function'")
        record = {
            # Some clients leave out what is null.
            "messages": [
                {"content": None, **one} if one.get("role") == "assistant" else one for one in self.messages
            ],
            "chat_template_kwargs": self.chat_template_kwargs,
            "tools": self.offered,
        }
        return [read_prompt(record, "the request")]

    @property
    def offered(self) -> list[Any]:
        """Tools that the reply may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def most_calls(self) -> int | None:
        """Calls of tools in a reply, at most; None for any number."""
        return 1 if self.parallel_tool_calls is False else None

    @property
    def num_likeliest(self) -> int | None:
        """As in `TextRequest`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """As in `TextRequest`; the newer name goes before."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


Request = TypeVar("Request", bound=TextRequest)


def read_request(body: bytes, kind: type[Request]) -> Request:
    """Return a request from JSON.

    Raises:
        DataError: it is none, or asks for what is not done.
    """
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise DataError(_first_problem(error)) from error
    more = request.model_extra or {}
    refused = [name for name, value in more.items() if not _asks_nothing(name, value)]
    if refused:
        raise DataError(f"{', '.join(refused)}: not supported; leave it out")
    if isinstance(request, ChatRequest) and request.top_logprobs is not None and not request.logprobs:
        raise DataError("top_logprobs are those of logprobs: set logprobs to true, or leave it out")
    return request


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    path = ".".join(map(str, problem["loc"]))
    if problem["type"] == "json_invalid":
        halves = (
            ": half a character, an unpaired surrogate, is no text" if "hex escape" in problem["msg"] else ""
        )
        return f"the request is not valid JSON: {problem['msg']}{halves}"
    if not path:
        return "the request is to be a JSON object"
    if problem["type"] == "missing":
        return f"{path} is missing"
    return f"{path} is {problem['input']!r}: {problem['msg']}"


def _asks_nothing(name: str, value: Any) -> bool:
    """Return whether a field that is not done has a value that asks for nothing; `True` is not 1 there."""
    return any(
        value == one and isinstance(value, bool) == isinstance(one, bool)
        for one in _REFUSED.get(name, (None,))
    )


def _call(part: ReplyPart) -> dict[str, Any]:
    """Return a call of a tool; its id is as long as templates of Mistral's want it."""
    function = {"name": part.name, "arguments": part.text}
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}


class Answer:
    """How an answer looks, as a whole and as a stream.

    Attributes:
        readers: that take the texts apart, one each; there before the first token is.
        prompt_tokens: there with them.
    """

    def __init__(
        self, request: TextRequest, num_choices: int, model: str, text_of: Callable[[int], str]
    ) -> None:
        self.num_choices = num_choices
        self.readers: list[ReplyReader] = []
        self.prompt_tokens = 0
        self._request, self._text_of = request, text_of
        self._is_chat = isinstance(request, ChatRequest)
        self._num_calls = [0] * num_choices  # that a stream has shown
        kind = "chatcmpl" if self._is_chat else "cmpl"
        self._head: dict[str, Any] = {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, tokens: "Sequence[Token]", texts: "Sequence[Written]") -> dict[str, Any]:
        """Return an answer as a whole."""
        choices = []
        for index, one in enumerate(texts):
            written = [token for token in tokens if token.row == index]
            reader = self.readers[index]
            parts = reader.put("".join(token.text for token in written))
            parts += reader.end(is_cut=one.finish_reason == "length")
            holds = {"message": self._message(parts)} if self._is_chat else {"text": one.text}
            ends = {"logprobs": self._logprobs(written), "finish_reason": self._why(parts, one)}
            choices.append({"index": index, **holds, **ends})
        kind, form = (
            ("chat.completion", chat.ChatCompletion)
            if self._is_chat
            else ("text_completion", types.Completion)
        )
        body = form(**self._head, object=kind, choices=choices, usage=self._usage(texts))  # type: ignore[arg-type]
        return body.model_dump(exclude_unset=True)

    def beginning(self) -> Iterator[str]:
        """Yield the events that a stream begins with: who speaks."""
        for index in range(self.num_choices if self._is_chat else 0):
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def pieces(self, token: "Token") -> Iterator[str]:
        """Yield the events of a token; its logprob goes with the first."""
        parts = self.readers[token.row].put(token.text)
        if not parts and token.logprob is not None:
            parts = [ReplyPart("content", "")]
        logprobs = self._logprobs([token])
        for part in parts:
            yield self._chunk(token.row, {**self._holds(token.row, part), "logprobs": logprobs})
            logprobs = None

    def ending(self, texts: "Sequence[Written]") -> Iterator[str]:
        """Yield the events that a stream ends with: what has waited, why each choice ends, the usage, the end."""
        for index, one in enumerate(texts):
            parts = self.readers[index].end(is_cut=one.finish_reason == "length")
            for part in parts:
                yield self._chunk(index, self._holds(index, part))
            why = self._why(parts, one, self._num_calls[index])
            yield self._chunk(index, {"delta": {}} if self._is_chat else {"text": ""}, why)
        if self._request.stream_options and self._request.stream_options.include_usage:
            yield self._event(choices=[], usage=self._usage(texts))
        yield "data: [DONE]\n\n"

    def _holds(self, index: int, part: ReplyPart) -> dict[str, Any]:
        """Return what a chunk of a choice holds."""
        if not self._is_chat:
            return {"text": part.text}
        if part.kind != "tool_calls":
            return {"delta": {part.kind: part.text}}
        self._num_calls[index] += 1
        return {"delta": {"tool_calls": [{"index": self._num_calls[index] - 1, **_call(part)}]}}

    def _message(self, parts: Sequence[ReplyPart]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"}
        for part in parts:
            if part.kind == "tool_calls":
                message.setdefault("tool_calls", []).append(_call(part))
            else:
                message[part.kind] = message.get(part.kind, "") + part.text
        message.setdefault("content", None if "tool_calls" in message else "")
        return message

    def _why(self, parts: Sequence[ReplyPart], text: "Written", num_calls: int = 0) -> str:
        """Return why a choice ends; ``num_calls`` came before these parts."""
        if text.finish_reason == "length":
            return text.finish_reason
        calls = num_calls or any(part.kind == "tool_calls" for part in parts)
        return "tool_calls" if calls else text.finish_reason

    def _chunk(self, index: int, holds: Mapping[str, Any], why: str | None = None) -> str:
        return self._event(choices=[{"index": index, **holds, "finish_reason": why}])

    def _event(self, **holds: Any) -> str:
        # Not validated: of prompts the type has no choice that has not ended.
        kind, form = (
            ("chat.completion.chunk", chat.ChatCompletionChunk)
            if self._is_chat
            else ("text_completion", types.Completion)
        )
        chunk = form.construct(**self._head, object=kind, **holds)
        return f"data: {chunk.model_dump_json(exclude_unset=True, warnings=False)}\n\n"

    def _logprob(self, token: "Token") -> dict[str, Any]:
        def entry(number: int, logprob: float) -> dict[str, Any]:
            text = self._text_of(number)
            is_whole = UNKNOWN not in text  # else part of a character, whose bytes are not known
            return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if is_whole else None}

        assert token.token is not None
        assert token.logprob is not None
        return {
            **entry(token.token, token.logprob),
            "top_logprobs": [entry(*likely) for likely in token.likeliest],
        }

    def _logprobs(self, tokens: "Sequence[Token]") -> dict[str, Any] | None:
        """Return the logprobs of tokens as an answer has them; None where nobody wants them."""
        entries = [self._logprob(token) for token in tokens if token.logprob is not None]
        if self._is_chat or not entries:
            return {"content": entries, "refusal": None} if entries else None
        ends = list(itertools.accumulate((len(one["token"]) for one in entries), initial=0))
        return {
            "tokens": [one["token"] for one in entries],
            "token_logprobs": [one["logprob"] for one in entries],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in one["top_logprobs"]} for one in entries
            ],
            "text_offset": ends[:-1],
        }

    def _usage(self, texts: "Sequence[Written]") -> dict[str, int]:
        before, written = self.prompt_tokens, sum(one.num_tokens for one in texts)
        return {"prompt_tokens": before, "completion_tokens": written, "total_tokens": before + written}
