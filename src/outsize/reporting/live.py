"""The page of a run that goes on, served to this machine alone and read-only.

There are two addresses, the page and its data; the run is read at most once per interval, however many look on.
"""

import hashlib
import threading
import time
from pathlib import Path
from typing import Any

from outsize.errors import ConfigError
from outsize.local_server import LocalServer
from outsize.reporting.collect import collect
from outsize.reporting.history import HEARTBEAT, History
from outsize.reporting.html_page import make_page, page_data, to_json

_NOT_BEGUN = "no run has begun there yet; it is shown here once its first step has ended"


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


class LiveServer(LocalServer):
    """Serves a run: its page, and its data.

    Args:
        run: what is served.
        port: on the loopback; 0 takes a free one.
    """

    def __init__(self, run: LiveRun, port: int = 0) -> None:
        from starlette.applications import Starlette
        from starlette.responses import HTMLResponse, Response
        from starlette.routing import Route

        def page(request: Any) -> Response:  # no coroutine: it reads files, on a thread of the server's
            return HTMLResponse(make_page(run.data(), live=True))

        def data(request: Any) -> Response:
            found = run.data()
            tag = {"ETag": f'"{found["version_of_data"]}"'}
            if request.headers.get("if-none-match") == tag["ETag"]:
                return Response(status_code=304, headers=tag)
            return Response(to_json(found), headers=tag, media_type="application/json")

        super().__init__(Starlette(routes=[Route("/", page), Route("/data.json", data)]), port)
