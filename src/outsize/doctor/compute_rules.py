"""Rules on slow compute: stolen processors, throttling, small batches, inefficient kernels."""

from outsize.doctor.contention import cores_taken, throttled
from outsize.doctor.facts import Facts, LackingError
from outsize.doctor.finding import Seen
from outsize.hardware.streaming import slower_than_fp32
from outsize.units import format_seconds

# Below this many tokens per visit of a weight, reading it takes longer than multiplying by it: FLOP/s over bytes/s,
# times bytes per weight, over the 2 FLOPs per token. 10 to 20 on a CPU, 100 to 300 on GPUs of today in bf16.
_ENOUGH_TOKENS = 128
# Share of the peak that blocks of a model reach where they are large enough; data sheets' peaks are hard to come by.
_EFFICIENT = 0.3
# Share of a step that compute takes longer than alone: units are timed for a moment, to a tenth.
_SLOWED = 0.15


def tiny_microbatch(facts: Facts) -> Seen | None:
    """Compute is far below what the device can do, since a microbatch has few tokens for the weights that it reads."""
    efficiency, tokens = _efficiency(facts), facts.run.about.get("tokens_per_microbatch")
    if tokens is None:
        raise LackingError("tokens_per_microbatch in run.json: it is of an older version")
    if efficiency >= _EFFICIENT or tokens >= _ENOUGH_TOKENS:
        return None
    return Seen(
        evidence=(
            f"{tokens} tokens per microbatch; compute reaches {efficiency:.1%} of the device's peak while it works, "
            f"{facts.run.compute_share:.0%} of a step"
        ),
        expected=f"{_ENOUGH_TOKENS} tokens per microbatch or more",
        gain_share=1 - efficiency / _EFFICIENT,
    )


def slow_compute(facts: Facts) -> Seen | None:
    """Compute is far below what the device can do, and not for want of tokens."""
    efficiency, tokens = _efficiency(facts), facts.run.about.get("tokens_per_microbatch", 0)
    if efficiency >= _EFFICIENT / 4 or tokens < _ENOUGH_TOKENS or _is_starved(facts):
        return None
    return Seen(
        evidence=(
            f"compute reaches {efficiency:.1%} of the device's peak while it works, "
            f"{facts.run.compute_share:.0%} of a step, with {tokens} tokens per microbatch"
        ),
        expected=f"{_EFFICIENT:.0%} and more with so many tokens",
        gain_share=1 - efficiency / _EFFICIENT,
    )


def slowed_compute(facts: Facts) -> Seen | None:
    """Compute takes longer than its units took alone, and no other process is why."""
    run = facts.run
    if all(step.get("slowed_s") is None for step in run.steps):
        raise LackingError("slowed_s in the heartbeat: units were not timed, or it is of an older version")
    share = run.mean("slowed_s") / run.mean("seconds")
    if share < _SLOWED or _is_starved(facts):
        return None
    beside = sum(seconds for name, seconds in run.threads_per_s().items() if _is_beside(name))
    faults, kernel = run.host_per_s("minor_faults") or 0.0, run.host_per_s("kernel_cpu_s") or 0.0
    return Seen(
        evidence=(
            f"compute takes {format_seconds(run.mean('slowed_s'))} of a step longer than its units took alone; "
            f"per second other lanes had {beside:.2g} s of a processor, {faults:,.0f} pages were handed out, and the "
            f"system's kernel took {kernel:.2g} s"
        ),
        expected=f"compute that is slowed for less than {_SLOWED:.0%} of a step",
        gain_share=share,
    )


def _is_starved(facts: Facts) -> bool:
    """Return whether other processes or a quota are known to keep the run from its processors."""
    try:
        return bool(cores_taken(facts) or throttled(facts))
    except LackingError:
        return False


def _is_beside(thread: str) -> bool:
    """Return whether a thread is one of a lane that does not compute."""
    return thread == "host" or (":" in thread and not thread.startswith("compute:"))


def slow_dtype(facts: Facts) -> Seen | None:
    """A processor without products of 16 bits takes the time of fp32 ones and of converting to them."""
    about, dtype = facts.run.about, facts.run.about.get("dtype")
    if "fp32_flops_per_s" not in about:
        raise LackingError("fp32_flops_per_s in run.json: it is of an older version")
    rate, fp32_rate = about.get("peak_flops_per_s") or 0.0, about["fp32_flops_per_s"] or 0.0
    slower = slower_than_fp32(rate, fp32_rate)
    if slower is None:
        return None
    return Seen(
        evidence=f"products in {dtype} reach {rate / 1e9:.3g} GFLOP/s on this processor, in fp32 {fp32_rate / 1e9:.3g}",
        expected=f"a processor that multiplies {dtype} (AMX, AVX-512 BF16, or a GPU), or fp32",
        gain_share=1 - 1 / slower,
    )


def _efficiency(facts: Facts) -> float:
    efficiency = facts.run.efficiency
    if efficiency is None:
        raise LackingError("mfu in the heartbeat: FLOPs of the model or peak of the device are not known")
    return efficiency
