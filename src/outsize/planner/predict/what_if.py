"""Predict what a change of the machine or of a setting gains: the step with it beside the step without."""

import math
from dataclasses import dataclass, replace

from outsize.codecs.codec_spec import LOSSLESS4
from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.hardware.machine_spec import HOST_SHARE
from outsize.planner.predict.changes import parse_change
from outsize.planner.predict.decision_search import clocked_s, planned_at
from outsize.planner.predict.prediction import (
    COMPUTE,
    FULL_SHARE,
    LINK_UP,
    Prediction,
    fastest,
    predict_again,
)
from outsize.planner.predict.question import Question

_MORE = ("vram", "ram", "gpus")
_RATES = ("compute", "link", "bandwidth", "disk", "net")
# Changes that no estimate knows.
_SIMULATED = ("net", "nodes", "weights", "home")
# Changes that leave neither microbatches nor stages as they are; where there is time, these neither.
_SEARCHED, _SEARCHED_AT_LENGTH = ("gpus", "state", "home"), ("vram", "mlp_parts")
COPIES = ("link to the GPU", "link from the GPU", "host memory")
OPTIMIZER, OPTIMIZER_WAIT = "optimizer on the host", "the optimizer on the host"
# What gains less is no advice: a prediction errs by more, and nobody buys memory for a percent.
LEAST_GAIN = 0.02
# From here on what a block needs at once is so much of the device that MLPs in parts are asked about.
LARGE_WORKSPACE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a change would bring.

    Attributes:
        change: as it was written.
        prediction: with it; None where nothing fits.
        gain: tokens per second over those without it, less one; None where either does not fit.
        error: why there is none; empty where there is one.
        estimated: whether the step was not simulated; see `estimated_outcome`.
    """

    change: str
    prediction: Prediction | None
    gain: float | None
    error: str = ""
    estimated: bool = False


def estimated_outcome(question: Question, base: Prediction, text: str) -> Outcome:
    """Return about what the change ``text`` would bring over ``base``, in a fraction of the time of `outcome`.

    For several GPUs. The partitioner's own clock times the stages of both machines, and stages for more memory or more
    GPUs are searched for a moment. What the simulated step of ``base`` takes beyond that is waiting for the optimizer,
    and copies that share what they go through; both become as much shorter as what they wait for becomes faster. What
    else than compute ends the step is in use for no more of it than is usual. Changes rank nearly as in simulations.

    Raises:
        ConfigError: not a change.
    """
    change = parse_change(text)
    name = text.partition("=")[0].strip()
    if name in _SIMULATED:
        return outcome(question, base, text)
    changed = change(question)
    same = None if name in ("vram", "gpus", "mlp_parts") else base.stages
    microbatches = base.microbatches
    try:
        before_s = clocked_s(question.deciding(stages=base.stages), microbatches, base.home)
        after_s = min(before_s, clocked_s(changed.deciding(stages=same), microbatches, base.home))
    except (InfeasiblePlanError, ConfigError) as error:
        return Outcome(change=text, prediction=None, gain=None, error=str(error))
    faster = _shares(question, changed)
    more_s = max(0.0, base.step_s - before_s)
    waits_s = min(more_s, base.stalls.get(OPTIMIZER_WAIT, 0.0) * base.step_s)
    copies_s = more_s - waits_s  # what links and host memory that are shared add
    weights = {kind: base.usage.get(kind, 0.0) for kind in COPIES}
    copies_s *= sum(weights[kind] * faster[kind] for kind in COPIES) / (sum(weights.values()) or 1.0)
    step_s = after_s + waits_s * faster[OPTIMIZER] + copies_s
    used_s = {kind: share * base.step_s * faster.get(kind, 1.0) for kind, share in base.usage.items()}
    limits = {kind: 1.0 if kind == COMPUTE else max(FULL_SHARE, share) for kind, share in base.usage.items()}
    step_s = min(base.step_s, max(step_s, *(used / limits[kind] for kind, used in used_s.items())))
    usage = sorted(((kind, used / step_s) for kind, used in used_s.items()), key=lambda item: -item[1])
    tokens_per_s = question.tokens_per_step / step_s
    prediction = replace(base, step_s=step_s, tokens_per_s=tokens_per_s, usage=dict(usage))
    return Outcome(change=text, prediction=prediction, gain=base.step_s / step_s - 1, estimated=True)


def _shares(before: Question, after: Question) -> dict[str, float]:
    """Return what of its time each resource takes on the changed machine, by its name in `Prediction.usage`."""
    old, new, dtype = before.machine, after.machine, before.model.compute_dtype
    links = [
        (link.up_bytes_per_s.value, link.down_bytes_per_s.value) for link in (old.links[0], new.links[0])
    ]
    gpus = len(old.gpus) / len(new.gpus)
    disks = {}
    if old.disk is not None and new.disk is not None:
        disks["disk read"] = old.disk.read_bytes_per_s.value / new.disk.read_bytes_per_s.value
        disks["disk write"] = old.disk.write_bytes_per_s.value / new.disk.write_bytes_per_s.value
    return {
        **disks,
        COMPUTE: gpus * old.gpus[0].flops_per_s(dtype) / new.gpus[0].flops_per_s(dtype),
        "link to the GPU": gpus * links[0][0] / links[1][0],
        "link from the GPU": gpus * links[0][1] / links[1][1],
        "host memory": old.host.bytes_per_s.value / new.host.bytes_per_s.value,
        OPTIMIZER: old.host.adamw_params_per_s.value / new.host.adamw_params_per_s.value,
    }


def outcome(question: Question, base: Prediction | None, text: str, *, near: bool = False) -> Outcome:
    """Return what the change ``text`` would bring over ``base``.

    Where only a rate changes, microbatches, stages and home stay, and so do microbatches and stages with more host
    memory for several GPUs, whose home is there already. More memory otherwise, more GPUs and another home are
    searched anew. ``near`` takes a fraction of the time, and may find less: where GPUs, home and bytes per parameter
    stay, microbatches and stages do, where a rate changes perhaps the whole plan; and plans are compared unsimulated.

    Raises:
        ConfigError: not a change.
    """
    change = parse_change(text)
    try:
        changed = change(question)
    except (
        ConfigError
    ) as error:  # a change that is none of this model and machine; others are, and the plan is
        return Outcome(change=text, prediction=None, gain=None, error=str(error))
    name = text.partition("=")[0].strip()
    if base is not None and name == "ram" and base.home == "disk":
        near = False  # what brings the home to host memory asks for another plan altogether
    stays = name not in _SEARCHED and (near or name not in _SEARCHED_AT_LENGTH)
    if base is not None and name == "ram" and not near:
        stays = len(changed.machine.gpus) > 1 and base.home == "host"
    if base is not None and name in _RATES:
        changed = replace(changed, home=base.home)
    if base is not None and stays:
        changed = replace(changed, microbatches=base.microbatches).deciding(stages=base.stages)
    try:
        if base is not None and near and name in _RATES:
            prediction = predict_again(base, changed, may_gain=_plan_may_gain(question, changed, base))
        else:
            prediction = fastest(replace(changed, brief=near))
    except (InfeasiblePlanError, ConfigError) as error:
        return Outcome(change=text, prediction=None, gain=None, error=str(error))
    if base is not None and name in _MORE and prediction.step_s > base.step_s:
        prediction = base  # what fitted before still does, and a GPU may stay idle
    gain = None if base is None else prediction.tokens_per_s / base.tokens_per_s - 1
    return Outcome(change=text, prediction=prediction, gain=gain)


def _plan_may_gain(question: Question, changed: Question, base: Prediction) -> bool:
    """Return whether the plan of ``base`` could gain `LEAST_GAIN`: not where what is no faster is in use throughout."""
    faster = _shares(question, changed)
    least = max(share * faster.get(kind, 1.0) for kind, share in base.usage.items())
    return least * (1 + LEAST_GAIN) < 1


def usual_changes(question: Question, base: Prediction) -> tuple[str, ...]:
    """Return the changes that people ask about first: more of each thing that a plan runs on.

    Where the home is on disk for want of host memory, that memory is as much as brings it there. Where the link to a
    GPU ends a step, weights that go over it in fewer bytes are asked about, too, unless they do already. So is an
    optimizer state of 8 bits, where the home is on disk for want of host memory and not all but adapters is frozen; but
    for nodes its gradients pass through a ring. And so are MLPs that take their tokens in parts, where what a block
    needs at once is a quarter of the device. And so is a home on disk, where nobody has said where it rests, and host
    memory has room for so few inputs beside it that several GPUs wait for each other.
    """
    on_disk = base.home == "disk"
    missing = missing_host_bytes(question, base.microbatches) if on_disk else 0
    ram = f"ram=+{math.ceil(missing / HOST_SHARE / 2**30)}GiB" if missing else "ram=+64GB"
    disk = ("disk=x2",) if on_disk else ()
    nodes = ("net=x2", "nodes=+1") if question.nodes > 1 else ()
    options = question.options
    encodes = base.home == "host" and options.transport.is_raw("weights")
    codec = (f"weights={LOSSLESS4.name}",) if encodes and base.binding == LINK_UP else ()
    rounds = options.state is None or options.state.num_moments > 0
    short = on_disk and question.home != "disk"
    short &= (
        2 * question.model.num_trainable > question.model.num_parameters
    )  # of adapters the state is small
    state = ("state=int8",) if short and rounds else ()
    large = base.memory["device"].get("workspace", 0) > LARGE_WORKSPACE * question.budgets.device
    parts = ("mlp_parts=4",) if large and question.in_mlp_parts is not None else ()
    crowded = base.round_microbatches < min(base.num_gpus, base.microbatches)
    crowded &= base.home == "host" and question.home == "auto" and options.round_microbatches is None
    home = ("home=disk",) if crowded and question.machine.disk is not None else ()
    rates = ("link=x2", *codec, "bandwidth=x2", *disk, "compute=x2")
    return ("vram=+8GB", *parts, ram, *state, *rates, "gpus=+1", *nodes, *home)


def host_refusal(question: Question, microbatches: int) -> InfeasiblePlanError | None:
    """Return why the home is not in host memory, with what to try; None where it fits there."""
    try:
        planned_at(question, microbatches, "host")
    except InfeasiblePlanError as error:
        return error
    return None


def missing_host_bytes(question: Question, microbatches: int) -> int:
    """Return how much host memory is lacking to have the home there; 0 where none is, or something else is."""
    refusal = host_refusal(question, microbatches)
    return 0 if refusal is None else refusal.short_by.get("host", 0)
