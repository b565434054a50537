"""A timeline as Chrome trace JSON: opens in Perfetto and in ``chrome://tracing``, one row per lane."""

import json
from collections.abc import Iterator
from typing import Any

from outsize.planner.program.lanes import lane_named
from outsize.planner.simulate.timeline import Timeline

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
