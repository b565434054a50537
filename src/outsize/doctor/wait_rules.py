"""What a run waits for: one shape of rule, one row for each cause of waiting.

Shares of a step add up (`RunRecord.waits`), so several verdicts may stand side by side; each that passes its mark
is told.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from outsize.doctor.facts import Facts, LackingError, fit_of
from outsize.doctor.finding import Seen
from outsize.units import format_bytes, format_rate, format_seconds

# Share of a step that is worth a finding, and below which all waiting together is no matter (docs/troubleshooting.md).
WORTH: Final = 0.1
# A link or a disk at this part of what the probe reached is at its limit.
_AT_LIMIT = 0.85


def _all_of_it(share: float) -> float:
    return share


def _by_more_tokens(share: float) -> float:
    """Return what twice the tokens per step save of the time per token, where ``share`` of a step is waited.

    What is waited for does not grow with the tokens, compute does: with C computed and S waited a step takes C + S for
    T tokens, and max(2 C, C + S) for twice as many. So S is saved where it is at most C, and half of C + S beyond.
    """
    return min(share, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A cause of waiting.

    Attributes:
        tell: the evidence, after "30% of a step of 2.0 s".
        expected: what a step would be without it.
        gain: share of a step that the fix saves, of the share that is waited.
        needs: field of the heartbeat without which it cannot be judged.
    """

    tell: Callable[[Facts], str]
    expected: str
    gain: Callable[[float], float] = _by_more_tokens
    needs: str = ""


def _for_python(facts: Facts) -> str:
    between_s, step_s = facts.run.mean("between_s"), facts.run.mean("seconds")
    if between_s > facts.run.waits().get("python", 0.0) * step_s / 2:
        told = "of it lie between steps: progress, trackers, telemetry"
        return f"nothing is under way; {format_seconds(between_s)} {told}"
    ops = len(facts.run.plan.get("program", ()))
    many = f"; {ops} ops, {facts.run.mean('seconds') / ops * 1e3:.2g} ms each" if ops else ""
    return f"compute waits while no op is under way{many}"


def _for_the_optimizer(facts: Facts) -> str:
    return f"compute waits for the optimizer, which takes {format_seconds(facts.run.mean('update_s'))} of it"


def _for_the_disk(facts: Facts) -> str:
    run, told = facts.run, []
    next_to_device = run.plan.get("below") == "disk"  # then the lanes of the link are the disk's
    for verb, counted, lane, link in (
        ("reads", "bytes_read", "read", "up"),
        ("writes", "bytes_written", "write", "down"),
    ):
        size, busy_s = run.mean(counted), _busy_s(facts, lane) + next_to_device * _busy_s(facts, link)
        if size and busy_s:
            rate = size / busy_s
            at = f"{format_rate(rate)} while busy{_of_disk(rate, verb, facts)}"
            told.append(f"{verb} {format_bytes(int(size))} at {at}")
    return f"compute waits for the disk: {', '.join(told) or 'commits and flushes'}"


def _for_the_link(facts: Facts) -> str:
    run, told = facts.run, []
    for direction in ("up", "down"):
        busy_s = _busy_s(facts, direction)
        if busy_s > 0:
            # Matrices of Muon cross while the optimizer is busy, not the lanes of the link.
            products = [step.get("wire_bytes", {}).get(f"{direction}:products", 0) for step in run.typical]
            rate = (run.mean(f"bytes_{direction}") - sum(products) / len(products)) / busy_s
            told.append(f"{direction} {format_rate(rate)} while busy{_of_link(rate, direction, facts)}")
    return f"compute waits for the link: {', '.join(told)}"


def _for_workers(facts: Facts) -> str:
    busy_s = facts.run.lane_s("busy_s")
    told = [
        f"{lane} {format_seconds(busy_s[lane])}" for lane in sorted(busy_s) if lane.startswith("compute:")
    ]
    return f"compute waits for other workers; busy: {', '.join(told)}"


_WAITS: Final[Mapping[str, Wait]] = {
    "data": Wait(
        tell=lambda _: "it waits for its batch",
        expected="batches that are ready before they are asked for",
        gain=_all_of_it,
        needs="data_s",
    ),
    "python": Wait(
        tell=_for_python,
        expected=f"below {WORTH:.0%}: ops long enough to hide what it takes to hand them out",
    ),
    "host": Wait(tell=_for_the_optimizer, expected="an optimizer that ends within the next step's compute"),
    "disk": Wait(tell=_for_the_disk, expected="more compute for each byte read, or fewer bytes on the disk"),
    "link": Wait(tell=_for_the_link, expected="more compute for each byte that crosses"),
    "checkpoint": Wait(
        tell=lambda _: "compute waits for a checkpoint that is being written",
        expected="checkpoints that are written within the time that steps compute",
        gain=_all_of_it,
    ),
    "workers": Wait(
        tell=_for_workers, expected="workers that are busy for as long as one another, and all the time"
    ),
}


def waits_for(cause: str) -> Callable[[Facts], Seen | None]:
    """Return the rule for one of the causes of `RunRecord.waits`: `WORTH` of a step and more is waited for it.

    Where no cause has as much and all together have, the largest is told of.
    """
    wait = _WAITS[cause]

    def look(facts: Facts) -> Seen | None:
        run = facts.run
        if wait.needs and not any(wait.needs in step for step in run.steps):
            raise LackingError(f"{wait.needs} in the heartbeat: it is of an older version")
        share, total = run.waits().get(cause, 0.0), sum(run.waits().values())
        if share < WORTH and (total < WORTH or share < max(run.waits().values())):
            return None
        return Seen(
            evidence=f"{share:.0%} of a step of {format_seconds(run.mean('seconds'))} {wait.tell(facts)}",
            expected=wait.expected,
            gain_share=wait.gain(share),
        )

    return look


def _busy_s(facts: Facts, name: str) -> float:
    """Return seconds per step that the lanes of a kind worked, over all workers."""
    return sum(s for lane, s in facts.run.lane_s("busy_s").items() if lane.partition(":")[0] == name)


def _of_disk(rate: float, verb: str, facts: Facts) -> str:
    """Return what part of the probe's best rate in that direction a rate is; empty where no probe is known."""
    if facts.probed is None:
        return ""
    rates = [
        measured.median
        for disk in facts.probed.disks
        for depth in disk.depths
        for measured in [depth.read_bytes_per_s if verb == "reads" else depth.write_bytes_per_s]
        if measured.median is not None
    ]
    return f" ({_part(rate, max(rates))})" if rates else ""


def _of_link(rate: float, direction: str, facts: Facts) -> str:
    if facts.probed is None or not facts.probed.devices:
        return ""
    device = facts.probed.devices[0]
    fit = fit_of(device, "pinned", direction) or fit_of(device, "dram copy", direction)
    return f" ({_part(rate, fit.bytes_per_s)})" if fit is not None else ""


def _part(rate: float, probed: float) -> str:
    end = "at its limit" if rate >= _AT_LIMIT * probed else "not at its limit"
    return f"{rate / probed:.0%} of the {format_rate(probed)} that the probe reached: {end}"
