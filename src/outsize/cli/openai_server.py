"""Requests in the form of OpenAI's HTTP interface, answered by a model that is streamed.

There are ``/v1/models``, ``/v1/chat/completions`` and ``/v1/completions``: an application of starlette whose answers
are the `openai` package's types. One request is answered at a time, on a thread of its own; the next ones wait in a
queue. A client that goes ends its request at the next token, also while it waits.
"""

import asyncio
import contextlib
import logging
import math
import random
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from outsize.cli.openai_requests import Answer, ChatRequest, PromptRequest, TextRequest, read_request
from outsize.errors import ConfigError, DataError, InfeasiblePlanError, OutsizeError
from outsize.local_server import read_body, refusal

try:
    from openai.types import Model
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError as error:
    raise ConfigError(
        f"outsize serve needs the package starlette ({error}): pip install 'outsize[serve]'"
    ) from error

if TYPE_CHECKING:
    from outsize.cli.text_writer import TextWriter
    from outsize.wrapped.writing.detokenizer import Token
    from outsize.wrapped.writing.text import Written

_log = logging.getLogger(__name__)

MOST_BYTES = 16 * 2**20  # of a request
CHAT, PLAIN, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
_SIGN_OF_LIFE_S = (
    10.0  # a stream that is silent for so long sends a comment, so that nothing between gives it up
)


class _GoneError(Exception):
    """The client has gone, or the server ends."""


class _Job:
    """A request on its way: what is written goes from the model's thread to the client's coroutine."""

    def __init__(self, request: TextRequest, answer: Answer) -> None:
        self.request, self.answer = request, answer
        self.is_over = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Token | list[Written] | Exception] = asyncio.Queue()

    def put(self, event: "Token | list[Written] | Exception") -> None:
        """Hand an event over; from any thread, and to nobody where the server has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def get(self) -> "Token | list[Written]":
        """Return the next event: a token, or at last the texts.

        Raises:
            OutsizeError: why there is none.
        """
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event


class Completions:
    """A model that answers requests, one at a time.

    Args:
        writer: the model.
        name: what it is called.
        max_new_tokens: where a request does not say.
        most_waiting: requests beside the one that is answered; further ones are refused.
    """

    def __init__(self, writer: "TextWriter", name: str, max_new_tokens: int, most_waiting: int = 64) -> None:
        self.name = name
        self.max_new_tokens = max_new_tokens
        self._writer = writer
        self._most_waiting = most_waiting
        self._thread = ThreadPoolExecutor(1, "completions")
        self.jobs: list[_Job] = []  # that are answered or wait
        self._last_s = 1.0  # that the last answer took
        self._ends = threading.Event()

    @contextlib.asynccontextmanager
    async def running(self, request: TextRequest) -> AsyncIterator[_Job | None]:
        """Have a request answered while the context lasts; None where too many wait."""
        if len(self.jobs) > self._most_waiting:
            yield None
            return
        prompts = request.prompts
        num_choices = len(prompts) * (request.n or 1)
        job = _Job(request, Answer(request, num_choices, self.name, self._writer.token_text))
        self.jobs.append(job)
        future = self._thread.submit(self._run, job, prompts)
        future.add_done_callback(lambda _: self.jobs.remove(job))
        try:
            yield job
        finally:
            job.is_over.set()
            future.cancel()

    @property
    def retry_after_s(self) -> int:
        """Seconds until there may be room in the queue."""
        return math.ceil(min(max(self._last_s, 1.0), 3600.0))

    def end(self) -> None:
        """Write no further token; returns when nothing is being written."""
        self._ends.set()
        self._thread.shutdown(cancel_futures=True)

    def _run(self, job: _Job, prompts: Sequence[Any]) -> None:
        began = time.monotonic()
        try:
            job.put(self._write(job, prompts))
        except Exception as error:
            job.put(error)
        self._last_s = time.monotonic() - began

    def _write(self, job: _Job, prompts: Sequence[Any]) -> "list[Written]":
        import torch

        def go_on(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            self._check(job)
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        self._check(job)
        request, n = job.request, job.request.n or 1
        counts = [self._writer.num_tokens(prompt) for prompt in prompts]
        job.answer.prompt_tokens = sum(counts)
        most = request.most_tokens
        if most is None:
            positions = self._writer.num_positions
            most = self.max_new_tokens
            if positions is not None:
                most = max(1, min(most, positions - max(counts, default=0)))
        prompts = [prompt for prompt in prompts for _ in range(n)]
        offers = (request.offered, request.most_calls) if isinstance(request, ChatRequest) else ()
        job.answer.readers = [self._writer.reply_reader(prompt, *offers) for prompt in prompts]
        written, _ = self._writer.write(
            prompts,
            lambda _: None,
            max_new_tokens=most,
            batch_size=max(job.answer.num_choices, 1),
            seed=random.getrandbits(62) if request.seed is None else request.seed,
            shows_special=any(reader.reads_special for reader in job.answer.readers),
            stop=request.stop,
            num_likeliest=request.num_likeliest,
            on_token=job.put,
            stopping_criteria=[go_on],
            **request.choice,
        )
        return written

    def _check(self, job: _Job) -> None:
        if self._ends.is_set():
            raise _GoneError("the server ends")
        if job.is_over.is_set():
            raise _GoneError("the client has gone")


def make_app(completions: Completions) -> Starlette:
    """Return the application that answers for a model."""
    model = Model(id=completions.name, object="model", created=0, owned_by="outsize")

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model.model_dump()]})

    async def one_model(request: Request) -> Response:
        if request.path_params["name"].rstrip("/") != model.id:
            return refusal(404, f"there is nothing at {request.url.path}; {MODELS} names the model")
        return JSONResponse(model.model_dump())

    async def complete(request: Request) -> Response:
        # A page from elsewhere may post forms and plain text to this machine, and nothing else unasked.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return refusal(415, "Content-Type has to be application/json")
        body = await read_body(request, MOST_BYTES)
        if isinstance(body, Response):
            return body
        try:
            text_request = read_request(body, ChatRequest if request.url.path == CHAT else PromptRequest)
            return await _answer(completions, text_request, request)
        except Exception as error:
            return _failure(error)

    return Starlette(
        routes=[
            Route(MODELS, models),
            Route(MODELS + "/{name:path}", one_model),
            Route(CHAT, complete, methods=["POST"]),
            Route(PLAIN, complete, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _no_such_place},
    )


async def _no_such_place(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    there = f"there is nothing at {where}; there are {CHAT}, {PLAIN} and {MODELS}"
    return refusal(error.status_code, there, error.headers)


async def _answer(completions: Completions, text_request: TextRequest, request: Request) -> Response:
    """Return an answer as a whole, or a stream that has begun; of a client that goes nothing is left to do."""
    async with contextlib.AsyncExitStack() as stack:
        job = await stack.enter_async_context(completions.running(text_request))
        if job is None:
            wait = {"Retry-After": str(completions.retry_after_s)}
            return refusal(
                429, "too many requests wait already; try again later", wait, "rate_limit_exceeded"
            )
        gone = asyncio.ensure_future(request.receive())  # the body is read: all that comes is the end
        first = asyncio.ensure_future(_first(job) if text_request.stream else _whole(job))
        for task in (gone, first):
            stack.callback(task.cancel)
        await asyncio.wait({gone, first}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            return Response(status_code=499)  # to nobody
        if not text_request.stream:
            return JSONResponse(job.answer.whole(*first.result()))
        events = _events(job, first.result(), stack.pop_all())
        return StreamingResponse(events, media_type="text/event-stream")
    raise AssertionError("a context that swallows")


async def _first(job: _Job) -> Any:
    """Return the first event of a stream, or None where it takes its time; errors that come before have a status."""
    try:
        async with asyncio.timeout(_SIGN_OF_LIFE_S):
            return await job.get()
    except TimeoutError:
        return None


async def _whole(job: _Job) -> Any:
    tokens: list[Token] = []
    while not isinstance(event := await job.get(), list):
        tokens.append(event)
    return tokens, event


def _failure(error: Exception) -> JSONResponse:
    if isinstance(error, DataError | ConfigError | InfeasiblePlanError):  # another request may be answered
        return refusal(400, str(error))
    if isinstance(error, _GoneError):
        return refusal(503, str(error), {"Connection": "close"})
    if not isinstance(error, OutsizeError):
        _log.error("a request failed", exc_info=error)
    return refusal(500, f"{type(error).__name__}: {error}")


async def _events(job: _Job, event: Any, stack: contextlib.AsyncExitStack) -> AsyncIterator[str]:
    """Yield the events of a stream, of which the first is there."""
    async with stack:
        for chunk in job.answer.beginning():
            yield chunk
        try:
            while not isinstance(event, list):
                if event is None:
                    yield ": the model is at work\n\n"
                else:
                    for chunk in job.answer.pieces(event):
                        yield chunk
                event = await _first(job)
            for chunk in job.answer.ending(event):
                yield chunk
        except Exception as error:
            yield f"data: {bytes(_failure(error).body).decode()}\n\n"
