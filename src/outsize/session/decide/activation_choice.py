"""``memory.activations: auto`` on a device behind a link: what backwards need leaves it if that shortens a step.

A run is planned before anything is timed, and then keeps on the device what has room. With the rates that lanes and
units reach it is planned again (`planner.search.offload_balance`): what the link carries while compute goes on need
not be computed
again. The plan whose simulated step is shorter is taken. A run computes the same either way.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from outsize.errors import OutsizeError
from outsize.planner.predict.codec_gain import worth_it
from outsize.planner.program.activation_policy import Choice
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search import offload_balance
from outsize.session.decide.codec_choice import expected_s
from outsize.session.decide.rates import Rates, measure_rates
from outsize.session.job.planning import options_of, plan_with_heap
from outsize.session.job.prepare import Prepared
from outsize.units import format_seconds

AUTO = "auto"


def choose_activations(
    prepared: Prepared, run_dir: Path, announce: Callable[[str], None], rates: Rates | None
) -> tuple[Prepared, Rates | None]:
    """Return the run with what ``auto`` comes to, and the rates that this was found with.

    Args:
        prepared: a run; one that says something else, that has no link of a rate of its own, or that computes nothing
            twice is returned as it is, and so is one of several ranks, whose plans exchange things in the same order.
        run_dir: its directory, which may hold rates.
        announce: told what was chosen and why.
        rates: that the run reaches; None where nobody has looked yet.
    """
    memory, machine = prepared.config.memory, prepared.machine
    emulated = machine.device.startswith("emulated") and memory.link_gb_per_s is not None
    linked = machine.device.startswith("cuda") or emulated
    if (
        memory.activations != AUTO
        or not linked
        or prepared.group.size > 1
        or not _recomputes(prepared.plan.layout)
    ):
        return prepared, rates
    try:
        rates = rates or measure_rates(prepared, run_dir)
        candidate = _balanced(prepared, rates)
        former_s, step_s = expected_s(prepared, rates), expected_s(candidate, rates)
    except (OutsizeError, RuntimeError) as error:
        announce(f"memory.activations: auto offloads nothing: nothing could be predicted: {error}")
        return prepared, rates
    if not worth_it(former_s, step_s):
        return prepared, rates
    announce(
        f"memory.activations: auto offloads: a step is predicted to take {format_seconds(step_s)} instead of "
        f"{format_seconds(former_s)}, since the link carries what would be computed again"
    )
    return candidate, rates


def _recomputes(layout: StepLayout) -> bool:
    units = {*layout.keepable, *layout.leavable}
    cells = ((unit, m) for unit in units for m in range(layout.num_microbatches))
    return any(layout.choice(unit, microbatch) is not Choice.KEEP for unit, microbatch in cells)


def _balanced(prepared: Prepared, rates: Rates) -> Prepared:
    """Return the same run, planned with its rates."""
    count, links = prepared.machine.num_workers, rates.machine.links
    # All links at once move no more than host memory gives and takes.
    most = rates.machine.host.bytes_per_s.value / count if count > 1 else float("inf")
    found = offload_balance.UnitRates(
        times=rates.times,
        up_bytes_per_s=min(most, *(link.up_bytes_per_s.value for link in links)),
        down_bytes_per_s=min(most, *(link.down_bytes_per_s.value for link in links)),
    )
    parts, machine, measured = prepared.split, prepared.machine, prepared.measured
    options = replace(options_of(prepared.config, parts, machine, measured, prepared.group), rates=found)
    options = replace(options, transport=prepared.plan.transport)
    plan, heap = plan_with_heap(parts, machine, measured, options, measured.held_bytes)
    return replace(prepared, plan=plan, heap=heap)
