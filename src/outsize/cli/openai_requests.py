"""What requests of OpenAI's interface may ask for: each field, its kind and its bounds, in one table of pydantic's.

What is not done is refused where leaving it out would change the answer; a field that asks for nothing is taken.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from outsize.errors import DataError
from outsize.training.run_data import Conversation, read_prompt

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
    def tells_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

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
        record = {
            "messages": self.messages,
            "chat_template_kwargs": self.chat_template_kwargs,
            "tools": None if self.tool_choice == "none" else self.tools,
        }
        return [read_prompt(record, "the request")]

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
    return any(type(value) is type(one) and value == one for one in _REFUSED.get(name, (None,)))
