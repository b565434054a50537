"""The decision of a run: what it computes and moves, found once, by the same call wherever a run is told or begun.

`outsize train`, its dry run, `outsize verify` and short runs call `plan_run`. `prepare` has asked the planner with
data sheets for rates, which say the same whenever a run starts. Where a codec, what leaves a device, or the place where
Muon multiplies is to be chosen by what links carry, units and lanes are timed, and the planner is asked again
(`planner.predict.decision_search`).

Bits depend on where Muon multiplies, so a run that goes on has what its first start has chosen
(`training.run_dir.as_before`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from outsize.choices import NewtonSchulz
from outsize.codecs.transport import Transport
from outsize.detail import Detail
from outsize.errors import ConfigError, OutsizeError
from outsize.planner.predict.decision import Decision
from outsize.planner.predict.decision_search import GAIN, PRODUCTS_KEY, RESIDENT_KEY
from outsize.planner.predict.question import CodingRates
from outsize.planner.program.stages import Choice
from outsize.planner.program.table import Kind
from outsize.planner.search.forward_plan import why_not_resident
from outsize.planner.search.step_plan import Plan
from outsize.session.decide.lane_rates import codec_rates, crossing_rates
from outsize.session.decide.rates import Rates, measure_rates
from outsize.session.job.job_options import AUTO, CROSSINGS, open_crossings, products_open
from outsize.session.job.own_code import program_named
from outsize.session.job.planning import decision_for, is_linked, question_of
from outsize.session.job.prepare import Job, planned, prepare
from outsize.streamed.spec import RunSpec
from outsize.units import format_seconds

Announce = Callable[[str], None]
OFFLOAD = "memory.activations"
NOTHING = {PRODUCTS_KEY: "is host", OFFLOAD: "offloads nothing", RESIDENT_KEY: "is none"}


def plan_run(
    run: RunSpec,
    announce: Announce,
    *,
    adapters_from: Path | None = None,
    announce_choice: Announce | None = None,
) -> tuple[Job, Rates | None]:
    """Prepare a run, and return it with the plan that it follows, and the rates that the plan was found with.

    Args:
        run: what it is.
        announce: told what was chosen and why.
        adapters_from: see `prepare`.
        announce_choice: told of the model while it is prepared; None for ``announce``.

    Raises:
        OutsizeError: anything that a run could not be started with.
    """
    return choose_plan(prepare(run, announce_choice or announce, adapters_from=adapters_from), announce)


def choose_plan(prepared: Job, announce: Announce) -> tuple[Job, Rates | None]:
    """Return the run with the plan that it follows, and the rates that the plan was found with.

    Returns:
        The run, and rates of its microbatches; None where nothing depended on rates.
    """
    job, rates = _decided(prepared, announce)
    if (name := job.config.train.program) is not None:
        job = replace(job, plan=_walking(job, name))
        announce(f"train.program: steps follow {name}")
    if products_open(job.config.optimizer):
        place: NewtonSchulz = "device" if job.plan.state.products_on_device else "host"
        job = job.following(job.config.multiplying(place))
    for line in _of_codecs(job):
        announce(line)
    config = job.config.in_microbatches(job.config.microbatches, _round_to_tell(job.plan))
    return job.following(config), rates


def _walking(job: Job, name: str) -> Plan:
    """Return the plan of a run with the program that ``train.program`` names."""
    if job.group.size > 1:
        raise ConfigError(
            "train.program: ranks that share each step follow one another's order; leave it out there"
        )
    change, turns = program_named(name), len(job.plan.programs)
    if turns > 1 and ":" not in name:
        raise ConfigError(
            f"train.program: steps of these workers follow {turns} programs by turns, and a file holds one; name a "
            "function, FILE.py:FUNCTION, that makes each of the plan's"
        )

    def changed(text: str) -> str:
        try:
            return str(change(text))
        except Exception as error:  # whatever the user's own code raises
            raise ConfigError(f"train.program: {name} failed: {type(error).__name__}: {error}") from error

    return job.plan.walking(changed)


def _of_codecs(job: Job) -> list[str]:
    """Say which named codecs encode nothing in a plan, and which change the results of its run."""
    lines, sent = [], {op.kind for op in job.plan.program}
    idle = {"activations": "inputs of units stay on the device", "gradients": "no gradient goes home"}
    for crossing, kind in (("activations", Kind.SAVE), ("gradients", Kind.GRAD)):
        spec = job.plan.transport.spec(crossing)
        if kind not in sent and not job.plan.transport.is_raw(crossing):
            lines.append(f"transport.{crossing}: {spec.name} has no effect in this plan: {idle[crossing]}")
        elif not spec.lossless:
            does = "rounds what crosses, so results are not those of an exact run"
            lines.append(f"transport.{crossing}: {spec.name} {does}")
    if job.plan.layout.any_leaves and not job.plan.transport.is_raw("activations"):
        lines.append(
            "transport.activations: what forwards keep crosses as it is, inputs of units alone are encoded"
        )
    return lines


def _round_to_tell(plan: Plan) -> int | None:
    """Return the microbatches of a round where a step has several, and orders sums of tied weights so."""
    layout = plan.layout
    tells = layout.stages is None or len(layout.rest_users) > 1
    return layout.round_size if tells and layout.num_rounds > 1 else None


def _decided(prepared: Job, announce: Announce) -> tuple[Job, Rates | None]:
    """Return a run with the plan that it follows, and the rates of that."""
    open_keys = [
        f"transport.{name}"
        for name in open_crossings(prepared.config.transport)
        if _searched(prepared, name, announce)
    ]
    if _may_offload(prepared):
        open_keys.append(OFFLOAD)
    if _may_be_resident(prepared):
        open_keys.append(RESIDENT_KEY)
    if products_open(prepared.config.optimizer):
        if prepared.machine.devices.own_processor:
            open_keys.append(PRODUCTS_KEY)
        else:
            announce(Detail(f"{PRODUCTS_KEY}: auto is host: its processor is the device's, too"))
    if not open_keys:
        return prepared, None
    try:
        rates = measure_rates(prepared, prepared.run_dir)
        decision = decision_of(prepared, rates)
        decision.simulated  # noqa: B018  # before anything is said
    except (OutsizeError, RuntimeError) as error:
        for key in open_keys:
            nothing = NOTHING.get(key) or f"is {getattr(prepared.plan.transport, key.partition('.')[2])}"
            announce(f"{key}: auto {nothing}: nothing could be predicted: {error}")
        return prepared, None
    for line in _told(decision, open_keys):
        announce(Detail(line))
    timed, count = prepared.config.microbatches, decision.microbatches
    rates = replace(rates, times=decision.microbatch.times, microbatches=count) if count != timed else rates
    return planned(prepared, decision.plan), rates


def decision_of(prepared: Job, rates: Rates) -> Decision:
    """Return what the planner decides of a run that reaches ``rates``.

    Raises:
        OutsizeError: nothing fits, or nothing could be simulated.
    """
    crossings = [name for name in CROSSINGS if not _why_raw(prepared, name)]
    return decision_for(prepared, rates, partial(_coding_rates, prepared), crossings)


def _coding_rates(prepared: Job, transport: Transport) -> CodingRates:
    crossings = crossing_rates(prepared, transport)
    return {"codec_rates": codec_rates(prepared, transport), "crossing_rates": crossings}


def _searched(prepared: Job, crossing: str, announce: Announce) -> bool:
    """Return whether the codec of a crossing is to be searched, or say why not."""
    reason = _why_raw(prepared, crossing)
    # Where nothing fits but encoded, `prepare` has said so.
    if reason and prepared.plan.transport.is_raw(crossing):
        announce(Detail(f"transport.{crossing}: auto is raw{reason}"))
    return not reason


def _why_raw(prepared: Job, crossing: str) -> str:
    """Return why nothing may be encoded at a crossing, to follow "raw"; empty where it may."""
    machine = prepared.machine
    if prepared.group.size > 1:
        return " where several ranks share each step"
    if machine.devices.is_cpu or (crossing == "weights" and machine.home == "disk"):
        return ": there is no link between host memory and a device"
    if crossing != "weights" and machine.devices.accelerated:
        return ": a GPU decodes what keeps every bit, and does not encode it"
    if crossing == "gradients" and prepared.plan.layout.ring:
        return ": gradients pass through a ring, tile by tile"
    return ""


def _may_offload(prepared: Job) -> bool:
    """Return whether something that is computed again could go over a link instead.

    Several ranks exchange things in the same order, and have plans of one form for that.
    """
    layout = prepared.plan.layout
    units = {*layout.keepable, *layout.leavable}
    cells = ((unit, m) for unit in units for m in range(layout.round_size))
    recomputes = any(layout.choice(unit, microbatch) is not Choice.KEEP for unit, microbatch in cells)
    linked = is_linked(prepared.config.memory, prepared.machine)
    return prepared.config.memory.activations == AUTO and linked and prepared.group.size == 1 and recomputes


def _may_be_resident(prepared: Job) -> bool:
    """Return whether units that train could rest on the device because a link with a rate of its own lies below it."""
    memory, machine = prepared.config.memory, prepared.machine
    options = replace(question_of(prepared).options, num_workers=machine.num_workers, home=prepared.plan.home)
    is_open = memory.resident == AUTO and memory.slots is None and is_linked(memory, machine)
    return is_open and not why_not_resident(options) and bool(prepared.plan.layout.step_order)


def _told(decision: Decision, open_keys: list[str]) -> list[str]:
    lines = []
    for key in open_keys:
        crossing, previous = key.partition(".")[2], decision.former.get(key)
        if key == PRODUCTS_KEY:
            chosen, reason = "auto is device", "since the device multiplies faster"
            if not decision.plan.state.products_on_device:
                lines.append(
                    f"{key}: auto is host: on the device, if it has room, no step is {GAIN:.0%} shorter"
                )
                continue
        elif key == OFFLOAD:
            chosen = "auto offloads" if decision.plan.layout.any_leaves else ""
            reason = "since the link carries what would be computed again"
        elif key == RESIDENT_KEY:
            layout, reason = decision.plan.layout, "since nothing of them crosses the link"
            units = f"{len(layout.resident)} of {len(layout.step_order)} units that train"
            chosen = f"auto keeps {units} on the device with their state" if layout.resident else ""
        else:
            name = getattr(decision.plan.transport, crossing)
            chosen, reason = f"auto is {name}", "since it waits for the link"
            if previous is None:
                reason = "since nothing fits otherwise"
            if decision.plan.transport.is_raw(crossing):
                lines.append(f"{key}: auto is raw: a step does not wait for the link")
                continue
        if chosen:
            prediction = f": a step is predicted to take {format_seconds(decision.step_s)}"
            before = "" if previous is None else f" instead of {format_seconds(previous.step_s)}"
            lines.append(f"{key}: {chosen}{prediction}{before}, {reason}")
    return lines
