"""Choose which units stay on the device, for steps and for forwards without a backward.

A token visits every unit once, in order, and the next token begins again: a cyclic scan. A fixed set that stays is
optimal for it. Per pass each unit is read once, so whatever the device can hold saves exactly its own bytes, and
nothing can save more; while a cache that drops what was used longest ago always drops what is needed next, and saves
nothing (bench/bench_experts.py counts it). So slots are given first, and units stay in what is left.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outsize.errors import InfeasiblePlanError
from outsize.model.sizes.model_spec import ModelSpec
from outsize.units import format_bytes

if TYPE_CHECKING:
    from outsize.planner.search.sizing import PlanOptions


# The unit that computes, and the two behind it: one would hide a steady link, the second what is unsteady in it.
PREFETCH = 2
# Of experts, where a token chooses more than one in so many, a batch soon needs them all, and whole units, which are
# loaded ahead, are better than experts on demand.
LEAST_SPARSITY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Where the units are while passes go on.

    Attributes:
        kept: units that stay on the device.
        streamed: units that come up in every pass, ascending.
        num_slots: places that streamed units take turns in; 0 where all stay.
        slot_bytes: of each.
        bytes_per_pass: what comes up in a pass once the kept units are there.
        device_bytes: what all of it holds.
    """

    kept: frozenset[int]
    streamed: tuple[int, ...]
    num_slots: int
    slot_bytes: int
    bytes_per_pass: int
    device_bytes: int


def plan_scan(
    weight_bytes: Sequence[int], room_bytes: int, *, prefetch: int | None = None, sparing: bool = False
) -> Scan:
    """Choose what stays within ``room_bytes``.

    Args:
        weight_bytes: of each unit in the order of the forward; 0 for those that need no place.
        room_bytes: of the device, for weights.
        prefetch: units loaded ahead; None is `PREFETCH`, or fewer where there is no room for so many.
        sparing: keep only what has to be kept and load one unit ahead, as long as it is unknown what else the device
            must hold; of a model that takes no more than half the room, keep all of it.

    Raises:
        InfeasiblePlanError: not even the largest unit fits.
    """
    units = [unit for unit, size in enumerate(weight_bytes) if size]
    if sum(weight_bytes) <= (room_bytes // 2 if sparing else room_bytes):
        return _scan(weight_bytes, frozenset(units), units, 0)
    ahead = PREFETCH if prefetch is None else prefetch
    for num_slots in range(min(ahead, 1 if sparing else ahead) + 1, 0, -1):
        scans = [
            scan
            for size in sorted({weight_bytes[unit] for unit in units})
            if (scan := _with_slots(weight_bytes, units, room_bytes, num_slots, size, sparing)) is not None
        ]
        if scans:
            return min(scans, key=lambda scan: scan.device_bytes if sparing else scan.bytes_per_pass)
        if prefetch is not None:
            break
    if sparing:
        return plan_scan(weight_bytes, room_bytes, prefetch=prefetch)
    least = max(weight_bytes) * (1 if prefetch is None else prefetch + 1)
    raise InfeasiblePlanError(
        f"units of up to {format_bytes(max(weight_bytes))} do not fit the device: beside weights, the forward and its "
        f"cache leave {format_bytes(room_bytes) if room_bytes > 0 else 'nothing'}; raise device_memory, or take a "
        "smaller batch or shorter prompts",
        {"device": least - room_bytes},
    )


def break_even_batch(
    bytes_per_pass: int, link_bytes_per_s: float, compute_s: float, batch: int
) -> float | None:
    """Return the batch (1 or more) at which computing takes as long as moving; None where either took nothing.

    Compute is taken to grow with the batch, as it does once weights no longer bound it; so this is a lower bound.

    Args:
        bytes_per_pass: that come up per token batch.
        link_bytes_per_s: what was measured while they came.
        compute_s: of one pass at ``batch``.
        batch: sequences.
    """
    if not bytes_per_pass or compute_s <= 0 or link_bytes_per_s <= 0:
        return None
    return max(batch * (bytes_per_pass / link_bytes_per_s) / compute_s, 1.0)


def _with_slots(
    weight_bytes: Sequence[int],
    units: Sequence[int],
    room_bytes: int,
    num_slots: int,
    slot_bytes: int,
    sparing: bool,
) -> Scan | None:
    """The scan whose slots are of this size; None where larger units do not all fit beside them."""
    resident = {unit for unit in units if weight_bytes[unit] > slot_bytes}
    left = room_bytes - num_slots * slot_bytes - sum(weight_bytes[unit] for unit in resident)
    if left < 0:
        return None
    others = [] if sparing else [unit for unit in units if unit not in resident]
    for unit in sorted(spread_order(others), key=lambda unit: -weight_bytes[unit]):
        if weight_bytes[unit] <= left:
            resident.add(unit)
            left -= weight_bytes[unit]
    return _scan(weight_bytes, frozenset(resident), units, num_slots)


def _scan(
    weight_bytes: Sequence[int], resident: frozenset[int], units: Sequence[int], num_slots: int
) -> Scan:
    streamed = tuple(unit for unit in units if unit not in resident)
    num_slots = min(num_slots, len(streamed))
    slot_bytes = max((weight_bytes[unit] for unit in streamed), default=0)
    return Scan(
        kept=resident,
        streamed=streamed,
        num_slots=num_slots,
        slot_bytes=slot_bytes,
        bytes_per_pass=sum(weight_bytes[unit] for unit in streamed),
        device_bytes=sum(weight_bytes[unit] for unit in resident) + num_slots * slot_bytes,
    )


def spread_order(units: Iterable[int]) -> list[int]:
    """Return units in an order of which every beginning lies evenly among them: van der Corput's sequence.

    So kept units give the link a head start at regular distances, and one more or one less that is kept moves no other.
    """
    ordered = list(units)
    return [ordered[place] for place in sorted(range(len(ordered)), key=_mirrored)]


def _mirrored(number: int) -> float:
    """Return the binary digits of ``number`` behind the point in reverse: van der Corput's sequence."""
    return sum((number >> digit & 1) / float(2 << digit) for digit in range(number.bit_length()))


def frozen_units(model: ModelSpec) -> list[int]:
    """Return the streamed units with weights that never train."""
    streamed = model.units[: model.num_streamed]
    return [unit.index for unit in streamed if unit.frozen or (unit.tensors and not unit.trainable)]


def spread(units: Sequence[int], number: int) -> frozenset[int]:
    """Return so many of ``units`` that lie evenly among the others."""
    return frozenset(units[index * len(units) // number] for index in range(number))


def resident_order(model: ModelSpec) -> list[int]:
    """Return the units that train in the order in which they become resident.

    First the rest, whose weights and gradient lie on the device in any case. Then others, so that those which are
    resident lie evenly among those which move, however many they are: the link has the time of all to move these.
    """
    trained, num_streamed = [unit.index for unit in model.units if unit.trainable], model.num_streamed
    streamed = [unit for unit in trained if unit < num_streamed]
    rest = [unit for unit in trained if unit >= num_streamed]
    return rest + spread_order(streamed)


def why_not_resident(options: "PlanOptions") -> str:
    """Return why no unit that trains can rest on the device; empty where some can."""
    state, transport = options.state, options.transport
    plain = state is None or (state.exact and not state.whole and state.num_moments == 2)
    reasons = {
        "several workers take turns at units": options.num_workers > 1,
        "ranks share the optimizer's state": options.nodes > 1,
        "a home on disk keeps all state": options.home == "disk",
        "only AdamW with its exact state steps on a device": not plain,
        "encoded weights and gradients go over the link": not (
            transport.is_raw("weights") and transport.is_raw("gradients")
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
