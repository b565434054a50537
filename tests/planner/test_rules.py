"""Each rule broken by the shortest program that breaks it: the last op is refused, for the reason given."""

from dataclasses import replace

import pytest

from outsize.planner.program.program import Kind, Op, parse
from outsize.planner.program.program_rules import Rules
from outsize.planner.program.rules_home import BrokenRuleError
from outsize.planner.program.step_layout import StepLayout
from planner.layouts import make_layout

ONE = make_layout(1)
TWO = make_layout(2)
CLIPPED = make_layout(2, clip=True)
RESTED = make_layout(2, rest=2)
FROZEN = make_layout(2, trainable=(False, True))
TIED = make_layout(2, weight_bytes=(0, 1), trainable=(False, True))
OFFLOADED = make_layout(3, offload=frozenset({1}))
TILED = make_layout(1, tiles=(2,), num_tile_buffers=2)
CLIPPED_TILES = make_layout(1, clip=True, tiles=(2,), num_tile_buffers=2)
RING = make_layout(1, ring=True, tiles=(2,), tiles_on_disk=False, num_tile_buffers=1)
ROUNDS = make_layout(1, num_microbatches=3, round_microbatches=2)
RESIDENT = make_layout(2, resident=frozenset({1}), stays=frozenset({1}), clip=True, tiles_on_disk=False)
STAGED = make_layout(1, staged=True, num_host_buffers=2)

# The whole backward of a single unit.
DONE = "LOAD 0@w0.0; ACC 0@w0.0; FB 0.0@w0; "
# Down and through the turn, with two units.
TURNED = "LOAD 0@w0.0; LOAD 1@w0.1; F 0.0@w0; ACC 1@w0.0; FB 1.0@w0; "
# The same where the second unit has slots and accumulators of its own.
BEHIND = "LOAD 0@w0.0; LOAD 1@w0.2; F 0.0@w0; ACC 1@w0.1; FB 1.0@w0; "


def broken(layout: StepLayout, text: str) -> str:
    *lawful, last = parse(text).ops
    rules = Rules(layout)
    for op in lawful:
        rules.check(op)
    with pytest.raises(BrokenRuleError) as caught:
        rules.check(last)
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "text", "reason"),
    [
        # 1 and 2: what runs, when, on what
        (RESTED, "F 2.0@w0", "the rest does not run by itself"),
        (FROZEN, TURNED + "B 0.0@w0", "nothing up to unit 0 trains"),
        (TWO, TURNED + "B 1.0@w0", "the last unit runs forward and backward in one op, FB"),
        (TWO, "LOAD 0@w0.0; ACC 0@w0.0; B 0.0@w0", "its forward has not run"),
        (
            TWO,
            "LOAD 0@w0.0; F 0.0@w0; ACC 0@w0.0; B 0.0@w0",
            "unit 1 has not made the gradient that it starts from",
        ),
        (TWO, "LOAD 1@w0.0; ACC 1@w0.0; FB 1.0@w0", "unit 0 has not made its input"),
        (OFFLOADED, "SAVE 1.0@w0", "its forward has not run"),
        (
            OFFLOADED,
            "LOAD 0@w0.0; F 0.0@w0; LOAD 1@w0.1; F 1.0@w0; SAVE 1.0@w0; SAVE 1.0@w0",
            "it has been saved already",
        ),
        (
            OFFLOADED,
            "LOAD 0@w0.0; F 0.0@w0; LOAD 1@w0.1; F 1.0@w0; SAVE 1.0@w0; FREE 0@w0.0; LOAD 2@w0.0; "
            "ACC 2@w0.0; FB 2.0@w0; GRAD 2@w0; ACC 1@w0.0; B 1.0@w0",
            "its input has not come back to the device",
        ),
        # 3: slots and accumulators
        (TWO, "F 0.0@w0", "unit 0 is in no slot"),
        (RESTED, "LOAD 0@w0.0; F 0.0@w0", "unit 2 is in no slot"),
        (TWO, TURNED + "FREE 0@w0.0; ACC 0@w0.0", "accumulator 0 still holds the gradient of unit 1"),
        (TWO, TURNED + "GRAD 1@w0; ACC 0@w0.0; FREE 0@w0.0; B 0.0@w0", "unit 0 is in no slot"),
        (TWO, TURNED + "B 0.0@w0", "the gradient of unit 0 has no accumulator"),
        (
            RESTED,
            "LOAD 2@w0.2; " + TURNED.replace("; FB 1.0@w0; ", "; FB 1.0@w0"),
            "the gradient of unit 2 has no accumulator",
        ),
        (TIED, "LOAD 0@w0.0", "unit 0 has no weights of its own"),
        (RESTED, "LOAD 2@w0.0", "unit 2 has slot 2 of its own"),
        (RESTED, "ACC 2@w0.0", "unit 2 has accumulator 1 of its own"),
        (
            ONE,
            "LOAD 0@w0.0; FREE 0@w0.0; LOAD 0@w0.0; FREE 0@w0.0; LOAD 0@w0.0",
            "unit 0 has been loaded twice already",
        ),
        (FROZEN, "ACC 0@w0.0", "unit 0 does not train"),
        (
            make_layout(1, accumulator_bytes=(1, 1)),
            "ACC 0@w0.0; ACC 0@w0.1",
            "unit 0 has an accumulator already",
        ),
        (
            ONE,
            DONE + "GRAD 0@w0; ACC 0@w0.0",
            "a backward that adds to the gradient of unit 0 has run already",
        ),
        (
            make_layout(2, slot_bytes=(2, 1), weight_bytes=(2, 1)),
            "LOAD 0@w0.1",
            "slot 1 has 1 bytes, unit 0 needs 2",
        ),
        # 4: gradients leave whole
        (make_layout(1, num_microbatches=2), DONE + "GRAD 0@w0", "unit 0 has not run all its backwards"),
        (RESTED, "LOAD 2@w0.2; ACC 2@w0.1; " + TURNED + "GRAD 2@w0", "unit 0 has not run all its backwards"),
        # and of rounds, of each
        (ONE, DONE + "GRAD 0@w0; SUM 0@w0.0", "gradients are summed in one round"),
        (ROUNDS, DONE + "GRAD 0@w0", "unit 0 has not run all its backwards"),
        (ROUNDS, DONE + "FB 0.1@w0; GRAD 0@w0; FB 0.2@w0", "the gradient of unit 0 has no accumulator"),
        (
            ROUNDS,
            DONE + "FB 0.1@w0; GRAD 0@w0; ACC 0@w0.0",
            "a backward that adds to the gradient of unit 0 has run already",
        ),
        (ROUNDS, DONE + "FB 0.1@w0; SUM 0@w0.0", "accumulator 0 still holds the gradient of unit 0"),
        (ROUNDS, DONE + "FB 0.1@w0; GRAD 0@w0; STEP 0", "the gradient of unit 0 is not home"),
        (
            replace(ROUNDS, clip=True),
            DONE + "FB 0.1@w0; NORM 0@w0",
            "unit 0 has backwards to run in later rounds",
        ),
        (ONE, DONE + "NORM 0@w0", "norms are taken only where gradients are clipped"),
        (RING, DONE + "GRAD 0@w0", "gradients leave tile by tile, through the ring"),
        (TILED, DONE + "GRAD 0#0@w0>t0", "gradients leave whole"),
        (RING, DONE + "GRAD 0#0@w0>t0; STEP 0#0@t0; GRAD 0#0@w0>t0", "it has left already"),
        # 5: steps
        (ONE, DONE + "STEP 0", "the gradient of unit 0 is not home"),
        (ONE, DONE + "GRAD 0@w0; STEP 0; STEP 0", "unit 0 has stepped already"),
        (FROZEN, "STEP 0", "unit 0 does not train"),
        (RESIDENT, BEHIND + "GRAD 1@w0", "the gradient of unit 1 stays where the unit is"),
        (RESIDENT, BEHIND + "UPDATE 1@w0", "the norm of unit 1 has not been taken"),
        (RESIDENT, BEHIND + "NORM 1@w0; UPDATE 1@w0", "gradients have not been clipped"),
        (RESIDENT, BEHIND + "NORM 1@w0; STEP 1", "unit 1 steps where it is resident"),
        (RESIDENT, "LOAD 0@w0.0; F 0.0@w0; ACC 0@w0.0; UPDATE 0@w0", "unit 0 has not run all its backwards"),
        (
            RESIDENT,
            BEHIND + "ACC 0@w0.0; B 0.0@w0; NORM 0@w0; UPDATE 0@w0",
            "unit 0 rests at home, and steps there",
        ),
        (RESIDENT, "ACC 1@w0.0", "unit 1 has accumulator 1 of its own"),
        (ONE, "CLIP", "gradients are not clipped"),
        (CLIPPED, TURNED + "NORM 1@w0; CLIP", "the norms of units [0] have not been taken"),
        (make_layout(1, clip=True), DONE + "NORM 0@w0; CLIP; CLIP", "gradients are clipped once"),
        (make_layout(1, clip=True), DONE + "NORM 0@w0; GRAD 0@w0; STEP 0", "gradients have not been clipped"),
        (
            CLIPPED_TILES,
            DONE + "NORM 0@w0; GRAD 0@w0; READ 0#0>t0; STEP 0#0@t0",
            "gradients have not been clipped",
        ),
        (TILED, DONE + "READ 0#0>t0", "the gradient of unit 0 is not home"),
        (TILED, DONE + "GRAD 0@w0; READ 0#0>t0; READ 0#0>t1", "it has been read already"),
        # 6: buffers
        (STAGED, "READ 0>h2", "there are 2 host buffers"),
        (STAGED, "READ 0>h0; READ 0>h0", "host buffer 0 is still in use"),
        (STAGED, "LOAD 0@w0.0", "units pass through host buffers"),
        (STAGED, "LOAD 0@w0.0<h0", "host buffer 0 holds nothing of unit 0 from READ"),
        (STAGED, "WRITE 0<h0", "host buffer 0 holds nothing of unit 0 from GRAD"),
        (
            STAGED,
            "READ 0>h0; LOAD 0@w0.0<h0; ACC 0@w0.0; FB 0.0@w0; GRAD 0@w0>h1; WRITE 0<h1; STEP 0; READ 0>h0",
            "unit 0 has stepped already",
        ),
        (TILED, DONE + "GRAD 0@w0; READ 0#0>t0; READ 0#1>t0", "tile buffer 0 is still in use"),
        (RING, DONE + "GRAD 0#0@w0>t0; GRAD 0#1@w0>t0", "tile buffer 0 is not ready for it"),
        (RING, DONE + "STEP 0#0@t0", "tile buffer 0 does not hold it, ready to step"),
    ],
)
def test_a_rule_is_broken(layout, text, reason):
    assert broken(layout, text) == reason


@pytest.mark.parametrize(
    ("layout", "text", "reason"),
    [
        (TWO, TURNED + "GRAD 1@w0; STEP 1; FREE 1@w0.1; FREE 0@w0.0", "unit 0 has not run all its backwards"),
        (ONE, DONE + "GRAD 0@w0; STEP 0", "slots still hold units [0]"),
        (ONE, DONE + "FREE 0@w0.0", "accumulators still hold the gradients of units [0]"),
        (ONE, DONE + "FREE 0@w0.0; GRAD 0@w0", "unit 0 has not stepped"),
        (
            TILED,
            DONE + "FREE 0@w0.0; GRAD 0@w0; READ 0#0>t0; STEP 0#0@t0; WRITE 0#0<t0",
            "unit 0 has not stepped",
        ),
        (TILED, DONE + "FREE 0@w0.0; GRAD 0@w0; READ 0#0>t1", "tile buffers ['1'] are not empty"),
        (
            STAGED,
            "READ 0>h0; LOAD 0@w0.0<h0; ACC 0@w0.0; FB 0.0@w0; FREE 0@w0.0; GRAD 0@w0>h1",
            "host buffers ['1'] are not empty",
        ),
    ],
)
def test_something_is_left_behind(layout, text, reason):
    rules = Rules(layout)
    for op in parse(text):
        rules.check(op)
    with pytest.raises(BrokenRuleError) as caught:
        rules.check_end()
    assert str(caught.value) == reason


def test_an_op_with_fields_of_another_kind_is_refused():
    with pytest.raises(BrokenRuleError, match="other fields"):
        Rules(ONE).check(Op(kind=Kind.STEP, unit=0, microbatch=0))
