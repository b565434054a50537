"""What limits a run, and what looks wrong with it: doctor's findings over the newest steps."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from outsize.doctor.examine import examine
from outsize.doctor.facts import Facts
from outsize.doctor.run_record import RunRecord
from outsize.report.history import History
from outsize.telemetry.schema import READABLE

# Rules that say what a step's time goes to, with the bottleneck that each of them names.
BOTTLENECKS: Final[Mapping[str, str]] = {
    "link-bound": "the link between host and device",
    "disk-bound": "the disk",
    "loader-bound": "the data loader",
    "optimizer-bound": "the optimizer on the host",
    "worker-bound": "other workers",
    "host-bound": "Python on the host",
    "checkpoint-bound": "checkpoints",
    "microbatch-tiny": "tiny microbatches",
    "compute-slow": "slow compute",
    "compute-bound": "compute",
}

# Share of a step from which a wait is what limits a run, whatever else is slow.
_LONG = 0.25
# The rule that tells of a wait, by its cause.
_RULES = {
    "link": "link-bound",
    "disk": "disk-bound",
    "data": "loader-bound",
    "host": "optimizer-bound",
    "workers": "worker-bound",
    "python": "host-bound",
    "checkpoint": "checkpoint-bound",
}


def verdict(
    directory: Path,
    history: History,
    plan: Mapping[str, Any],
    config: Mapping[str, Any],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the bottleneck and all findings, ready for JSON; ``bottleneck`` is None where a heartbeat is too old.

    Args:
        directory: of the run.
        history: its newest lines are judged.
        plan: ``plan.json``.
        config: ``config.yaml``.
        about: ``run.json``.
    """
    lines = tuple(line for line in history.recent if line.get("schema") in READABLE and "stall_s" in line)
    if not lines:
        return {"bottleneck": None, "findings": []}
    steps = lines[1:] or lines
    run = RunRecord(directory=str(directory), steps=steps, plan=plan, config=config, about=about)
    findings = [asdict(finding) for finding in examine(Facts(recorded=run)).findings]
    by_id = {finding["id"]: finding for finding in findings}
    first = next((by_id[rule] for rule in _ranked(run) if rule in by_id), None)
    named = None if first is None else {**first, "named": BOTTLENECKS[first["id"]]}
    return {"bottleneck": named, "findings": findings}


def _ranked(run: RunRecord) -> list[str]:
    """Return the rules that may name the bottleneck, the likeliest first.

    A wait that takes a quarter of a step is one, the longest first. Without one compute has the step to itself, and
    what slows compute down is; then shorter waits; then compute.
    """
    waits = [(_RULES[cause], share) for cause, share in run.waits().items()]
    long = [rule for rule, share in waits if share >= _LONG]
    short = [rule for rule, share in waits if share < _LONG]
    return [*long, "microbatch-tiny", "compute-slow", *short, "compute-bound"]
