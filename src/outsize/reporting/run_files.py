"""The other files of a run directory, read as far as they are there; a report is made of whatever a run has left."""

from pathlib import Path

from outsize.errors import ConfigError
from outsize.planner.program.program import op_or_text
from outsize.planner.simulate.timeline import Event, Timeline
from outsize.telemetry.run_reading import read_mapping

# Ops of a timeline that a page holds; a step of more loses its shortest ones, and says so.
MOST_OPS = 30_000


def read_timeline(path: Path) -> Timeline | None:
    """Return the timeline that `chrome.to_chrome` wrote; None where there is none, in seconds from its first event.

    Raises:
        ConfigError: it is not a trace.
    """
    trace = read_mapping(path)
    if not trace:
        return None
    try:
        events = trace["traceEvents"]
        names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
        found = tuple(
            Event(
                lane=names[e["tid"]],
                op=op_or_text(e["name"]),
                start_s=e["ts"] / 1e6,
                end_s=(e["ts"] + e["dur"]) / 1e6,
                waited_s=e["args"]["waited_us"] / 1e6,
                waited_for=op_or_text(text) if (text := e["args"].get("waited_for")) else None,
            )
            for e in events
            if e["ph"] == "X"
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{path}: not a timeline that outsize wrote; without the file the rest is told"
        ) from error
    return Timeline(found)
