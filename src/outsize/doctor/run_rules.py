"""Rules on runs: time they wait, memory they take, and how several compare.

What a run does beside waiting: computes, varies, and takes memory; and how several runs compare.

What a run waits for: one shape of rule, one row for each cause of waiting.

Shares of a step add up (`RunRecord.waits`), so several verdicts may stand side by side; each that passes its mark
is told.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from outsize.doctor.finding import Seen, is_wrapped, num_ranks
from outsize.doctor.run_record import Facts, LackingError, fit_of, is_on_cpu, planned_host_bytes
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
        text = "of it lie between steps: progress, trackers, telemetry"
        return f"nothing is under way; {format_seconds(between_s)} {text}"
    ops = len(facts.run.plan.get("program", ()))
    many = f"; {ops} ops, {facts.run.mean('seconds') / ops * 1e3:.2g} ms each" if ops else ""
    return f"compute waits while no op is under way{many}"


def _for_the_optimizer(facts: Facts) -> str:
    return f"compute waits for the optimizer, which takes {format_seconds(facts.run.mean('update_s'))} of it"


def _for_the_disk(facts: Facts) -> str:
    run, parts = facts.run, []
    next_to_device = run.plan.get("below") == "disk"  # then the lanes of the link are the disk's
    for verb, counted, lane, link in (
        ("reads", "bytes_read", "read", "up"),
        ("writes", "bytes_written", "write", "down"),
    ):
        size, busy_s = run.mean(counted), _busy_s(facts, lane) + next_to_device * _busy_s(facts, link)
        if size and busy_s:
            rate = size / busy_s
            at = f"{format_rate(rate)} while busy{_of_disk(rate, verb, facts)}"
            parts.append(f"{verb} {format_bytes(int(size))} at {at}")
    return f"compute waits for the disk: {', '.join(parts) or 'commits and flushes'}"


def _for_the_link(facts: Facts) -> str:
    run, parts = facts.run, []
    for direction in ("up", "down"):
        busy_s = _busy_s(facts, direction)
        if busy_s > 0:
            # Matrices of Muon cross while the optimizer is busy, not the lanes of the link.
            products = [step.get("wire_bytes", {}).get(f"{direction}:products", 0) for step in run.typical]
            rate = (run.mean(f"bytes_{direction}") - sum(products) / len(products)) / busy_s
            parts.append(f"{direction} {format_rate(rate)} while busy{_of_link(rate, direction, facts)}")
    return f"compute waits for the link: {', '.join(parts)}"


def _for_workers(facts: Facts) -> str:
    busy_s = facts.run.lane_s("busy_s")
    texts = [
        f"{lane} {format_seconds(busy_s[lane])}" for lane in sorted(busy_s) if lane.startswith("compute:")
    ]
    return f"compute waits for other workers; busy: {', '.join(texts)}"


_WAITS: Final[Mapping[str, Wait]] = {
    "data": Wait(
        tell=lambda facts: (
            "passes until the next forward: your loop's batch, saves, evaluation and logging"
            if is_wrapped(facts)
            else "it waits for its batch"
        ),
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
    "ranks": Wait(
        tell=lambda facts: (
            f"compute waits for the other {num_ranks(facts) - 1} of {num_ranks(facts)} ranks, and for "
            "gradients and weights on their way between them"
        ),
        expected="ranks as fast as one another, on a network that hides behind their compute",
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


# Resident memory of a process that has imported torch and transformers, with room for other builds of them; the promise
# beyond it is 1.10 times the budget and 48 MiB (docs/memory.md).
_IMPORTED_BYTES = 512 * 2**20
_PROMISE, _PROMISE_BYTES = 1.10, 48 * 2**20
_GROWTH, _LEAST_STEPS = 0.05, 8
# Beyond what is planned for a device: what torch's allocator may hold of it in freed pieces.
_KEPT = 0.2
# Batches that differ by less tell nothing; a time per token that grows by more is no noise.
_LARGER, _SLOWER = 1.25, 1.1


def compute_bound(facts: Facts) -> Seen | None:
    """Compute hardly waits: the machine does what it can."""
    waited = sum(facts.run.waits().values())
    if waited >= WORTH:
        return None
    return Seen(
        severity="good",
        evidence=f"compute works {min(facts.run.compute_share, 1 - waited):.0%} of a step and waits {waited:.1%}",
        expected=f"waits below {WORTH:.0%}",
        gain_share=waited,
    )


def uneven(facts: Facts) -> Seen | None:
    """Some steps take far longer than the others."""
    seconds = [step["seconds"] for step in facts.run.steps]
    if len(seconds) < _LEAST_STEPS:
        raise LackingError(f"{_LEAST_STEPS + 1} steps in the heartbeat")
    middle = statistics.median(seconds)
    lost = 1 - middle / statistics.fmean(seconds)
    if lost < WORTH:
        return None
    slow = sum(value > 1.5 * middle for value in seconds)
    return Seen(
        evidence=(
            f"{slow} of {len(seconds)} steps took over 1.5 times the median of {format_seconds(middle)}; the longest "
            f"{format_seconds(max(seconds))}"
        ),
        expected="steps of the same length",
        gain_share=lost,
    )


def above_plan(facts: Facts) -> Seen | None:
    """Resident memory is larger than what was planned, or grows: freed memory that the allocator keeps in pieces."""
    sizes = [step["rss_bytes"] for step in facts.run.steps if step.get("rss_bytes")]
    if len(sizes) < _LEAST_STEPS:
        raise LackingError(f"{_LEAST_STEPS + 1} steps with rss_bytes in the heartbeat")
    quarter = len(sizes) // 4
    early, late = statistics.median(sizes[:quarter]), statistics.median(sizes[-quarter:])
    if late > (1 + _GROWTH) * early:
        return Seen(
            evidence=(
                f"resident memory grew from {format_bytes(int(early))} to {format_bytes(int(late))} over {len(sizes)} "
                "steps"
            ),
            expected="the same memory in every step, since every step does the same",
        )
    planned = planned_host_bytes(facts)
    if planned is None or not is_on_cpu(facts):
        return None
    most = _PROMISE * planned + _PROMISE_BYTES + _IMPORTED_BYTES
    if late <= most:
        return None
    return Seen(
        evidence=f"{format_bytes(int(late))} resident; {format_bytes(int(planned))} planned in RAM",
        expected=(
            f"at most {format_bytes(int(most))}: {_PROMISE} times the plan, {format_bytes(_PROMISE_BYTES)}, and "
            f"{format_bytes(_IMPORTED_BYTES)} for interpreter and libraries"
        ),
    )


def superlinear(facts: Facts) -> Seen | None:
    """Of several runs of one model, the one with more tokens per step takes longer per token.

    Batch advice comes from such a sweep only. A step that waits gets cheaper per token as it grows, so one that does
    not has something that grows faster than its tokens: memory that no longer fits, or attention over longer sequences.
    """
    runs = sorted(
        (run for run in (facts.run, *facts.others) if run.mean("tokens") > 0),
        key=lambda run: run.mean("tokens"),
    )
    if len(runs) < 2 or runs[-1].mean("tokens") < _LARGER * runs[0].mean("tokens"):
        raise LackingError("runs with other tokens per step: outsize doctor RUN --beside RUN")
    costs = [(run.mean("tokens"), run.mean("seconds") / run.mean("tokens"), run) for run in runs]
    best_tokens, best_s, best = min(costs, key=lambda cost: cost[1])
    worst_tokens, worst_s, worst = costs[-1]
    if worst_s <= _SLOWER * best_s:
        return None
    lengths = {run.config.get("data", {}).get("seq_len") for run in (best, worst)}
    longer = f"; sequences of {sorted(map(str, lengths))} tokens" if len(lengths) > 1 else ""
    return Seen(
        evidence=(
            f"{worst_tokens:.0f} tokens per step take {worst_s * 1e6:.3g} us per token, {best_tokens:.0f} take "
            f"{best_s * 1e6:.3g}: {worst_tokens / best_tokens:.2g} times the tokens, "
            f"{worst_s * worst_tokens / (best_s * best_tokens):.2g} times the step{longer}"
        ),
        expected="time per token that falls, or stays, as steps grow",
        gain_share=1 - best_s / worst_s,
    )


def fragmented(facts: Facts) -> Seen | None:
    """Torch's allocator holds far more of a GPU than was planned for: freed pieces that no request fits."""
    if is_on_cpu(facts):
        return None  # there resident memory tells, see `above_plan`
    held = [max(step["device_bytes"].values()) for step in facts.run.steps if step.get("device_bytes")]
    if not held:
        raise LackingError("device_bytes in the heartbeat: no GPU, or an older version")
    planned = sum(int(size) for size in facts.run.plan.get("memory_bytes", {}).get("device", {}).values())
    if not planned:
        raise LackingError("plan.json in the run directory")
    most = statistics.median(held)
    if most <= (1 + _KEPT) * planned:
        return None
    return Seen(
        evidence=(
            f"torch holds {format_bytes(int(most))} of a GPU between steps, {most / planned - 1:.0%} more than the "
            f"{format_bytes(planned)} that are planned"
        ),
        expected=f"at most {_KEPT:.0%} more: what is freed is used again, or given back",
    )
