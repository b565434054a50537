"""Sizes of planes that hold factors follow from shapes, as torch makes them."""

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from optim.reference import ADAFACTOR
from outsize.model.sizes.model_spec import ALIGN_ELEMENTS, PLANE_ELEMENTS, ModelSpec, pack_unit
from outsize.optim.optimizer_names import factor_shape, factored
from outsize.optim.optimizer_spec import StateLayout
from outsize.optim.shares import commit_record_bytes, committed_bytes, home_bytes
from outsize.storage.home_layout import HomeLayout

FACTORS = ("rows/none", "columns/none", "none/full", "scalar/one")
SHAPE = st.lists(st.integers(1, 9), max_size=4).map(tuple)
TENSORS = st.lists(st.tuples(SHAPE, st.booleans()), min_size=1, max_size=6)
LAYOUTS = [
    StateLayout(dtype=dtype, masters=masters, num_moments=0, state_of=ADAFACTOR, temporaries=3)
    for dtype, masters in (("fp32", "separate"), ("bf16", "separate"), ("bf16", "split"))
]


@given(TENSORS)
def test_factors_of_a_unit_lie_apart_and_whole(tensors):
    """Each within the plane, none over another, aligned; only of what trains."""
    unit = pack_unit(0, "u", "block", [(f"p{i}", s, trains, True) for i, (s, trains) in enumerate(tensors)])
    for factor in FACTORS:
        seen = factored(unit, factor)
        assert seen.numel % PLANE_ELEMENTS == 0 < seen.numel
        assert all(tensor.offset % ALIGN_ELEMENTS == 0 for tensor in seen.tensors)
        ends = [0, *(t.offset + t.numel for t in seen.tensors)]
        assert all(t.offset >= end for t, end in zip(seen.tensors, ends, strict=False))
        assert ends[-1] <= seen.numel
        wanted = {
            f"p{i}" for i, (s, trains) in enumerate(tensors) if trains and factor_shape(s, factor) is not None
        }
        assert {t.name for t in seen.tensors} == wanted
        assert all(t.numel == prod(t.shape) for t in seen.tensors)


@given(st.lists(TENSORS, min_size=1, max_size=4), st.sampled_from(LAYOUTS))
def test_a_home_is_as_large_as_its_planes_say(units, layout):
    """What a budget counts is what is laid out, once and twice."""
    specs = tuple(
        pack_unit(i, f"u{i}", "block", [(f"u{i}.p{j}", s, t, True) for j, (s, t) in enumerate(tensors)])
        for i, tensors in enumerate(units)
    )
    model = ModelSpec(units=specs, dtype=layout.dtype)
    assert HomeLayout(model, layout.planes).num_bytes == sum(home_bytes(unit, layout) for unit in specs)
    twice = [name for name in layout.planes if name != "gradient"]
    assert HomeLayout(model, layout.planes, twice=twice).num_bytes == sum(
        committed_bytes(unit, layout) for unit in specs
    )
    assert commit_record_bytes(model, planes=layout.planes) > 0
    trained = [unit for unit in specs if unit.trainable]
    largest = max((unit.numel for unit in trained), default=0)
    tile = layout.whole_tile(largest)
    room = layout.tile_room(model, tile)
    assert tile >= largest
    for unit in trained:
        assert all(plane.items_of(unit) <= room[name] for name, plane in layout.tile_planes.items())


def test_a_large_matrix_takes_a_few_thousandths_of_a_byte():
    unit = pack_unit(0, "u", "block", [("p", (4096, 14336), True, True)])
    layout = StateLayout(
        dtype="bf16", masters="split", gradients="none", num_moments=0, state_of=ADAFACTOR, temporaries=3
    )
    kept = home_bytes(unit, layout) / unit.numel
    assert 4.125 < kept < 4.127
