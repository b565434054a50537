"""What takes less memory than a plan does, what loses nothing first, and what to say where none fits."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.search.sizing import PlanOptions
from outsize.units import format_bytes

SPLIT, BY_UNIT, INT8 = "optimizer.masters=split", "optimizer.clip=unit", "optimizer.state=int8"
SPLIT24 = "optimizer.masters=split24"
_FEWER_TOKENS = "fewer tokens per step"


def smaller_states(options: PlanOptions, state: StateLayout) -> Iterator[tuple[str, PlanOptions]]:
    """Yield settings, as a user writes them, and the options that they make; each takes less than those before.

    Args:
        options: as they are.
        state: how a trained unit lies at home with them.
    """
    # A training loop of the user's own decides on these.
    if options.cut:
        return
    keys: list[str] = []
    options = replace(options, resident=0)
    if state.dtype == "bf16" and not state.splits:
        keys.append(SPLIT)
        state = replace(state, masters="split")
        yield _joined(keys), replace(options, state=state)
    steps_at_once = options.nodes == 1 and not options.may_skip and options.transport.is_raw("gradients")
    if state.gradients != "none" and steps_at_once:
        keys += [BY_UNIT] if options.clip else []
        state = replace(state, gradients="none")
        # What has no gradients at home cannot sum them there from round to round.
        unit_clip = options.clip or options.unit_clip
        options = replace(options, clip=False, unit_clip=unit_clip, round_microbatches=None)
        yield _joined(keys or [BY_UNIT]), replace(options, state=state)
    if state.moments != "int8" and state.num_moments:
        keys = [INT8, *keys]
        state = replace(state, moments="int8")
        yield _joined(keys), replace(options, state=state)
    if state.dtype == "bf16" and state.masters != "split24":
        keys = [*(key for key in keys if key == INT8), SPLIT24, *(k for k in keys if k == BY_UNIT)]
        yield _joined(keys), replace(options, state=replace(state, masters="split24"))


def without_products(state: StateLayout) -> str:
    """Return what frees the room of Muon's products on a device, as a user writes it; empty without any."""
    return "optimizer.ns_on=host, or " if state.products_on_device else ""


def smaller_microbatches(options: PlanOptions, largest_kind: str | None) -> str:
    """Return what makes a microbatch take less of the device, of what can still be done, as a user writes it.

    Args:
        options: as they are.
        largest_kind: of the unit whose workspace is the most of it; None where something else is.
    """
    most = options.most_microbatches
    ideas = []
    if most is None or options.microbatches < most:
        ideas.append(f"more microbatches than {options.microbatches}")
    if largest_kind == "head" and not options.cut:
        ideas.append("a smaller train.head_chunk_tokens")
    if largest_kind == "block" and options.can_part:
        ideas.append("train.mlp_parts=4")
    if most is None or options.microbatches >= most:
        ideas.append("shorter sequences")
    return ", or ".join([", ".join(ideas[:-1]), ideas[-1]] if ideas[1:] else ideas)


def _joined(keys: list[str]) -> str:
    return " and ".join([", ".join(keys[:-1]), keys[-1]] if keys[1:] else keys)


def _smaller_state(
    options: PlanOptions,
    state: StateLayout,
    shortage: Callable[[PlanOptions], Mapping[str, int]],
    otherwise: str,
) -> str:
    """Return the settings that bring the home into host memory, perhaps with fewer tokens; or what the least lacks."""
    least = otherwise
    for keys, other in smaller_states(options, state):
        lacking = shortage(other)
        if not lacking:
            return f"{keys}, with which it fits"
        if otherwise == _FEWER_TOKENS:  # which do without any of them
            continue
        if not shortage(replace(other, microbatches=1, round_microbatches=None)):
            return f"{keys} with {_FEWER_TOKENS}"  # of one round, since no sums wait at home
        least = f"{otherwise}; with {keys} {format_bytes(lacking.get('host', 0))} are lacking still"
    return least


def what_to_try(
    memory: Mapping[str, Mapping[str, int]],
    short_by: Mapping[str, int],
    options: PlanOptions,
    state: StateLayout,
    shortage: Callable[[PlanOptions], Mapping[str, int]],
    largest_kind: str | None,
) -> str:
    """Return the message for the first tier that is short: what takes the most there, what to try first."""
    tier = next(iter(short_by))
    needed = sum(memory[tier].values())
    largest = max(memory[tier], key=lambda name: memory[tier][name])
    size = format_bytes(memory[tier][largest])
    chosen = options.activations not in ("auto", "recompute")
    if options.resident and not shortage(replace(options, resident=0)):
        advice = "memory.resident=auto, which takes as many as fit"
    elif chosen and not shortage(replace(options, activations="auto")):
        advice = "memory.activations=auto, which keeps what has room"
    elif tier == "device" and largest in ("activations", "workspace", "shared"):
        advice = smaller_microbatches(options, largest_kind if largest == "workspace" else None)
    elif state.whole and largest in ("optimizer tiles", "optimizer scratch", "gradient ring"):
        advice = f"a {tier} budget of {format_bytes(needed)}, or optimizer.name=adamw, which steps units piece by piece"
    elif tier == "host" and options.home == "host":
        room = needed - short_by[tier] > memory[tier].get("home", 0)
        otherwise = (
            "the home on disk" if options.may_be_on_disk else f"a host budget of {format_bytes(needed)}"
        )
        if room and not options.cut:
            fits_one = not shortage(replace(options, microbatches=1, round_microbatches=None))
            otherwise = _FEWER_TOKENS if fits_one else smaller_microbatches(options, None)
        advice = _smaller_state(options, state, shortage, otherwise)
    elif tier == "disk" and options.commits and largest == "home":
        advice = (
            f"a disk budget of {format_bytes(needed)}, or memory.commits=none, which needs about half of it and goes "
            "back to the last checkpoint after a crash"
        )
    else:
        advice = f"a {tier} budget of {format_bytes(needed)}"
    if tier == "device":
        advice = without_products(state) + advice
    return (
        f"the smallest plan needs {format_bytes(needed)} on the {tier}, {size} of it for {largest}; "
        f"first try {advice}"
    )
