"""What a run waits for, and what grows while it runs.

Shares of a step add up, so several verdicts on speed may stand side by side; each that passes its mark is told.
"""

import statistics

from outsize.doctor.facts import Facts, LackingError, fit_of, is_on_cpu, planned_host_bytes
from outsize.doctor.finding import Seen
from outsize.units import format_bytes, format_rate, format_seconds

# Share of a step that is worth a finding, and below which all waiting together is no matter (docs/troubleshooting.md).
_WORTH = 0.1
# A link or a disk at this part of what the probe reached is at its limit.
_AT_LIMIT = 0.85
# Resident memory of a process that has imported torch and transformers, with room for other builds of them; the promise
# beyond it is 1.10 times the budget and 48 MiB (docs/memory.md).
_IMPORTED_BYTES = 512 * 2**20
_PROMISE, _PROMISE_BYTES = 1.10, 48 * 2**20
_GROWTH, _LEAST_STEPS = 0.05, 8


def loader_bound(facts: Facts) -> Seen | None:
    """Steps wait for their batch."""
    run = facts.run
    if not any("data_s" in step for step in run.steps):
        raise LackingError("data_s in the heartbeat: it is of an older version")
    share = run.waits().get("data", 0.0)
    if share < _WORTH:
        return None
    return Seen(
        severity="warning",
        evidence=f"{_of_a_step(share, facts)} it waits for its batch",
        expected="batches that are ready before they are asked for",
        gain_share=share,
    )


def host_bound(facts: Facts) -> Seen | None:
    """The compute lane stands still while no lane is at work: Python is late."""
    share = facts.run.waits().get("python", 0.0)
    if share < _WORTH:
        return None
    ops = len(facts.run.plan.get("program", ()))
    many = f"; {ops} ops, {facts.run.mean('seconds') / ops * 1e3:.2g} ms each" if ops else ""
    return Seen(
        severity="warning",
        evidence=f"{_of_a_step(share, facts)} compute waits while no op is under way{many}",
        expected=f"below {_WORTH:.0%}: ops long enough to hide what it takes to hand them out",
        gain_share=_by_more_tokens(share),
    )


def optimizer_bound(facts: Facts) -> Seen | None:
    """Compute waits for the optimizer on the host."""
    share = facts.run.waits().get("host", 0.0)
    if share < _WORTH:
        return None
    return Seen(
        severity="warning",
        evidence=(
            f"{_of_a_step(share, facts)} compute waits for the optimizer, which takes "
            f"{format_seconds(facts.run.mean('update_s'))} of it"
        ),
        expected="an optimizer that ends within the next step's compute",
        gain_share=_by_more_tokens(share),
    )


def disk_bound(facts: Facts) -> Seen | None:
    """Compute waits for the disk."""
    share = facts.run.waits().get("disk", 0.0)
    if share < _WORTH:
        return None
    run = facts.run
    read, written = run.mean("bytes_read"), run.mean("bytes_written")
    rate = (read + written) / run.mean("seconds")
    return Seen(
        severity="warning",
        evidence=(
            f"{_of_a_step(share, facts)} compute waits for the disk, which reads {format_bytes(int(read))} and writes "
            f"{format_bytes(int(written))}: {format_rate(rate)}{_of_disk(rate, facts)}"
        ),
        expected="more compute for each byte read, or fewer bytes on the disk",
        gain_share=_by_more_tokens(share),
    )


def link_bound(facts: Facts) -> Seen | None:
    """Compute waits for the link between host and device."""
    share = facts.run.waits().get("link", 0.0)
    if share < _WORTH:
        return None
    run, told = facts.run, []
    for direction in ("up", "down"):
        busy_s = sum(
            seconds for lane, seconds in run.lane_s("busy_s").items() if lane.startswith(f"{direction}:")
        )
        if busy_s > 0:
            rate = run.mean(f"bytes_{direction}") / busy_s
            told.append(f"{direction} {format_rate(rate)} while busy{_of_link(rate, direction, facts)}")
    return Seen(
        severity="warning",
        evidence=f"{_of_a_step(share, facts)} compute waits for the link: {', '.join(told)}",
        expected="more compute for each byte that crosses",
        gain_share=_by_more_tokens(share),
    )


def worker_bound(facts: Facts) -> Seen | None:
    """The first worker waits for the others: its stages are shorter than theirs, or the pipeline fills and drains."""
    share = facts.run.waits().get("workers", 0.0)
    if share < _WORTH:
        return None
    busy_s = facts.run.lane_s("busy_s")
    told = [
        f"{lane} {format_seconds(busy_s[lane])}" for lane in sorted(busy_s) if lane.startswith("compute:")
    ]
    return Seen(
        severity="warning",
        evidence=f"{_of_a_step(share, facts)} compute waits for other workers; busy: {', '.join(told)}",
        expected="workers that are busy for as long as one another, and all the time",
        gain_share=_by_more_tokens(share),
    )


def compute_bound(facts: Facts) -> Seen | None:
    """Compute hardly waits: the machine does what it can."""
    waited = sum(facts.run.waits().values())
    if waited >= _WORTH:
        return None
    return Seen(
        severity="good",
        evidence=f"compute works {facts.run.compute_share:.0%} of a step and waits {waited:.1%}",
        expected=f"waits below {_WORTH:.0%}",
        gain_share=waited,
    )


def eager_attention(facts: Facts) -> Seen | None:
    """The run was told to use the attention that writes out all scores."""
    model, data = facts.run.config.get("model"), facts.run.config.get("data", {})
    if model is None:
        raise LackingError("config.yaml in the run directory")
    if model.get("attention") != "eager":
        return None
    length = int(data.get("seq_len", 0))
    return Seen(
        severity="warning",
        evidence=f"model.attention is eager: {length} x {length} scores per head and sequence are written and read",
        expected="a kernel that keeps scores on the chip",
    )


def uneven(facts: Facts) -> Seen | None:
    """Some steps take far longer than the others."""
    seconds = [step["seconds"] for step in facts.run.steps]
    if len(seconds) < _LEAST_STEPS:
        raise LackingError(f"{_LEAST_STEPS + 1} steps in the heartbeat")
    middle = statistics.median(seconds)
    lost = 1 - middle / statistics.fmean(seconds)
    if lost < _WORTH:
        return None
    slow = sum(value > 1.5 * middle for value in seconds)
    return Seen(
        severity="warning",
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
            severity="warning",
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
        severity="warning",
        evidence=f"{format_bytes(int(late))} resident; {format_bytes(int(planned))} planned in RAM",
        expected=(
            f"at most {format_bytes(int(most))}: {_PROMISE} times the plan, {format_bytes(_PROMISE_BYTES)}, and "
            f"{format_bytes(_IMPORTED_BYTES)} for interpreter and libraries"
        ),
    )


def _of_a_step(share: float, facts: Facts) -> str:
    return f"{share:.0%} of a step of {format_seconds(facts.run.mean('seconds'))}"


def _by_more_tokens(share: float) -> float:
    """Return what twice the tokens per step save of the time per token, where ``share`` of a step is waited.

    What is waited for does not grow with the tokens, compute does: with C computed and S waited a step takes C + S for
    T tokens, and max(2 C, C + S) for twice as many. So S is saved where it is at most C, and half of C + S beyond.
    """
    return min(share, 0.5)


def _of_disk(rate: float, facts: Facts) -> str:
    """Return what part of the probe's best rate a rate is; empty where no probe is known."""
    if facts.probed is None:
        return ""
    rates = [
        measured.median
        for disk in facts.probed.disks
        for depth in disk.depths
        for measured in (depth.read_bytes_per_s, depth.write_bytes_per_s)
        if measured.median is not None
    ]
    return f", {_part(rate, max(rates))}" if rates else ""


def _of_link(rate: float, direction: str, facts: Facts) -> str:
    if facts.probed is None or not facts.probed.devices:
        return ""
    device = facts.probed.devices[0]
    fit = fit_of(device, "pinned", direction) or fit_of(device, "dram copy", direction)
    return f" ({_part(rate, fit.bytes_per_s)})" if fit is not None else ""


def _part(rate: float, probed: float) -> str:
    end = "at its limit" if rate >= _AT_LIMIT * probed else "not at its limit"
    return f"{rate / probed:.0%} of the {format_rate(probed)} that the probe reached: {end}"
