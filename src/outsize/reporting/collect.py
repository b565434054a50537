"""Collect the data that a page shows of a run, and serve that page while the run goes on.

There are two addresses, the page and its data; the run is read at most once per interval, however many look on.
"""

import hashlib
import math
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outsize.doctor.examine import examine
from outsize.doctor.run_record import Facts, RunRecord, record_of
from outsize.errors import ConfigError
from outsize.local_server import LocalServer
from outsize.planner.simulate.simulator import Timeline, round_starts, unit_latencies
from outsize.reporting.history import (
    COMPUTE,
    HEARTBEAT,
    MOST_BUCKETS,
    MOST_OPS,
    History,
    curves,
    memory,
    rates,
    read_timeline,
    rounded,
    shares,
)
from outsize.reporting.html_page import lane_order, make_page, page_data, to_json
from outsize.telemetry.run_reading import as_a_run, read_mapping

# Steps longer than so many medians were interrupted by something else.
_TYPICAL = 2.0
# A run whose last step ended longer ago than this many of its steps, and than this many seconds, is not going on.
_SILENT_STEPS, _SILENT_S = 10.0, 60.0


def collect(directory: Path, history: History | None = None) -> dict[str, Any]:
    """Return what there is to say of the run in ``directory``, ready for JSON.

    Args:
        directory: of the run, which may still be going on.
        history: of its heartbeat, read already; None reads it.

    Raises:
        ConfigError: there is no run, none of its steps has ended, or its files are not what a run writes.
    """
    with as_a_run(directory):
        if history is None:
            history = History(directory)
            history.advance()
        if not history.steps:
            raise ConfigError(f"{directory / HEARTBEAT}: no step has ended yet; ask again later")
        return _collected(directory, history)


def _collected(directory: Path, history: History) -> dict[str, Any]:
    about, plan = read_mapping(directory / "run.json"), read_mapping(directory / "plan.json")
    config = read_mapping(directory / "config.yaml")
    recorded = _recorded(directory, history)
    return {
        "name": directory.resolve().name,
        "status": _status(history, about, config),
        "about": {name: value for name, value in about.items() if name != "machine"},
        "machine": _facts(about.get("machine", {})),
        "config": config,
        "figures": _figures(history),
        "curves": curves(history),
        "rates": rates(history),
        "memory": memory(history, plan),
        "shares": shares(history),
        "waits": [] if recorded is None else _waits(recorded),
        "gpus": history.recent[-1].get("gpus", []) if history.recent else [],
        "fallbacks": _fallbacks(history),
        "verdict": {"bottleneck": None, "findings": []}
        if recorded is None
        else asdict(examine(Facts(recorded=recorded))),
        "prediction": read_mapping(directory / "prediction.json"),
        "timeline": _timeline(read_timeline(directory / "timeline.json"), about, plan),
        "downsampled": len(history.steps) > 2 * MOST_BUCKETS,
    }


def _fallbacks(history: History) -> dict[str, int]:
    """What did not go as asked, by the newest line, and lines of the heartbeat that cannot be read."""
    counts = dict(history.recent[-1].get("fallbacks", {})) if history.recent else {}
    return {**counts, "broken_lines": history.num_broken} if history.num_broken else counts


def _recorded(directory: Path, history: History) -> RunRecord | None:
    """Return the newest steps as doctor reads them; None where the heartbeat is of a version that tells too little."""
    try:
        return record_of(directory, history.recent)
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):  # what a disk does not read is there all the same
            raise
        return None


def _status(history: History, about: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    done, last = history.steps[-1], history.last("time")
    total = config.get("train", {}).get("steps") or about.get("steps")
    silent_s = time.time() - last if last else math.inf
    recent = [s for s in history.columns["seconds"][-20:] if s]
    going = silent_s < max(_SILENT_S, _SILENT_STEPS * (statistics.median(recent) if recent else 0.0))
    state = "finished" if total and done >= total else "running" if going else "stopped"
    return {"done": done, "total": total, "state": state, "started": about.get("started"), "last": last}


def _figures(history: History) -> dict[str, float | None]:
    """The figures at the top: of typical steps where it is a rate, the newest where it is a state."""
    losses = [loss for loss in history.columns["loss"] if loss is not None]
    seconds = [s for s in history.columns["seconds"] if s is not None][1:] or history.columns["seconds"]
    typical = _typical(history)
    mfu = [history.columns["mfu"][i] for i in typical]
    compute = [history.shares[i][COMPUTE] for i in typical if history.shares[i]]
    numbers = [value for value in mfu if value is not None]
    return {
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "least_loss": min(losses, default=None),
        "typical_steps": len(typical),
        "tokens_per_step": _total(history, "tokens", typical) / len(typical),
        "step_s": statistics.median(s for s in seconds if s is not None),
        "tokens_per_s": _total(history, "tokens", typical) / _total(history, "seconds", typical),
        "mfu": statistics.fmean(numbers) if numbers else None,
        "compute_share": statistics.fmean(compute) if compute else None,
        "peak_rss_bytes": history.last("peak_rss_bytes"),
        "skipped_steps": history.last("skipped_steps") or 0,
        "tokens": sum(value or 0 for value in history.columns["tokens"]),
        "total_s": sum(value or 0 for value in history.columns["seconds"]),
    }


def _typical(history: History) -> list[int]:
    """Return positions of the steps that nothing interrupted, without the first."""
    seconds = [value or 0.0 for value in history.columns["seconds"]]
    limit = _TYPICAL * statistics.median(seconds[1:] or seconds)
    indices = [
        index for index, value in enumerate(seconds) if value <= limit and (index or len(seconds) == 1)
    ]
    return indices or list(range(len(seconds)))


def _total(history: History, name: str, positions: Sequence[int]) -> float:
    return sum(history.columns[name][position] or 0.0 for position in positions)


def _waits(recorded: RunRecord) -> list[dict[str, Any]]:
    """Mean seconds per typical step of the last lines, by lane, cause and owner, the longest first."""
    lines = [line for line in recorded.typical if line.get("waits_s")]
    if not lines:
        return []
    totals: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for line in lines:
        for lane, causes in line["waits_s"].items():
            for cause, owners in causes.items():
                for owner, seconds in owners.items():
                    totals[lane, cause, owner] += seconds / len(lines)
    step_s = statistics.fmean(line["seconds"] for line in lines)
    ordered = sorted(totals.items(), key=lambda item: -item[1])
    return [
        {
            "lane": lane,
            "cause": cause,
            "owner": owner,
            "seconds": rounded(s),
            "share": rounded(s / step_s),
        }
        for (lane, cause, owner), s in ordered
    ]


def _timeline(
    timeline: Timeline | None, about: Mapping[str, Any], plan: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Lanes and ops, compact: ``[lane, start us, length us, text, waited us, waited for]``; and where rounds begin."""
    if timeline is None or not timeline.events:
        return None
    events = sorted(timeline.events, key=lambda event: event.start_s - event.end_s)[:MOST_OPS]
    events.sort(key=lambda event: event.start_s)
    lanes = sorted(timeline.lanes, key=lane_order)
    units = [unit["name"] for unit in about.get("units", [])]
    texts: dict[str, int] = {}
    for op in (op for event in events for op in (event.op, event.waited_for)):
        text = str(op or "")
        texts.setdefault(text, len(texts))
    rows = {lane: row for row, lane in enumerate(lanes)}
    size = plan.get("round_microbatches")
    starts = round_starts(timeline.events, size) if size else []
    return {
        "lanes": lanes,
        "busy": [rounded(timeline.busy_s(lane)) for lane in lanes],
        "texts": list(texts),
        "ops": [
            [
                rows[e.lane],
                round((e.start_s - timeline.start_s) * 1e6, 1),
                round((e.end_s - e.start_s) * 1e6, 1),
                texts[str(e.op)],
                round(e.waited_s * 1e6, 1),
                texts[str(e.waited_for or "")],
            ]
            for e in events
        ],
        "rounds": [round((start_s - timeline.start_s) * 1e6, 1) for start_s in starts],
        "span_s": timeline.span_s,
        "left_out": len(timeline.events) - len(events),
        "units": units,
        "latencies": [
            {
                "unit": units[unit] if unit < len(units) else f"unit {unit}",
                **{name: rounded(seconds) for name, seconds in row.items()},
            }
            for unit, row in unit_latencies(timeline.events).items()
        ],
    }


def _facts(inventory: Mapping[str, Any]) -> dict[str, Any]:
    """The machine for people: facts that have a value, without where they were read."""
    facts: dict[str, Any] = {}
    for name, entry in inventory.items():
        if isinstance(entry, Mapping) and {"value", "status", "source"} <= entry.keys():
            if entry["value"] not in (None, ""):
                facts[name] = entry["value"]
        elif isinstance(entry, Mapping):
            below = _facts(entry)
            if below:
                facts[name] = below
        elif isinstance(entry, list | tuple) and entry:
            rows = [_facts(each) if isinstance(each, Mapping) else each for each in entry]
            facts[name] = {str(index): row for index, row in enumerate(rows)}
        elif entry not in (None, "", [], ()):
            facts[name] = entry
    return facts


_NOT_BEGUN = "no run has begun there yet; it is shown here once its first step has ended"


class LiveRun:
    """The data of a run, read again when it is asked for and older than the interval."""

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
            page = page_data([collect(self._directory, self._history)], refresh_s=self.every_s)
        except ConfigError as error:
            waiting = (
                str(error) if (self._directory / HEARTBEAT).exists() else f"{self._directory}: {_NOT_BEGUN}"
            )
            page = page_data([], refresh_s=self.every_s, waiting=waiting)
        digest = hashlib.sha256(to_json(page).encode()).hexdigest()[:16]
        return {**page, "version_of_data": digest}


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
            page = run.data()
            tag = {"ETag": f'"{page["version_of_data"]}"'}
            if request.headers.get("if-none-match") == tag["ETag"]:
                return Response(status_code=304, headers=tag)
            return Response(to_json(page), headers=tag, media_type="application/json")

        super().__init__(Starlette(routes=[Route("/", page), Route("/data.json", data)]), port)
