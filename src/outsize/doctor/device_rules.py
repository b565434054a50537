"""Rules on devices: clock, rates, throttling, batches too small for them.

What can be wrong with a device's clock and rates.

Rules on slow compute: stolen processors, throttling, small batches, inefficient kernels.
"""

from outsize.doctor.contention import cores_taken, throttled
from outsize.doctor.facts import Facts, LackingError, lost_share, median, text
from outsize.doctor.finding import Seen, worst
from outsize.hardware.readings import Measurement
from outsize.hardware.streaming import slower_than_fp32
from outsize.units import format_seconds

# A rate that falls through its samples by more than this is no noise, if each third is slower than the one before.
_SAG = 0.15
# Between the two of the A100 in arXiv:2307.08691: fused causal attention at a third of peak and more, unfused at a
# tenth and less.
_NO_KERNEL = 0.15


def gpu_clocks(facts: Facts) -> Seen | None:
    """A GPU keeps its clock down for heat or power; a cap that somebody set counts as well."""
    for index, gpu in enumerate(facts.machine.inventory.gpus):
        limits = text(gpu.clock_limits, "limits of the clock")
        if not limits:
            continue
        clock, highest = gpu.sm_clock_hz.number(), gpu.sm_clock_max_hz.number()
        has_clocks = clock is not None and highest is not None and highest > 0
        clocks_text = f" at {(clock or 0) / 1e9:.2f} of {(highest or 0) / 1e9:.2f} GHz" if has_clocks else ""
        hard = any(word in limits for word in ("thermal", "slowdown", "brake"))
        return Seen(
            severity="error" if hard else "warning",
            evidence=f"cuda:{index}{clocks_text}: {limits}",
            expected="no limit beside idleness",
            gain_share=1 - (clock or 0) / (highest or 1) if has_clocks and hard else None,
        )
    return None


def sagging(facts: Facts) -> Seen | None:
    """A device gets slower while it is timed: heat, power, or a virtual machine that has used up its credit."""
    return worst(
        _slower(f"{device.device} {dtype}", rate)
        for device in facts.machine.devices
        for dtype, rate in device.matmul_flops_per_s.items()
        if lost_share(rate) > _SAG
    )


def _slower(what: str, rate: Measurement) -> Seen:
    lost = lost_share(rate)
    return Seen(
        evidence=(
            f"{what} products fell by {lost:.0%} within {len(rate.samples)} samples, from "
            f"{rate.samples[0] / 1e12:.3g} to {rate.samples[-1] / 1e12:.3g} TFLOP/s"
        ),
        expected="samples that scatter around one rate",
        gain_share=lost,
    )


def slow_attention(facts: Facts) -> Seen | None:
    """On a GPU a fused kernel comes within a few times of a matrix product; unfused attention does not."""
    for device in facts.machine.devices:
        if not device.accelerated:
            continue
        for dtype in ("bf16", "fp16"):
            if dtype not in device.matmul_flops_per_s or dtype not in device.attention_flops_per_s:
                continue
            product = median(device.matmul_flops_per_s[dtype], f"{dtype} products")
            attention = median(device.attention_flops_per_s[dtype], f"{dtype} attention")
            if attention < _NO_KERNEL * product:
                return Seen(
                    evidence=(
                        f"{device.device} {dtype}: attention at {attention / 1e12:.3g} TFLOP/s, "
                        f"{attention / product:.0%} of a matrix product"
                    ),
                    expected=f"above {_NO_KERNEL:.0%}, as fused kernels reach",
                )
    return None


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
