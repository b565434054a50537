"""``transport.weights: auto``: a run sends weights encoded if that is predicted to shorten its steps.

Each codec that keeps every bit gets a plan of its own, with what it takes of every budget, and a simulated step with
the rates that the lanes, the units and the codec reach here. Where the link is not what a step waits for, none is
shorter, and weights stay as they are. A run computes the same either way.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from outsize.errors import ConfigError, InfeasiblePlanError, OutsizeError
from outsize.planner.codec_choice import worth_it
from outsize.planner.expectation import PlannedStep
from outsize.train.codec_rates import codec_rates
from outsize.train.planning import choose_plan
from outsize.train.prepare import Prepared
from outsize.train.rates import Rates, measure_rates
from outsize.train.residency import AUTO, CODECS, with_codec
from outsize.train.unit_times import kept_bytes
from outsize.units import format_seconds


def choose_codec(
    prepared: Prepared, run_dir: Path, announce: Callable[[str], None]
) -> tuple[Prepared, Rates | None]:
    """Return the run with the codec of weights that ``auto`` comes to, and the rates that this was found with.

    Args:
        prepared: a run; one whose configuration does not say ``auto`` is returned as it is, without rates.
        run_dir: its directory, which may hold rates.
        announce: told what was chosen and why.
    """
    if prepared.config.transport.weights != AUTO:
        return prepared, None
    if prepared.group.size > 1:
        announce("transport.weights: auto is raw where several ranks share each step")
        return prepared, None
    if prepared.machine.device == "cpu" or prepared.machine.home == "disk":
        announce("transport.weights: auto is raw: there is no link between host memory and a device")
        return prepared, None
    try:
        rates = measure_rates(prepared, run_dir)
        raw_s = best_s = expected_s(prepared, rates)
    except (OutsizeError, RuntimeError) as error:
        announce(f"transport.weights: auto is raw: nothing could be predicted: {error}")
        return prepared, None
    best = prepared
    for name in CODECS:
        candidate = _with_codec(prepared, name)
        if candidate is not None:
            step_s = expected_s(candidate, rates)
            if worth_it(best_s, step_s):
                best, best_s = candidate, step_s
    if best is prepared:
        announce("transport.weights: auto is raw: a step does not wait for the link")
    else:
        announce(
            f"transport.weights: auto is {best.plan.transport.weights}: a step is predicted to take "
            f"{format_seconds(best_s)} instead of {format_seconds(raw_s)}, since it waits for the link"
        )
    return best, rates


def expected_s(prepared: Prepared, rates: Rates) -> float:
    """Return what a step of ``prepared`` is predicted to take with ``rates``."""
    planned = PlannedStep(
        plan=prepared.plan,
        model=prepared.split.spec,
        boundary_bytes=prepared.measured.boundary_bytes,
        codec_rates=codec_rates(prepared, prepared.plan.transport),
        kept_bytes=kept_bytes(prepared.measured),
    )
    return planned.expect(planned.costs(rates.machine, rates.times)).step_s


def _with_codec(prepared: Prepared, name: str) -> Prepared | None:
    """Return the same run with weights that codec ``name`` writes; None where there is no room for it."""
    config = with_codec(prepared.config, name)
    try:
        plan, heap = choose_plan(config, prepared.split, prepared.machine, prepared.measured)
    except (InfeasiblePlanError, ConfigError):
        return None
    return replace(prepared, plan=plan, heap=heap)
