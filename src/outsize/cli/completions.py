"""Requests in the form of OpenAI's HTTP interface, answered by a model that is streamed.

There are ``/v1/models``, ``/v1/chat/completions`` and ``/v1/completions``. One text is written at a time, and others
wait for their turn. What is not done here is refused where leaving it out would change the answer.
"""

import json
import logging
import select
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from outsize.errors import ConfigError, DataError, InfeasiblePlanError, OutsizeError
from outsize.loopback import LoopbackHandler

if TYPE_CHECKING:
    from outsize.cli.text_writer import TextWriter
    from outsize.training.conversation import Conversation
    from outsize.wrapped.writing.text import Written

_log = logging.getLogger(__name__)

MOST_BYTES = 16 * 2**20  # of a request
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
MODELS = "/v1/models"
# Read elsewhere, or about the account of a client, which there is none of.
_PASSED = {
    *("model", "stream", "stream_options", "seed", "max_tokens", "max_completion_tokens"),
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
}
# What is asked for by number: its kind, from where to where, and what holds without.
_NUMBERS: Mapping[str, tuple[type, float, float, float | None]] = {
    "temperature": (float, 0, 100, None),
    "top_p": (float, 0, 1, None),
    "min_p": (float, 0, 1, None),
    "top_k": (int, -1, 2**31 - 1, None),
}
_LEAST = {"temperature": 1e-5, "top_p": 1e-9}  # below it the likeliest token is the only one
_WAIT_S = 0.2
_OPTIONS = "chat_template_kwargs"  # further variables of the template, as vLLM and llama.cpp have them
# What is not done, and the values of it that ask for nothing; of what is named nowhere only None does.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "stop": (None, "", []),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),  # without tools nothing is chosen
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "logprobs": (None, False, 0),
    "logit_bias": (None, {}),
    "echo": (None, False),
    "suffix": (None, ""),
    "response_format": (None, {"type": "text"}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
}


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What a request asks for.

    Attributes:
        prompt: a text, or a conversation.
        max_new_tokens: at most so many are written; None for as many as the server writes unasked.
        streams: whether the text is sent as it is written.
        tells_usage: whether a stream ends with the numbers of tokens.
        seed: of the choice of tokens; None goes on with the chances of before.
        choice: how tokens are chosen, as `generate` of transformers takes it.
    """

    prompt: "str | Conversation"
    max_new_tokens: int | None
    streams: bool
    tells_usage: bool
    seed: int | None
    choice: Mapping[str, Any]


def read_request(body: bytes, *, is_chat: bool) -> Completion:
    """Return what a request asks for.

    Args:
        body: JSON.
        is_chat: whether it is a conversation.

    Raises:
        DataError: it is none, or asks for what is not done.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the request is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise DataError("the request is to be a JSON object")
    known = {*_PASSED, *_NUMBERS, *(("messages", _OPTIONS) if is_chat else ("prompt",))}
    refused = [name for name in found if name not in known and not _asks_nothing(name, found[name])]
    if refused:
        raise DataError(f"{', '.join(refused)}: not supported; leave it out")
    name = "max_tokens" if found.get("max_completion_tokens") is None else "max_completion_tokens"
    most = _number(found, name, int, 1, 2**63 - 1, None)
    choice = {name: _number(found, name, *how) for name, how in _NUMBERS.items()}
    draws = all(choice[name] is None or choice[name] >= least for name, least in _LEAST.items())
    if choice["top_k"] == -1:  # all of them, as others write it
        choice["top_k"] = 0
    options = found.get("stream_options") or {}
    if not isinstance(options, dict) or not options.keys() <= {"include_usage"}:
        raise DataError(f"stream_options is {options!r}; it may say include_usage and nothing else")
    for where, key in ((found, "stream"), (options, "include_usage")):
        if not isinstance(where.get(key), bool | None):
            raise DataError(f"{key} is {where[key]!r}; it has to be true or false")
    return Completion(
        prompt=_conversation(found) if is_chat else _prompt(found.get("prompt")),
        max_new_tokens=most,
        streams=bool(found.get("stream")),
        tells_usage=bool(options.get("include_usage")),
        seed=_number(found, "seed", int, -(2**63), 2**63 - 1, None),
        choice={name: value for name, value in choice.items() if value is not None} | {"do_sample": True}
        if draws
        else {"do_sample": False},
    )


def _number(
    found: Mapping[str, Any], name: str, kind: type, least: float, most: float, default: float | None
) -> Any:
    """Return a number from ``least`` to ``most``; what is not finite is outside."""
    value = found.get(name)
    if value is None:
        return default
    fits = isinstance(value, int | kind) and not isinstance(value, bool)
    if not fits or not least <= value <= most:
        number = "a whole number" if kind is int else "a number"
        raise DataError(f"{name} is {value!r}; it has to be {number} from {least} to {most}")
    return kind(value)


def _asks_nothing(name: str, value: Any) -> bool:
    """Return whether a key that is not done has a value that asks for nothing; `True` is not 1 there."""
    return any(type(value) is type(one) and value == one for one in _REFUSED.get(name, (None,)))


def _conversation(found: Mapping[str, Any]) -> "Conversation":
    """Return the messages of a request; calls of tools and their results may be among them."""
    from outsize.training.conversation import read_prompt

    messages = found.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise DataError("messages has to be a list of objects with role and content")
    for message in messages:
        parts = message.get("content")
        if isinstance(parts, list) and not all(
            isinstance(part, dict) and part.get("type") == "text" for part in parts
        ):
            raise DataError("content has to be a text, or a list of parts that are texts")
    asked = read_prompt({"messages": messages, _OPTIONS: found.get(_OPTIONS)}, "the request")
    assert not isinstance(asked, str)
    return asked


def _prompt(value: Any) -> str:
    """Return a prompt, which may stand in a list of one."""
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if not isinstance(value, str):
        raise DataError("prompt has to be a text, or a list of one text; send several one after the other")
    return value


class _OverError(Exception):
    """The server ends."""


class Completions:
    """A model that answers requests, one at a time.

    Args:
        writer: the model.
        name: what it is called.
        max_new_tokens: where a request does not say.
    """

    def __init__(self, writer: "TextWriter", name: str, max_new_tokens: int) -> None:
        self.name = name
        self.max_new_tokens = max_new_tokens
        self._writer = writer
        self._turn = threading.Lock()
        self._ends = False

    def write(
        self, asked: Completion, on_text: Callable[[str], None], is_there: Callable[[], bool]
    ) -> "tuple[Written, int]":
        """Return what is written, and how many tokens the prompt has.

        Args:
            asked: the request.
            on_text: gets the text piece by piece.
            is_there: whether the client is; asked while it waits, and at every token.

        Raises:
            ConnectionError: the client has gone.
        """
        while not self._turn.acquire(timeout=_WAIT_S):
            self._go_on(is_there)
        try:
            self._go_on(is_there)
            return self._write(asked, on_text, is_there)
        finally:
            self._turn.release()

    def _write(
        self, asked: Completion, on_text: Callable[[str], None], is_there: Callable[[], bool]
    ) -> "tuple[Written, int]":
        import torch

        def go_on(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            self._go_on(is_there)
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        num_tokens = self._writer.num_tokens(asked.prompt)
        most = asked.max_new_tokens
        if most is None:
            positions = self._writer.num_positions
            most = self.max_new_tokens
            if positions is not None:
                most = max(1, min(most, positions - num_tokens))
        if asked.seed is not None:
            torch.manual_seed(asked.seed)
        (written,), _ = self._writer.write(
            [asked.prompt],
            on_text,
            max_new_tokens=most,
            batch_size=1,
            stopping_criteria=[go_on],
            **asked.choice,
        )
        return written, num_tokens

    def _go_on(self, is_there: Callable[[], bool]) -> None:
        if self._ends:
            raise _OverError("the server ends")
        if not is_there():
            raise ConnectionError("the client has gone")

    def end(self) -> None:
        """Write no further token; returns when nothing is being written."""
        self._ends = True
        self._turn.acquire()


class CompletionHandler(LoopbackHandler):
    """Answers a request of a client; ``self.server.told`` is `Completions`."""

    def answer(self) -> None:
        """Answer a GET with the served model."""
        name = self.server.told.name
        model = {"id": name, "object": "model", "created": 0, "owned_by": "outsize"}
        path = unquote(self.path.partition("?")[0]).rstrip("/")
        if path == MODELS:
            self._send_json({"object": "list", "data": [model]})
        elif path == f"{MODELS}/{name}":
            self._send_json(model)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is nothing at {path}; {MODELS} names the model")

    def answer_post(self) -> None:
        """Write a text."""
        if self.path not in (CHAT, PLAIN):
            self._refuse(
                HTTPStatus.NOT_FOUND, f"there is nothing at {self.path}; there are {CHAT} and {PLAIN}"
            )
            return
        # A page from elsewhere may post forms and plain text to this machine, and nothing else unasked.
        if self.headers.get_content_type() != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Content-Type has to be application/json")
            return
        answer = _Answer(self, is_chat=self.path == CHAT)
        try:
            answer.send(self._read())
        except (DataError, ConfigError, InfeasiblePlanError) as error:  # another request may be answered
            self._fail(answer, HTTPStatus.BAD_REQUEST, str(error))
        except _OverError as error:
            self._fail(answer, HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except OutsizeError as error:
            self._fail(answer, HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        except (ConnectionError, TimeoutError):
            return  # the client has gone
        except Exception as error:
            _log.exception("a request failed")
            self._fail(answer, HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")

    def is_heard(self) -> bool:
        """Return whether the client still listens."""
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return not readable or bool(self.connection.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _read(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MOST_BYTES:
            raise DataError(f"Content-Length has to be there, and at most {MOST_BYTES}")
        return self.rfile.read(int(length))

    def _send_json(self, answer: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send(status, "application/json", json.dumps(answer))

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        self._send_json({"error": {"message": message, "type": "invalid_request_error"}}, status)

    def _fail(self, answer: "_Answer", status: HTTPStatus, message: str) -> None:
        if answer.has_begun:
            answer.event({"error": {"message": message}})
        else:
            self._refuse(status, message)


class _Answer:
    """An answer on its way."""

    def __init__(self, handler: CompletionHandler, *, is_chat: bool) -> None:
        self._handler = handler
        self._model: Completions = handler.server.told
        self._is_chat = is_chat
        self._kind = "chat.completion.chunk" if is_chat else "text_completion"
        self.has_begun = False
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self._model.name,
        }

    def send(self, body: bytes) -> None:
        """Write what the request asks for, and send it, as it is written or as a whole."""
        asked = read_request(body, is_chat=self._is_chat)
        on_text = self._piece if asked.streams else lambda _: None
        written, prompt_tokens = self._model.write(asked, on_text, self._handler.is_heard)
        why = written.finish_reason
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": written.num_tokens,
            "total_tokens": prompt_tokens + written.num_tokens,
        }
        if asked.streams:
            self._begin()
            self._chunk({"delta": {}} if self._is_chat else {"text": ""}, why)
            if asked.tells_usage:
                self.event({**self._head, "object": self._kind, "choices": [], "usage": usage})
            self._line("[DONE]")
            return
        kind, told = "text_completion", {"text": written.text}
        if self._is_chat:
            kind, told = "chat.completion", {"message": {"role": "assistant", "content": written.text}}  # type: ignore[dict-item]
        choice = {"index": 0, **told, "logprobs": None, "finish_reason": why}
        self._handler._send_json({**self._head, "object": kind, "choices": [choice], "usage": usage})

    def event(self, content: Mapping[str, Any]) -> None:
        """Send an event of a stream."""
        self._line(json.dumps(content))

    def _piece(self, text: str) -> None:
        self._begin()
        self._chunk({"delta": {"content": text}} if self._is_chat else {"text": text})

    def _begin(self) -> None:
        """Say who speaks, before what is said."""
        if self._is_chat and not self.has_begun:
            self._chunk({"delta": {"role": "assistant", "content": ""}})

    def _chunk(self, told: Mapping[str, Any], why: str | None = None) -> None:
        self.event(
            {**self._head, "object": self._kind, "choices": [{"index": 0, **told, "finish_reason": why}]}
        )

    def _line(self, data: str) -> None:
        if not self.has_begun:
            self._handler.begin(HTTPStatus.OK, "text/event-stream", {"Connection": "close"})
            self.has_begun = True
        self._handler.wfile.write(f"data: {data}\n\n".encode())
        self._handler.wfile.flush()
