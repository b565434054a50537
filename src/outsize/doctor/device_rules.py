"""What can be wrong with a device's clock and rates."""

from outsize.doctor.facts import Facts, lost_share, median, text
from outsize.doctor.finding import Seen, worst
from outsize.hardware.readings import Measurement

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
        known = clock is not None and highest is not None and highest > 0
        told = f" at {(clock or 0) / 1e9:.2f} of {(highest or 0) / 1e9:.2f} GHz" if known else ""
        hard = any(word in limits for word in ("thermal", "slowdown", "brake"))
        return Seen(
            severity="error" if hard else "warning",
            evidence=f"cuda:{index}{told}: {limits}",
            expected="no limit beside idleness",
            gain_share=1 - (clock or 0) / (highest or 1) if known and hard else None,
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
