"""``transport.weights: auto``, and gradients and activations likewise: encoded if that is predicted to shorten steps.

Each codec that keeps every bit gets a plan of its own, with what it takes of every budget, and a simulated step with
the rates that the lanes, the units and the codec reach here: for one crossing after the other, each beside those
that were chosen before. Where the link is not what a step waits for, none is shorter, and all stays as it is. A run
computes the same either way, on one device or several.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from outsize.errors import ConfigError, InfeasiblePlanError, OutsizeError
from outsize.planner.predict.codec_gain import worth_it
from outsize.planner.predict.expectation import PlannedStep
from outsize.session.decide.codec_rates import codec_rates, crossing_rates
from outsize.session.decide.rates import Rates, measure_rates
from outsize.session.job.home_choice import AUTO, CODECS
from outsize.session.job.planning import choose_plan
from outsize.session.job.prepare import Prepared
from outsize.session.job.relative_times import kept_bytes
from outsize.units import format_seconds

# The one that moves most first.
CROSSINGS = ("weights", "gradients", "activations")


def choose_codec(
    prepared: Prepared, run_dir: Path, announce: Callable[[str], None]
) -> tuple[Prepared, Rates | None]:
    """Return the run with the codecs that ``auto`` comes to, and the rates that these were found with.

    Args:
        prepared: a run; one whose configuration does not say ``auto`` is returned as it is, without rates.
        run_dir: its directory, which may hold rates.
        announce: told what was chosen and why.
    """
    crossings = [name for name in CROSSINGS if getattr(prepared.config.transport, name) == AUTO]
    found = []
    for crossing in crossings:
        reason = _why_raw(prepared, crossing)
        if reason:
            announce(f"transport.{crossing}: auto is raw{reason}")
        else:
            found.append(crossing)
    if not found:
        return prepared, None
    try:
        rates = measure_rates(prepared, run_dir)
        step_s = expected_s(prepared, rates)
    except (OutsizeError, RuntimeError) as error:
        for crossing in found:
            announce(f"transport.{crossing}: auto is raw: nothing could be predicted: {error}")
        return prepared, None
    for crossing in found:
        prepared, step_s = _with_best_codec(prepared, crossing, rates, step_s, announce)
    return prepared, rates


def _why_raw(prepared: Prepared, crossing: str) -> str:
    """Return why nothing may be encoded at a crossing, to follow "raw"; empty where it may."""
    machine = prepared.machine
    if prepared.group.size > 1:
        return " where several ranks share each step"
    if machine.device == "cpu" or (crossing == "weights" and machine.home == "disk"):
        return ": there is no link between host memory and a device"
    if crossing != "weights" and machine.device.startswith("cuda"):
        return ": a GPU decodes what keeps every bit, and does not encode it"
    if crossing == "gradients" and prepared.plan.layout.ring:
        return ": gradients pass through a ring, tile by tile"
    return ""


def _with_best_codec(
    prepared: Prepared, crossing: str, rates: Rates, raw_s: float, announce: Callable[[str], None]
) -> tuple[Prepared, float]:
    """Return the run with the codec of a crossing that is worth it, if any is, and the seconds of its steps."""
    best, best_s = prepared, raw_s
    for name in CODECS:
        candidate = _with_codec(prepared, crossing, name)
        if candidate is not None:
            step_s = expected_s(candidate, rates)
            if worth_it(best_s, step_s):
                best, best_s = candidate, step_s
    if best is prepared:
        announce(f"transport.{crossing}: auto is raw: a step does not wait for the link")
    else:
        announce(
            f"transport.{crossing}: auto is {getattr(best.plan.transport, crossing)}: a step is predicted to take "
            f"{format_seconds(best_s)} instead of {format_seconds(raw_s)}, since it waits for the link"
        )
    return best, best_s


def expected_s(prepared: Prepared, rates: Rates) -> float:
    """Return what a step of ``prepared`` is predicted to take with ``rates``."""
    planned = PlannedStep(
        plan=prepared.plan,
        model=prepared.split.spec,
        boundary_bytes=prepared.measured.boundary_bytes,
        codec_rates=codec_rates(prepared, prepared.plan.transport),
        crossing_rates=crossing_rates(prepared, prepared.plan.transport),
        kept_bytes=kept_bytes(prepared.measured),
    )
    return planned.expect(planned.costs(rates.machine, rates.times)).step_s


def _with_codec(prepared: Prepared, crossing: str, name: str) -> Prepared | None:
    """Return the same run with a codec at one crossing; None where there is no room for it."""
    named = asdict(prepared.plan.transport) | {crossing: name}
    transport = prepared.config.transport.model_copy(update=named)
    config = prepared.config.model_copy(update={"transport": transport})
    try:
        plan, heap = choose_plan(config, prepared.split, prepared.machine, prepared.measured)
    except (InfeasiblePlanError, ConfigError):
        return None
    return replace(prepared, plan=plan, heap=heap)
