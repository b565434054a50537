"""One HTML file from the data of runs: template, style and scripts lie beside, and everything is put inside.

The page loads nothing: its own policy (Content-Security-Policy) forbids every connection. What a run has written
stands in it as JSON, in which ``<`` is escaped, so that no text of a run can end the element that holds it.

A timeline as Chrome trace JSON: opens in Perfetto and in ``chrome://tracing``, one row per lane.
"""

import html
import json
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from outsize import __version__, files
from outsize.errors import explain
from outsize.planner.program.program import lane_named
from outsize.planner.simulate.simulator import Timeline
from outsize.units import without_nan

# In this order: later ones use what earlier ones define.
SCRIPTS = ("format.js", "chart.js", "timeline.js", "sections.js", "main.js")


def page_data(runs: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return what the scripts of a page read."""
    return {"version": __version__, "runs": list(runs), **more}


def make_page(data: dict[str, Any], *, live: bool = False) -> str:
    """Return the page.

    Args:
        data: see `page_data`.
        live: whether it may ask its own server for newer data.
    """
    parts = resources.files("outsize.reporting").joinpath("page")

    def read(name: str) -> str:
        return parts.joinpath(name).read_text(encoding="utf-8")

    names = " and ".join(run["name"] for run in data["runs"]) or "a run that has not begun"
    filled = {
        "connect": "'self'" if live else "'none'",
        "title": html.escape(f"{names} · outsize"),
        "style": read("style.css"),
        "script": "\n".join(read(name) for name in SCRIPTS),
        "data": to_json(data).replace("<", "\\u003c"),
    }
    before, *rest = read("page.html").split("{{")
    pieces = [before]
    for part in rest:
        name, _, text = part.partition("}}")
        pieces += [filled[name], text]
    return _sayable("".join(pieces))


def write_page(path: Path, page: str) -> int:
    """Write a page to ``path``, whole or not at all, and return its bytes.

    Raises:
        StorageError: it cannot be written; what was there before still is.
    """
    try:
        files.write_whole(path, page, shared=True)
    except OSError as error:
        raise explain(error, f"write {path}", "name another place with --output") from error
    return path.stat().st_size


def to_json(data: dict[str, Any]) -> str:
    """Return compact JSON, with null for what JSON cannot say: NaN and infinities."""
    return _sayable(json.dumps(without_nan(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False))


def _sayable(text: str) -> str:
    """Put a question mark for what UTF-8 cannot say, such as half a pair of surrogates in a name."""
    return text.encode("utf-8", "replace").decode("utf-8")


_ORDER = ("compute", "up", "down", "host", "read", "write", "commit", "store")


def to_chrome(timeline: Timeline) -> str:
    """Return ``timeline`` in the Chrome trace event format, JSON; times in microseconds from the first event.

    Each op is a complete event named by its text, in a line of its own; ``args`` tells how long its lane waited for
    other ops before it, and for which.
    """
    events = ",\n".join(json.dumps(event) for event in _trace_events(timeline))
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{events}\n]}}\n'


def _trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    rows = {lane: row for row, lane in enumerate(sorted(timeline.lanes, key=lane_order))}
    for lane, row in rows.items():
        yield {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": lane}}
        yield {"ph": "M", "pid": 0, "tid": row, "name": "thread_sort_index", "args": {"sort_index": row}}
    for event in timeline.events:
        name = str(event.op)
        args: dict[str, Any] = {"waited_us": event.waited_s * 1e6}
        if event.waited_for:
            args["waited_for"] = str(event.waited_for)
        yield {
            "ph": "X",
            "pid": 0,
            "tid": rows[event.lane],
            "name": name,
            "cat": name.split(" ", 1)[0],
            "ts": (event.start_s - timeline.start_s) * 1e6,
            "dur": (event.end_s - event.start_s) * 1e6,
            "args": args,
        }


def lane_order(lane: str) -> tuple[int, str]:
    """Order rows as work flows: compute first, then the links, the host and the disk; unknown lanes last."""
    kind = lane_named(lane).family
    return (_ORDER.index(kind) if kind in _ORDER else len(_ORDER)), lane
