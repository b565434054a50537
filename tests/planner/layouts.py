"""Layouts for tests: small ones by hand, random ones by hypothesis."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from outsize.planner.layout import StepLayout


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
    """Any layout: rest or none, frozen and empty units, uneven sizes, any number of slots, tiles, staging."""
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
    layout = StepLayout(
        num_streamed=num_streamed,
        rest=num_streamed if has_rest else None,
        num_microbatches=draw(st.integers(1, 3)),
        trainable=trainable,
        weight_bytes=weights,
        gradient_bytes=gradients,
        slot_bytes=slots,
        accumulator_bytes=accumulators,
        prefetch_depth=draw(st.integers(0, 4)),
        clip=draw(st.booleans()),
        tiles=tiles if on_disk else (0,) * num_units,
        num_host_buffers=draw(st.integers(1, 4)),
        num_tile_buffers=draw(st.integers(1, 4)),
        staged=on_disk and draw(st.booleans()),
    )
    offload = draw(st.sets(st.sampled_from(layout.offloadable))) if layout.offloadable else set()
    return replace(layout, offload=frozenset(offload))
