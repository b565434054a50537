"""What a run directory tells: the typical step of its heartbeat, its plan and its configuration.

A stall is booked on the lane that the compute lane waited for last, and that lane may have been waiting itself: with a
slow loader the first forward waits for a load that waits for the step to begin. So `RunRecord.waits` believes a lane
for no longer than it was busy in that step:

1. a wait for a lane counts for that lane up to the time that it was busy;
2. of what is left, the wait for the batch (``data_s``) is the loader's;
3. the rest that no lane accounts for goes to the lanes that were busy for longer than they were waited for, the busiest
   first, for the lane that was waited for waited for one of them;
4. what is left then, and what was booked as ``dispatch``, is Python's: no op was under way.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from outsize.errors import ConfigError

_SCHEMAS = (2, 3)
# Steps longer than this many medians were interrupted by something else, a checkpoint for example.
_TYPICAL = 2.0
_COMPUTE = "compute:w0"
_KINDS = {"up": "link", "down": "link", "host": "host", "read": "disk", "write": "disk"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run as it was recorded.

    Attributes:
        directory: where.
        steps: lines of the heartbeat, the first left out where there are more: it warms up.
        plan: ``plan.json``; empty where there is none.
        config: ``config.yaml``; empty where there is none.
    """

    directory: str
    steps: tuple[Mapping[str, Any], ...]
    plan: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def typical(self) -> tuple[Mapping[str, Any], ...]:
        """The steps that nothing interrupted."""
        limit = _TYPICAL * statistics.median(step["seconds"] for step in self.steps)
        return tuple(step for step in self.steps if step["seconds"] <= limit)

    def mean(self, name: str) -> float:
        """Return the mean of a field over the typical steps; 0 where the heartbeat is too old to have it."""
        return statistics.fmean(step.get(name) or 0.0 for step in self.typical)

    def lane_s(self, field: str) -> dict[str, float]:
        """Return mean seconds per typical step by lane, of ``busy_s`` or ``stall_s``."""
        totals: defaultdict[str, float] = defaultdict(float)
        for step in self.typical:
            for lane, seconds in step[field].items():
                totals[lane] += seconds
        return {lane: seconds / len(self.typical) for lane, seconds in totals.items()}

    def kind_of(self, lane: str) -> str:
        """Return what a lane spends its time on; with a disk below the device, up and down are the disk's."""
        kind = _KINDS.get(lane.partition(":")[0], "python")
        return "disk" if kind == "link" and self.plan.get("below") == "disk" else kind

    def waits(self) -> dict[str, float]:
        """Return shares of a step, 0 to 1, in which the compute lane waited, by cause, the longest first.

        Causes are ``link``, ``disk``, ``host`` (the optimizer), ``data`` and ``python``.
        """
        busy_s, stall_s, data_s = self.lane_s("busy_s"), self.lane_s("stall_s"), self.mean("data_s")
        causes: defaultdict[str, float] = defaultdict(float)
        unused, left_s, idle_s = dict(busy_s), 0.0, 0.0
        for lane, seconds in stall_s.items():
            if lane not in busy_s:
                idle_s += seconds
                continue
            believed_s = min(seconds, busy_s[lane])
            causes[self.kind_of(lane)] += believed_s
            unused[lane] -= believed_s
            left_s += seconds - believed_s
        # A wait for the batch that the timeline does not hold, since no lane had anything to do, is one all the same.
        causes["data"] = data_s
        over_s = max(0.0, data_s - left_s)
        left_s, idle_s = max(0.0, left_s - data_s), max(0.0, idle_s - over_s)
        for lane in sorted(unused, key=lambda name: -unused[name]):
            if self.kind_of(lane) != "python":
                taken_s = min(left_s, unused[lane])
                causes[self.kind_of(lane)] += taken_s
                left_s -= taken_s
        causes["python"] += left_s + idle_s
        seconds = self.mean("seconds")
        shares = {cause: min(1.0, share / seconds) for cause, share in causes.items()}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    @property
    def compute_share(self) -> float:
        """Share of a step in which the compute lane worked."""
        return self.lane_s("busy_s").get(_COMPUTE, 0.0) / self.mean("seconds")


def read_run(directory: Path) -> RunRecord:
    """Return the run of a directory; it may still be going on.

    Raises:
        ConfigError: there is no run, none of its steps has ended, or it is of a version that does not tell enough.
    """
    heartbeat = directory / "heartbeat.jsonl"
    steps = _steps(heartbeat)
    return RunRecord(
        directory=str(directory),
        steps=steps[1:] or steps,
        plan=_mapping(directory / "plan.json"),
        config=_mapping(directory / "config.yaml"),
    )


def _steps(heartbeat: Path) -> tuple[Mapping[str, Any], ...]:
    try:
        lines = heartbeat.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {heartbeat}: {error}; name the directory of a run") from error
    steps = []
    for line_number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            continue  # being written
        try:
            step = json.loads(line)
            known = step["schema"] in _SCHEMAS and step["seconds"] > 0
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{heartbeat}, line {line_number}: not a step of a run") from error
        if not known or not {"busy_s", "stall_s"} <= step.keys():
            raise ConfigError(
                f"{heartbeat}, line {line_number}: schema {step['schema']} does not tell the time of each lane; "
                "train some steps with this version of outsize, into another train.run_dir"
            )
        steps.append(step)
    if not steps:
        raise ConfigError(f"{heartbeat}: no step has ended yet; ask again later")
    return tuple(steps)


def _mapping(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        # JSON is YAML too, but its own reader is faster and stricter.
        read = json.loads if path.suffix == ".json" else yaml.safe_load
        found = read(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: not what a run writes")
    return found
