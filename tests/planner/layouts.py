"""Layouts for tests: small ones by hand, random ones by hypothesis."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from outsize.planner.program.stages import HALVES, Choice, Kept, Stages, slots_for, spans_down, spans_up
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.upgrades import Way, kept_in_stages


def make_layout(num_streamed: int = 4, **changes: Any) -> StepLayout:
    """Units of one byte, all trained, two slots, one accumulator, no rest; ``changes`` replace fields."""
    has_rest = changes.get("rest") is not None
    num_units = num_streamed + has_rest
    fields: dict[str, Any] = {
        "num_streamed": num_streamed,
        "rest": None,
        "num_microbatches": 1,
        "trainable": (True,) * num_units,
        "weight_bytes": (1,) * num_units,
        "gradient_bytes": (1,) * num_units,
        "slot_bytes": (1, 1),
        "accumulator_bytes": (1,),
        "tiles": (0,) * num_units,
    }
    return StepLayout(**{**fields, **changes})


@st.composite
def layouts(draw: st.DrawFn) -> StepLayout:
    """Any layout: rest or none, frozen and empty units, uneven sizes, any slots, rounds, kept units, tiles, staging."""
    num_streamed = draw(st.integers(1, 6))
    has_rest = draw(st.booleans())
    num_units = num_streamed + has_rest

    def per_unit(values: st.SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(st.lists(values, min_size=num_units, max_size=num_units)))

    weights = per_unit(st.integers(0, 3))
    trainable = tuple(bool(w) and t for w, t in zip(weights, per_unit(st.booleans()), strict=True))
    gradients = tuple(2 * w * t for w, t in zip(weights, trainable, strict=True))
    slots = (max(weights[:num_streamed]), *draw(st.lists(st.integers(1, 3), max_size=3)))
    accumulators = (max(gradients[:num_streamed]), *draw(st.lists(st.integers(1, 6), max_size=2)))
    on_disk = draw(st.booleans())
    tiles = tuple(n * t for n, t in zip(per_unit(st.integers(1, 4)), trainable, strict=True))
    clip = draw(st.booleans())
    ring = not clip and draw(st.booleans())
    layout = StepLayout(
        num_streamed=num_streamed,
        rest=num_streamed if has_rest else None,
        num_microbatches=draw(st.integers(1, 5)),
        round_microbatches=None if ring else draw(st.none() | st.integers(1, 4)),
        trainable=trainable,
        weight_bytes=weights,
        gradient_bytes=gradients,
        slot_bytes=slots,
        accumulator_bytes=accumulators,
        prefetch_depth=draw(st.integers(0, 4)),
        clip=clip,
        unit_clip=not clip and draw(st.booleans()),
        ring=ring,
        tiles=tiles if on_disk or ring else (0,) * num_units,
        tiles_on_disk=on_disk,
        num_host_buffers=draw(st.integers(1, 4)),
        num_tile_buffers=draw(st.integers(1, 4)),
        staged=on_disk and draw(st.booleans()),
        commits=on_disk and draw(st.booleans()),
    )
    offload = draw(st.sets(st.sampled_from(layout.offloadable))) if layout.offloadable else set()
    size = layout.round_size
    choices = st.lists(st.sampled_from(Choice), min_size=size, max_size=size)
    none = (Choice.RECOMPUTE,) * size
    kept = tuple(tuple(draw(choices)) if u in layout.keepable else none for u in range(num_streamed))
    layout = replace(layout, offload=frozenset(offload), kept=kept if draw(st.booleans()) else ())
    stays = draw(st.frozensets(st.sampled_from(range(num_streamed))))
    layout = replace(layout, stays=frozenset(unit for unit in stays if weights[unit]))
    return layout if on_disk else with_resident(layout, draw(st.frozensets(st.integers(0, num_units - 1))))


def with_resident(layout: StepLayout, units: frozenset[int]) -> StepLayout:
    """``layout`` with those of ``units`` resident that can be."""
    resident = units & {*layout.step_order}
    tiles = tuple(0 if unit in resident else count for unit, count in enumerate(layout.tiles))
    stays = layout.stays | (resident - {layout.rest})
    return replace(layout, stays=stays, resident=resident, tiles=tiles, ring=layout.ring and any(tiles))


def first_kept(counts: Sequence[int], num_microbatches: int, choice: Choice = Choice.KEEP) -> Kept:
    """``choice`` for the first ``counts[unit]`` microbatches of each unit."""
    return tuple((choice,) * count + (Choice.RECOMPUTE,) * (num_microbatches - count) for count in counts)


def _streamed(layout: StepLayout) -> StepLayout:
    """``layout`` without a ring, and with nothing resident."""
    tiles = layout.tiles if layout.tiles_on_disk else (0,) * layout.num_units
    return replace(layout, resident=frozenset(), ring=False, tiles=tiles)


@st.composite
def shared_layouts(draw: st.DrawFn) -> list[StepLayout]:
    """Layouts of two to four nodes that share a step: each has memory and tiles of its own, all else is the same."""
    base = _streamed(draw(layouts()))
    on_disk = base.tiles_on_disk and any(base.tiles)
    tiles = base.tiles if on_disk else (0,) * base.num_units
    base = replace(base, ring=False, unit_clip=False, tiles=tiles)
    num_nodes = draw(st.integers(2, 4))
    found = []
    for _ in range(num_nodes):
        extra = draw(st.lists(st.integers(1, 3), max_size=3))
        tiles = tuple(draw(st.integers(0, 3)) * trains for trains in base.trainable)
        found.append(
            replace(
                base,
                slot_bytes=(max(base.slot_bytes), *extra),
                prefetch_depth=draw(st.integers(0, 4)),
                num_host_buffers=draw(st.integers(1, 4)),
                num_tile_buffers=draw(st.integers(1, 4)),
                tiles=tiles if any(base.tiles) else base.tiles,
                num_nodes=num_nodes,
                own_elements=(1,) * base.num_units,
            )
        )
    return found


@st.composite
def cuts(draw: st.DrawFn, total: int) -> list[int]:
    """Any sizes of one or more that add up to ``total``."""
    sizes = []
    while total:
        sizes.append(draw(st.integers(1, total)))
        total -= sizes[-1]
    return sizes


@st.composite
def staged_layouts(draw: st.DrawFn) -> StepLayout:
    """Any layout of several workers: any cut, rounds, frozen and empty units, a rest that trains or not, any peers."""
    base = _streamed(draw(layouts()))
    num_streamed = base.num_streamed
    weights = base.weight_bytes[:num_streamed]
    trainable = base.trainable[:num_streamed]
    has_rest = draw(st.booleans())
    if has_rest:
        weights = (*weights, draw(st.integers(0, 3)))
        trainable = (*trainable, weights[-1] > 0 and draw(st.booleans()))
    gradients = tuple(2 * w * t for w, t in zip(weights, trainable, strict=True))
    bottom = next((u for u in range(num_streamed) if trainable[u]), num_streamed - 1)
    users: set[int] = set()
    if has_rest and trainable[-1]:
        bottom, users = 0, draw(st.sets(st.integers(0, num_streamed - 1), min_size=1))
    fused = draw(st.integers(bottom, num_streamed - 1))
    below = draw(cuts(fused - bottom)) if fused > bottom else []
    stages = Stages(
        forward=spans_up(draw(cuts(fused)) if fused else []),
        backward=spans_down([num_streamed - fused, *below], num_streamed),
        round_size=draw(st.integers(1, 4)),
        overlaps=draw(st.booleans()),
    )
    slot_halves, accumulator_halves = draw(st.sampled_from(HALVES))
    stages = replace(stages, slot_halves=slot_halves, accumulator_halves=accumulator_halves)
    num_workers = draw(st.integers(1, min(4, stages.num_stages)))
    num_units = num_streamed + has_rest
    tiles = (
        tuple((t + u % 2) * t for u, t in enumerate(trainable)) if draw(st.booleans()) else (0,) * num_units
    )
    num_microbatches = draw(st.integers(1, 7))
    choice = draw(st.sampled_from([choice for choice in Choice if not choice.leaves]))
    leaving = st.sampled_from([Choice.OFFLOAD_ATTENTION, Choice.OFFLOAD_PRODUCTS])
    away = (
        draw(st.dictionaries(st.integers(bottom, num_streamed - 1), leaving)) if draw(st.booleans()) else {}
    )
    kept = kept_in_stages(stages, num_streamed, num_microbatches, Way(choice, away))
    layout = replace(
        base,
        rest=num_streamed if has_rest else None,
        ring=False,
        tiles_on_disk=True,
        num_microbatches=num_microbatches,
        round_microbatches=None,
        trainable=trainable,
        weight_bytes=weights,
        gradient_bytes=gradients,
        slot_bytes=slots_for(stages, weights),
        accumulator_bytes=slots_for(stages, gradients, only_backward=True),
        tiles=tiles,
        staged=any(tiles) and draw(st.booleans()),
        offload=frozenset(),
        stays=frozenset(),
        kept=kept,
        num_workers=num_workers,
        stages=replace(stages, cursor=draw(st.integers(0, num_workers - 1))),
        rest_users=frozenset(users),
    )
    peers = sorted(layout.neighbours)
    some = (
        st.sampled_from([[], peers]) | st.lists(st.sampled_from(peers), unique=True) if peers else st.just([])
    )
    return replace(layout, peers=frozenset(draw(some)))
