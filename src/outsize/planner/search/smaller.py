"""What takes less memory at home than a plan does, what loses nothing first."""

from collections.abc import Iterator
from dataclasses import replace

from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.search.sizing import PlanOptions

SPLIT, BY_UNIT, INT8 = "optimizer.masters=split", "optimizer.clip=unit", "optimizer.state=int8"
SPLIT24 = "optimizer.masters=split24"


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
