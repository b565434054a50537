import pytest

from planner.layouts import make_layout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_microbatches": 0}, "at least one"),
        ({"round_microbatches": 0}, "each of its rounds"),
        ({"num_microbatches": 2, "round_microbatches": 1, "ring": True}, "one round"),
        ({"rest": 2}, "the rest comes last"),
        ({"tiles": (0,)}, "tiles needs one entry"),
        ({"weight_bytes": (0, 1, 1, 1)}, "a trainable unit has weights"),
        ({"weight_bytes": (2, 1, 1, 1)}, "no slot holds"),
        ({"slot_bytes": ()}, "no slot holds"),
        ({"gradient_bytes": (1, 1, 4, 1)}, "no accumulator holds"),
        ({"offload": frozenset({0})}, r"offload may name units \(1, 2\)"),
        ({"offload": frozenset({3})}, r"offload may name units \(1, 2\)"),
        ({"stays": frozenset({4})}, r"stays may name units \[0, 1, 2, 3\]"),
        ({"staged": True}, "need a host buffer"),
        ({"tiles": (1, 1, 1, 1)}, "need a tile buffer"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_layout(4, **changes)


def test_the_rest_has_the_slot_and_the_accumulator_behind_the_others():
    layout = make_layout(4, rest=4, accumulator_bytes=(1,))
    assert (layout.resident_slot, layout.resident_accumulator) == (2, 1)


@pytest.mark.parametrize(
    ("trainable", "first"),
    [
        ((True, True, True), 0),
        ((False, True, False), 1),
        ((False, False, True), 2),
        ((False, False, False), 2),
    ],
)
def test_backward_begins_at_the_lowest_trained_unit(trainable, first):
    assert make_layout(3, trainable=trainable).first_backward == first
