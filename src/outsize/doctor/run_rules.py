"""What a run does beside waiting: computes, varies, and takes memory; and how several runs compare."""

import statistics

from outsize.doctor.facts import Facts, LackingError, is_on_cpu, planned_host_bytes
from outsize.doctor.finding import Seen
from outsize.doctor.wait_rules import WORTH
from outsize.units import format_bytes, format_seconds

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
        evidence=f"compute works {facts.run.compute_share:.0%} of a step and waits {waited:.1%}",
        expected=f"waits below {WORTH:.0%}",
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
