"""Shares of ranks: nothing twice, nothing left out, and nobody has much more than another."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from outsize.model.sizes.model_spec import PLANE_ELEMENTS, ModelSpec, pack_unit
from outsize.optim.optimizer_spec import GRADIENT, WEIGHTS, StateLayout
from outsize.optim.shares import largest_share, share_granule, shares


@st.composite
def models(draw):
    sizes = draw(st.lists(st.integers(1, 3_000_000), min_size=1, max_size=8))
    units = tuple(
        pack_unit(i, f"u{i}", "block", [(f"p{i}", (size,), draw(st.booleans()), True)])
        for i, size in enumerate(sizes)
    )
    return ModelSpec(units=units, dtype="bf16")


@given(models(), st.integers(1, 9))
def test_ranges_follow_one_another_and_cover_what_trains(model, num_ranks):
    granule = share_granule(model, num_ranks)
    for unit, ranges in zip(model.units, shares(model, num_ranks), strict=True):
        assert len(ranges) == num_ranks
        bounds = [part.start for part in ranges] + [ranges[-1].stop]
        assert bounds == sorted(bounds)
        assert (bounds[0], bounds[-1]) == (0, unit.numel * unit.trainable)
        assert all(a.stop == b.start for a, b in pairwise(ranges))
        assert all(bound % granule == 0 or bound == unit.numel for bound in bounds)
        assert all(bound % PLANE_ELEMENTS == 0 for bound in bounds)


@given(models(), st.integers(1, 9))
def test_no_rank_steps_much_more_than_its_part(model, num_ranks):
    totals = [sum(len(ranges[rank]) for ranges in shares(model, num_ranks)) for rank in range(num_ranks)]
    trained = sum(unit.numel for unit in model.units if unit.trainable)
    granule = share_granule(model, num_ranks)
    assert max(totals) - min(totals) <= 2 * granule
    assert sum(totals) == trained
    assert sum(largest_share(model, num_ranks)) == max(totals)
    if granule > PLANE_ELEMENTS:
        assert granule * 256 * num_ranks <= trained


LAYOUTS = [
    StateLayout(dtype="fp32"),
    StateLayout(dtype="bf16"),
    StateLayout(dtype="bf16", masters="split"),
    StateLayout(dtype="bf16", masters="split", moments="bf16"),
    StateLayout(dtype="bf16", masters="split", moments="int8"),
]


@given(
    st.lists(st.integers(2**20, 2**28), min_size=1, max_size=8),
    st.integers(2, 8),
    st.sampled_from(LAYOUTS),
)
def test_no_rank_keeps_two_percent_more_than_its_part(sizes, num_ranks, layout):
    """Of all that an optimizer keeps, whole sectors of it, of units from a million parameters on."""
    units = [pack_unit(i, f"u{i}", "block", [(f"p{i}", (size,), True, True)]) for i, size in enumerate(sizes)]
    model = ModelSpec(units=tuple(units), dtype=layout.dtype)
    names = tuple(name for name in layout.planes if name not in (WEIGHTS, GRADIENT))
    whole = sum(layout.bytes_of(unit, names=names) for unit in units)
    for rank in range(num_ranks):
        kept = sum(
            layout.bytes_of(unit, len(ranges[rank]), names)
            for unit, ranges in zip(units, shares(model, num_ranks), strict=True)
        )
        assert kept <= (1 / num_ranks + 0.02) * whole
