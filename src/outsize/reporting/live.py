"""The page of a run that goes on, served to this machine alone: a standard library server on threads, read-only.

There are two addresses, the page and its data; nothing in a request ever becomes a path. It listens on the loopback,
and answers only requests that name it as such, so that a page from elsewhere in the same browser cannot read it under
another name. What it does is bounded: some requests at a time, a time limit for each, and the run is read at most
once per interval, however many look on.
"""

import hashlib
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from outsize.errors import ConfigError, StorageError
from outsize.reporting.collect import collect
from outsize.reporting.history import HEARTBEAT, History
from outsize.reporting.html_page import make_page, page_data, to_json

LOOPBACK = "127.0.0.1"
MOST_REQUESTS = 8
REQUEST_S = 10.0
_NOT_BEGUN = "no run has begun there yet; it is shown here once its first step has ended"
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class LiveRun:
    """The data of a run, read again when it is asked for and older than the interval.

    Args:
        directory: of the run.
        every_s: seconds between two reads.
    """

    def __init__(self, directory: Path, every_s: float) -> None:
        self._directory = directory
        self.every_s = every_s
        self._history = History(directory)
        self._lock = threading.Lock()
        self._read_s = float("-inf")
        self._data: dict[str, Any] = {}

    def data(self) -> dict[str, Any]:
        """Return what the page shows; ``version_of_data`` changes with it."""
        with self._lock:
            if time.monotonic() - self._read_s >= self.every_s:
                self._data = self._read()
                self._read_s = time.monotonic()
            return self._data

    def _read(self) -> dict[str, Any]:
        """A run that has not begun, or is being written at this moment, is no reason to stop looking."""
        try:
            if self._history.was_replaced():
                self._history = History(self._directory)
            self._history.advance()
            found = page_data([collect(self._directory, self._history)], refresh_s=self.every_s)
        except ConfigError as error:
            waiting = (
                str(error) if (self._directory / HEARTBEAT).exists() else f"{self._directory}: {_NOT_BEGUN}"
            )
            found = page_data([], refresh_s=self.every_s, waiting=waiting)
        digest = hashlib.sha256(to_json(found).encode()).hexdigest()[:16]
        return {**found, "version_of_data": digest}


class LiveServer:
    """Serves a run; a context manager.

    Args:
        run: what is served.
        port: on the loopback; 0 takes a free one.

    Attributes:
        url: where it is.

    Raises:
        StorageError: the port is taken.
    """

    def __init__(self, run: LiveRun, port: int = 0) -> None:
        try:
            self._server = _Server((LOOPBACK, port), run)
        except OSError as error:
            raise StorageError(
                f"cannot listen on port {port}: {error.strerror}; choose another --port"
            ) from error
        self.url = f"http://{LOOPBACK}:{self._server.server_port}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="watch", daemon=True
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

    def __init__(self, address: tuple[str, int], run: LiveRun) -> None:
        super().__init__(address, _Handler)
        self.run = run
        self.room = threading.BoundedSemaphore(MOST_REQUESTS)
        self.names = {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that hangs up is nobody's business."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_S
    server_version, sys_version = "outsize", ""

    def do_GET(self) -> None:
        if not self.server.room.acquire(blocking=False):
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", "too many at a time; try again")
            return
        try:
            self._answer()
        finally:
            self.server.room.release()

    do_HEAD = do_GET  # noqa: N815 - as above

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not news."""

    def _answer(self) -> None:
        if self.headers.get("Host") not in self.server.names:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "this page is for the machine that it runs on")
        elif self.path == "/":
            page = make_page(self.server.run.data(), live=True)
            self._send(HTTPStatus.OK, "text/html", page)
        elif self.path == "/data.json":
            data = self.server.run.data()
            tag = {"ETag": f'"{data["version_of_data"]}"'}
            if self.headers.get("If-None-Match") == tag["ETag"]:
                self._send(HTTPStatus.NOT_MODIFIED, "application/json", "", tag)
            else:
                self._send(HTTPStatus.OK, "application/json", to_json(data), tag)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "there are / and /data.json")

    def _send(self, status: HTTPStatus, kind: str, text: str, more: Mapping[str, str] | None = None) -> None:
        content = text.encode("utf-8")
        self.send_response(status)
        for name, value in {**_HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
