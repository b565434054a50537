"""A web application served to this machine alone, by uvicorn: guarded against other pages and against slow clients.

It listens on the loopback, and answers only requests that name it as such and come from no page of another site, so
that a page in the same browser cannot read it under another name. A client has `REQUEST_S` to say what it wants,
head and body together, and as long to take each part of an answer.
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Self
from urllib.parse import urlsplit

from outsize.errors import ConfigError, StorageError

try:
    import uvicorn
    from starlette.datastructures import Headers, MutableHeaders
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise ConfigError(
        f"a server needs the packages starlette and uvicorn ({error}): pip install 'outsize[serve]'"
    ) from error

_log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
REQUEST_S = 10.0
MOST_REQUESTS = 256  # at a time, those that wait for their answer among them
_NAMES = (LOOPBACK, "localhost")
_END_S = 5  # that answers under way have when the server ends
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def refusal(
    status: int, message: str, headers: Mapping[str, str] | None = None, code: str | None = None
) -> JSONResponse:
    """Return an error in the form that clients of OpenAI's interface read."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    content = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": content}, status, headers)


async def read_body(request: Request, most_bytes: int) -> bytes | JSONResponse:
    """Return the body of a request, or why it is refused: too long, too slow, or compressed.

    One that is too long is read to its end all the same, so that a client that only then listens gets the answer.
    """
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        return refusal(415, f"Content-Encoding {coding} is not supported; send the request as it is")
    content, num_bytes = bytearray(), 0
    try:
        async with asyncio.timeout(REQUEST_S):
            async for piece in request.stream():
                num_bytes += len(piece)
                if num_bytes <= most_bytes:
                    content += piece
    except TimeoutError:
        message = f"the request was not whole after {REQUEST_S:g} s; send it faster"
        return refusal(408, message, {"Connection": "close"})
    if num_bytes > most_bytes:
        message = f"the request is longer than {most_bytes} bytes; send less"
        return refusal(413, message, {"Connection": "close"})
    return bytes(content)


class LocalServer:
    """Serves an application on the loopback; a context manager.

    Args:
        app: as ASGI has it.
        port: on the loopback; 0 takes a free one.

    Attributes:
        url: where it is.

    Raises:
        StorageError: the port is taken.
    """

    def __init__(self, app: App, port: int = 0) -> None:
        try:
            self._socket = socket.create_server((LOOPBACK, port), backlog=1024)
        except OSError as error:
            raise StorageError(
                f"cannot listen on port {port}: {error.strerror}; choose another --port"
            ) from error
        self.url = f"http://{LOOPBACK}:{self._socket.getsockname()[1]}/"
        config = uvicorn.Config(
            _Guard(app),
            http=_Protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_END_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="local-server", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


class _Guard:
    """Refuses what comes under another name, from another site, or is too much; hangs up on who takes no answer."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            async with asyncio.timeout(REQUEST_S):
                await send(message)

        self._num_requests += 1
        try:
            await (self._refusal(Headers(scope=scope)) or self._app)(scope, receive, send_in_time)
        except* TimeoutError:
            pass  # uvicorn closes a connection whose answer is not whole
        except* Exception:
            _log.exception("a request failed")
        finally:
            self._num_requests -= 1

    def _refusal(self, headers: Headers) -> JSONResponse | None:
        if _name(f"//{headers.get('host', '')}") not in _NAMES:
            return refusal(403, "this is for the machine that it runs on")
        if "origin" in headers and _name(headers["origin"]) not in _NAMES:
            return refusal(403, "this is not for pages of other sites")
        if self._num_requests > MOST_REQUESTS:
            return refusal(503, "too many requests at a time; try again", {"Retry-After": "1"})
        return None


def _name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


class _Protocol(H11Protocol):
    """A connection that ends where no request has come for a while, however slowly its head trickles in."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look_again = self.loop.call_later(REQUEST_S, self._look, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._look_again.cancel()
        super().connection_lost(exc)

    def _look(self, former: object) -> None:
        cycle = self.cycle
        if cycle is former and (cycle is None or cycle.response_complete):
            self.transport.close()
        else:
            self._look_again = self.loop.call_later(REQUEST_S, self._look, cycle)
