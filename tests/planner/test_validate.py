from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outsize.errors import ProgramError
from outsize.planner.passes.slots import MemoryLimits, validate
from outsize.planner.passes.step_parts import build_step
from outsize.planner.program.program import Kind, Program, parse, parse_op, render
from outsize.planner.program.stages import Choice
from planner.layouts import first_kept, layouts, make_layout

ESSENTIAL = (Kind.LOAD, Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.BACKWARD, Kind.GRAD, Kind.STEP)
# Two microbatches, one offloaded unit, clipping, tiles.
LAYOUT = make_layout(
    3, num_microbatches=2, offload=frozenset({1}), clip=True, tiles=(2, 1, 1), num_tile_buffers=2
)


@given(layouts())
def test_every_step_that_is_built_obeys_the_rules(layout):
    validate(build_step(layout), layout)


@given(layouts(), layouts())
def test_a_plan_for_another_model_is_refused(layout, other):
    assume(layout.num_streamed != other.num_streamed)
    with pytest.raises(ProgramError):
        validate(build_step(other), layout)


@given(layouts(), st.data())
def test_no_op_can_be_left_out(layout, data):
    ops = build_step(layout).ops
    n = data.draw(st.integers(0, len(ops) - 1))
    with pytest.raises(ProgramError):
        validate(Program(ops[:n] + ops[n + 1 :]), layout)


@given(layouts(), st.data())
def test_no_op_can_run_twice(layout, data):
    ops = build_step(layout).ops
    n = data.draw(st.integers(0, len(ops) - 1))
    with pytest.raises(ProgramError):
        validate(Program(ops[: n + 1] + ops[n:]), layout)


@given(layouts(), st.data())
def test_no_op_that_others_need_can_come_last(layout, data):
    ops = build_step(layout).ops
    movable = [i for i, op in enumerate(ops) if op.kind in ESSENTIAL and op.kind is not Kind.STEP]
    n = data.draw(st.sampled_from(movable))
    layout_ends_there = n == len(ops) - 1 or all(op.kind is ops[n].kind for op in ops[n:])
    if not layout_ends_there:
        with pytest.raises(ProgramError):
            validate(Program((*ops[:n], *ops[n + 1 :], ops[n])), layout)


@pytest.mark.parametrize("late", ["COMMIT", "CLIP", "FB 2.0@w0", "LOAD 0@w0.0"])
def test_nothing_comes_behind_a_commit(late):
    layout = replace(LAYOUT, commits=True)
    ops = build_step(layout).ops
    with pytest.raises(ProgramError, match="committed once, and last"):
        validate(Program((*ops, parse_op(late))), layout)


@given(layouts(), st.data())
def test_no_op_that_needs_others_can_come_first(layout, data):
    ops = build_step(layout).ops
    movable = [i for i, op in enumerate(ops) if op.kind in (Kind.BACKWARD, Kind.GRAD, Kind.STEP)]
    if movable:
        n = data.draw(st.sampled_from(movable))
        with pytest.raises(ProgramError):
            validate(Program((ops[n], *ops[:n], *ops[n + 1 :])), layout)


@pytest.mark.parametrize(
    ("op", "instead", "message"),
    [
        ("LOAD 1@w0.1", "LOAD 1@w0.7", "units share slots 0 to 1"),
        ("LOAD 1@w0.1", "LOAD 1@w0.0", "slot 0 still holds unit 0"),
        ("LOAD 1@w0.1", "LOAD 1@w0.1<h0", "no host buffers"),
        ("LOAD 1@w0.1", "LOAD 2@w0.1", "unit 2 is in a slot already"),
        ("FREE 0@w0.0", "FREE 1@w0.0", "slot 0 does not hold unit 1"),
        ("F 1.0@w0", "F 1.1@w0", "unit 1 runs microbatch 0 next"),
        ("F 0.1@w0", "F 1.0@w0", "unit 0 is in no slot|unit 1"),
        ("F 1.0@w0", "F 2.0@w0", "forward and backward in one op"),
        ("F 1.0@w0", "F 1.2@w0", "2 microbatches"),
        ("F 1.0@w0", "F 3.0@w0", "3 units"),
        ("F 1.0@w0", "F 1.0@w1", "no worker 1"),
        ("FB 2.0@w0", "FB 1.0@w0", "only unit 2"),
        ("B 1.0@w0", "B 1.1@w0", "has not come back|runs the backward of microbatch 0 next"),
        ("SAVE 1.0@w0", "SAVE 0.0@w0", "keeps the inputs of unit 0"),
        ("FETCH 1.0@w0", "FETCH 2.0@w0", "has not been saved"),
        ("ACC 2@w0.0", "ACC 2@w0.1", "units share accumulators 0 to 0"),
        ("ACC 2@w0.0", "ACC 1@w0.0", "the gradient of unit 2 has no accumulator"),
        ("NORM 2@w0", "NORM 1@w0", "the gradient of unit 1 is in no accumulator"),
        ("NORM 2@w0", "GRAD 2@w0", "the norm of unit 2 has not been taken"),
        ("GRAD 2@w0", "GRAD 2@w0>h0", "no host buffers"),
        ("CLIP", "STEP 0", "unit 0 steps by tiles"),
        ("CLIP", "READ 0#0>t0", "has not been clipped|have not been clipped|still in use"),
        ("READ 0#0>t0", "READ 0#5>t0", "unit 0 has 2 tiles"),
        ("READ 0#0>t0", "READ 0#0>t9", "2 tile buffers"),
        ("STEP 0#0@t0", "STEP 0#0@t1", "tile buffer 1 does not hold it"),
        ("WRITE 0#0<t0", "WRITE 0#1<t0", "tile buffer 0 does not hold it, stepped"),
    ],
)
def test_a_wrong_op_is_named(op, instead, message):
    ops = list(build_step(LAYOUT).ops)
    ops[ops.index(parse_op(op))] = parse_op(instead)
    with pytest.raises(ProgramError, match=message):
        validate(Program(tuple(ops)), LAYOUT)


@pytest.mark.parametrize(
    ("op", "instead", "message"),
    [
        ("FP 1.0@w0", "F 1.0@w0", "the layout keeps what its backward needs: FP"),
        ("FP 1.0@w0", "FA 1.0@w0", "the layout keeps what its backward needs: FP"),
        ("F 1.1@w0", "FP 1.1@w0", "the layout keeps nothing of it"),
        ("OFFLOAD 1.0@w0", "OFFLOAD 1.1@w0", "keeps nothing of unit 1 that leaves"),
        ("OFFLOAD 1.0@w0", "SAVE 1.0@w0", "the layout keeps the inputs of unit 1|it has been saved"),
        ("ONLOAD 1.0@w0", "ONLOAD 1.1@w0", "it has not been offloaded"),
        ("ONLOAD 1.0@w0", "FREE 1@w0.1", "what its forward kept has not come back|unit 1 is in no slot"),
    ],
)
def test_a_wrong_op_of_what_is_kept_is_named(op, instead, message):
    kept = first_kept((0, 1, 0), 2, Choice.OFFLOAD_PRODUCTS)
    layout = make_layout(3, num_microbatches=2, kept=kept, slot_bytes=(1, 1, 1))
    ops = list(build_step(layout).ops)
    ops[ops.index(parse_op(op))] = parse_op(instead)
    with pytest.raises(ProgramError, match=message):
        validate(Program(tuple(ops)), layout)


def test_what_leaves_comes_back_once():
    kept = first_kept((0, 1, 0), 1, Choice.OFFLOAD)
    layout = make_layout(3, kept=kept)
    ops = list(build_step(layout).ops)
    at = ops.index(parse_op("ONLOAD 1.0@w0"))
    with pytest.raises(ProgramError, match="it has come back already"):
        validate(Program((*ops[: at + 1], ops[at], *ops[at + 1 :])), layout)


def test_a_unit_does_not_load_after_its_step():
    ops = "LOAD 0@w0.0; ACC 0@w0.0; FB 0.0@w0; FREE 0@w0.0; GRAD 0@w0; STEP 0; LOAD 0@w0.0; FREE 0@w0.0"
    with pytest.raises(ProgramError, match="unit 0 has stepped already"):
        validate(parse(ops), make_layout(1))


def test_the_message_shows_the_program_with_an_arrow():
    program = parse("LOAD 0@w0.0; ACC 0@w0.0; FREE 0@w0.0; FB 0.0@w0; GRAD 0@w0")
    with pytest.raises(ProgramError) as caught:
        validate(program, make_layout(1))
    assert str(caught.value).splitlines() == [
        "op 3, FB 0.0@w0: unit 0 is in no slot",
        "        0  LOAD 0@w0.0",
        "        1  ACC 0@w0.0",
        "        2  FREE 0@w0.0",
        "-->     3  FB 0.0@w0",
        "        4  GRAD 0@w0",
    ]


def test_what_is_left_undone_is_shown_at_the_end():
    with pytest.raises(
        ProgramError, match=r"unit 0 has not stepped\n(.*\n)*-->     5  \(end of the program\)"
    ):
        validate(parse("LOAD 0@w0.0; ACC 0@w0.0; FB 0.0@w0; FREE 0@w0.0; GRAD 0@w0"), make_layout(1))


def test_live_bytes_stay_under_the_budget_of_every_tier():
    program = build_step(LAYOUT)
    limits = {"boundary_bytes": (0, 100, 100), "below": "host", "static_bytes": {"device": 50, "host": 10}}
    validate(program, LAYOUT, MemoryLimits(**limits, budget_bytes={"device": 650, "host": 210}))
    with pytest.raises(ProgramError, match="device holds 450 B, its budget is 449 B"):
        validate(program, LAYOUT, MemoryLimits(**limits, budget_bytes={"device": 449}))
    with pytest.raises(ProgramError, match="host holds 210 B, its budget is 209 B"):
        validate(program, LAYOUT, MemoryLimits(**limits, budget_bytes={"host": 209}))


def test_a_program_that_was_read_from_text_validates_like_the_one_that_was_built():
    validate(parse(render(build_step(LAYOUT))), LAYOUT)
