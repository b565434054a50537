"""A server for this machine alone: one of the standard library, on threads, bounded in all that it does.

It listens on the loopback, and answers only requests that name it as such, so that a page from elsewhere in the same
browser cannot read it under another name. It takes some requests at a time, and hangs up on a client that
says nothing for `REQUEST_S`. Nothing in a request ever becomes a path.
"""

import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from outsize.errors import StorageError

LOOPBACK = "127.0.0.1"
MOST_REQUESTS = 8
REQUEST_S = 10.0
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class LoopbackServer:
    """Serves what a handler answers; a context manager.

    Args:
        handler: answers a request.
        told: what the handler knows as ``self.server.told``.
        port: on the loopback; 0 takes a free one.

    Attributes:
        url: where it is.

    Raises:
        StorageError: the port is taken.
    """

    def __init__(self, handler: "type[LoopbackHandler]", told: Any, port: int = 0) -> None:
        try:
            self._server = _Server((LOOPBACK, port), handler, told)
        except OSError as error:
            raise StorageError(
                f"cannot listen on port {port}: {error.strerror}; choose another --port"
            ) from error
        self.url = f"http://{LOOPBACK}:{self._server.server_port}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="loopback", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: "type[LoopbackHandler]", told: Any) -> None:
        super().__init__(address, handler)
        self.told = told
        self.room = threading.BoundedSemaphore(MOST_REQUESTS)
        self.names = {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is nobody's business."""


class LoopbackHandler(BaseHTTPRequestHandler):
    """Answers requests; `answer` and `answer_post` say how."""

    server: _Server
    timeout = REQUEST_S
    server_version, sys_version = "outsize", ""

    def answer(self) -> None:
        """Answer a GET or HEAD."""
        self.send(HTTPStatus.NOT_FOUND, "text/plain", "there is nothing of that name")

    def answer_post(self) -> None:
        """Answer a POST."""
        self.send(HTTPStatus.NOT_IMPLEMENTED, "text/plain", "this is to be read")

    def do_GET(self) -> None:
        """Answer, unless it is for another name or there are too many."""
        self._guarded(self.answer)

    do_HEAD = do_GET  # noqa: N815 - as above

    def do_POST(self) -> None:
        """Likewise."""
        self._guarded(self.answer_post)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not news."""

    def send(self, status: HTTPStatus, kind: str, text: str, more: Mapping[str, str] | None = None) -> None:
        """Send an answer as a whole."""
        content = text.encode("utf-8")
        self.begin(status, kind, {**(more or {}), "Content-Length": str(len(content))})
        if self.command != "HEAD":
            self.wfile.write(content)

    def begin(self, status: HTTPStatus, kind: str, more: Mapping[str, str]) -> None:
        """Send what comes before an answer."""
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8", **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def _guarded(self, answer: Any) -> None:
        if self.headers.get("Host") not in self.server.names:
            self.send(HTTPStatus.FORBIDDEN, "text/plain", "this is for the machine that it runs on")
            return
        if not self.server.room.acquire(blocking=False):
            self.send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", "too many at a time; try again")
            return
        try:
            answer()
        finally:
            self.server.room.release()
