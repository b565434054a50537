"""A step that is cut: forward, backward and steps are those of the whole, whoever decides when they run."""

from dataclasses import replace

import pytest
from hypothesis import assume, given

from outsize.errors import ProgramError
from outsize.planner.passes.slots import validate
from outsize.planner.passes.step_parts import build_step, cut_step, forward_alone, step_units, summing
from outsize.planner.program.hazards import Hazards
from outsize.planner.program.program import Kind, Program, parse, render
from outsize.planner.program.stages import Choice
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.stage_memory import num_handed_over
from outsize.planner.search.upgrades import Way, away_in, kept_in_stages
from planner.layouts import first_kept, staged_layouts

LAYOUT = StepLayout(
    num_streamed=3,
    rest=3,
    num_microbatches=2,
    trainable=(True, True, True, True),
    weight_bytes=(4, 4, 4, 1),
    gradient_bytes=(4, 4, 4, 1),
    slot_bytes=(4, 4),
    accumulator_bytes=(4,),
    tiles=(0, 0, 0, 0),
    cut=True,
)


def text(program: Program) -> str:
    return render(program).replace("\n", "; ")


def test_the_last_unit_runs_forward_and_backward_like_any_other():
    passes = cut_step(LAYOUT)
    assert text(passes.forward) == (
        "LOAD 3@w0.2; LOAD 0@w0.0; LOAD 1@w0.1; F 0.0@w0; F 0.1@w0; FREE 0@w0.0; LOAD 2@w0.0; "
        "F 1.0@w0; F 1.1@w0; F 2.0@w0; F 2.1@w0"
    )
    assert text(passes.backward) == (
        "ACC 3@w0.1; ACC 2@w0.0; B 2.0@w0; B 2.1@w0; GRAD 2@w0; FREE 2@w0.0; LOAD 0@w0.0; "
        "ACC 1@w0.0; B 1.0@w0; B 1.1@w0; GRAD 1@w0; FREE 1@w0.1; "
        "ACC 0@w0.0; B 0.0@w0; B 0.1@w0; GRAD 0@w0; GRAD 3@w0; FREE 0@w0.0; FREE 3@w0.2"
    )


def test_a_cold_backward_loads_all_that_it_needs_and_inference_leaves_nothing():
    passes = cut_step(LAYOUT)
    cold = [op for op in passes.cold_backward if op.kind is Kind.LOAD]
    assert sorted(op.unit for op in cold) == [0, 1, 2, 3]
    kinds = [op.kind for op in passes.inference]
    assert kinds.count(Kind.LOAD) == kinds.count(Kind.FREE) == 4
    assert set(kinds) == {Kind.LOAD, Kind.FREE, Kind.FORWARD}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"slot_bytes": (4,)},
        {"offload": frozenset({1})},
        {"tiles": (2, 2, 2, 1), "num_tile_buffers": 3},
        {"tiles": (2, 2, 2, 1), "num_tile_buffers": 3, "staged": True, "num_host_buffers": 2},
        {"trainable": (False, False, True, False)},
        {"num_microbatches": 5},
        {"kept": first_kept((2, 0, 2), 2)},
        {"kept": first_kept((0, 1, 0), 2), "offload": frozenset({1}), "slot_bytes": (4,)},
    ],
)
def test_the_parts_make_a_step_that_obeys_every_rule(changes: dict):
    layout = replace(LAYOUT, **changes)
    validate(build_step(layout), layout)
    passes = cut_step(layout)
    steps = step_units(layout, set(range(layout.num_units)))
    validate(Program(passes.forward.ops + passes.backward.ops + steps.ops), layout)


def test_what_is_kept_is_kept_by_the_forward_alone_and_any_backward_goes_with_a_lean_one():
    layout = replace(LAYOUT, kept=first_kept((0, 1, 2), 2))
    passes, without = cut_step(layout), cut_step(LAYOUT)
    kept = {(op.unit, op.microbatch) for op in passes.forward if op.kind is Kind.FORWARD_KEEP}
    assert kept == {(1, 0), (2, 0), (2, 1)}
    assert passes.lean_forward == without.forward == without.lean_forward
    assert passes.inference == without.inference
    assert (passes.backward, passes.cold_backward) == (without.backward, without.cold_backward)


def test_the_last_unit_of_a_step_that_is_cut_may_keep_as_well():
    assert LAYOUT.keepable == (0, 1, 2)
    assert replace(LAYOUT, cut=False).keepable == (0, 1)
    with pytest.raises(ValueError, match="kept may name units"):
        replace(LAYOUT, cut=False, kept=first_kept((0, 0, 1), 2))


def test_what_is_saved_in_the_forward_comes_back_in_either_backward():
    passes = cut_step(replace(LAYOUT, offload=frozenset({1})))
    saved = {(op.unit, op.microbatch) for op in passes.forward if op.kind is Kind.SAVE}
    for backward in (passes.backward, passes.cold_backward):
        assert (
            {(op.unit, op.microbatch) for op in backward if op.kind is Kind.FETCH}
            == saved
            == {(1, 0), (1, 1)}
        )


def test_later_rounds_go_forward_without_a_trace_and_again_with_the_backward():
    layout = replace(LAYOUT, num_microbatches=3, round_microbatches=2, kept=first_kept((0, 1, 0), 2))
    validate(build_step(layout), layout)
    passes = cut_step(layout)
    compute = {
        name: "; ".join(str(op) for op in getattr(passes, name) if op.microbatch is not None)
        for name in ("forward", "following", "backward", "inference")
    }
    first = "F 0.0@w0; F 0.1@w0; FK 1.0@w0; F 1.1@w0; F 2.0@w0; F 2.1@w0"
    assert compute["forward"] == first
    assert compute["following"] == "F 0.2@w0; F 1.2@w0; F 2.2@w0"
    assert compute["inference"] == f"{first.replace('FK', 'F')}; {compute['following']}"
    assert compute["backward"] == (
        "B 2.0@w0; B 2.1@w0; B 1.0@w0; B 1.1@w0; B 0.0@w0; B 0.1@w0; "
        "F 0.2@w0; FK 1.2@w0; F 2.2@w0; B 2.2@w0; B 1.2@w0; B 0.2@w0"
    )
    assert passes.backward == passes.cold_backward
    assert not cut_step(LAYOUT).following.ops


def test_summing_goes_on_from_gradients_at_home_and_changes_nothing_else():
    backward = cut_step(LAYOUT).backward
    going_on = summing(backward, {1, 3})
    changed = {str(a): str(b) for a, b in zip(backward, going_on, strict=True) if a != b}
    assert changed == {"ACC 1@w0.0": "SUM 1@w0.0", "ACC 3@w0.1": "SUM 3@w0.1"}


def test_a_sum_waits_for_the_gradient_that_it_starts_from():
    hazards = Hazards(3, 3)
    before = [hazards.dependencies(op) for op in parse("ACC 1@w0.0; GRAD 1@w0; ACC 2@w0.0; GRAD 2@w0")]
    assert 1 in hazards.dependencies(parse("SUM 1@w0.0").ops[0])
    assert before


def test_steps_come_in_the_order_of_the_next_forward():
    assert text(step_units(LAYOUT, {2, 3, 0})) == "STEP 3; STEP 0; STEP 2"


def test_fb_and_cut_exclude_each_other():
    whole = replace(LAYOUT, cut=False)
    with pytest.raises(ValueError, match="cut=True"):
        cut_step(whole)
    with pytest.raises(ProgramError, match="F and B"):
        validate(build_step(whole), LAYOUT)
    with pytest.raises(ProgramError, match="in one op, FB"):
        validate(build_step(LAYOUT), whole)
    with pytest.raises(ValueError, match="no clipping"):
        replace(LAYOUT, clip=True)


def test_a_forward_by_itself_loads_every_unit_once_and_commits_nothing():
    layout = replace(LAYOUT, cut=False)
    assert text(forward_alone(layout)) == (
        "LOAD 3@w0.2; LOAD 0@w0.0; LOAD 1@w0.1; F 0.0@w0; F 0.1@w0; FREE 0@w0.0; LOAD 2@w0.0; "
        "F 1.0@w0; F 1.1@w0; FREE 1@w0.1; FB 2.0@w0; FB 2.1@w0; FREE 2@w0.0; FREE 3@w0.2"
    )
    assert forward_alone(replace(layout, commits=True)) == forward_alone(layout)
    with pytest.raises(ValueError, match="on one worker"):
        forward_alone(LAYOUT)


@given(staged_layouts())
def test_rounds_of_several_workers_obey_every_rule_and_hand_over_all_that_they_save(whole: StepLayout):
    assume(whole.num_workers > 1)
    assert whole.stages is not None
    away = {unit: choice for unit, choice in away_in(whole).items() if choice.leaves}
    kept = kept_in_stages(
        whole.stages, whole.num_streamed, whole.num_microbatches, Way(Choice.RECOMPUTE, away)
    )
    stages = replace(whole.stages, cursor=0)
    layout = replace(whole, cut=True, clip=False, unit_clip=False, commits=False, stages=stages, kept=kept)
    validate(build_step(layout), layout)
    passes = cut_step(layout)
    later = layout.num_microbatches - layout.round_size
    if not layout.peers and later > 0:  # they begin while what the first round has saved waits
        saved, fetched = (
            {(op.unit, op.microbatch) for op in program if op.kind is kind}
            for program, kind in ((passes.forward, Kind.SAVE), (passes.backward, Kind.FETCH))
        )
        assert len(saved & fetched) + min(later, layout.microbatches_at_once) <= num_handed_over(layout)
    for program, rounds in ((passes.following, range(1, 99)), (passes.inference, range(99))):
        slots: dict[tuple[int | None, int | None], int | None] = {}
        below: set[tuple[int | None, int | None]] = set()
        ran = []
        for op in program:
            if op.kind is Kind.LOAD:
                assert slots.setdefault((op.worker, op.slot), op.unit) == op.unit
            elif op.kind is Kind.FREE:
                del slots[op.worker, op.slot]
            elif op.kind is Kind.SAVE:
                below.add((op.unit, op.microbatch))
            elif op.kind is Kind.FETCH:
                below.remove((op.unit, op.microbatch))
            elif op.microbatch is not None and op.kind is not Kind.PASS:
                assert op.kind is Kind.FORWARD
                ran.append((op.unit, op.microbatch))
        assert not slots
        assert not below
        units = range(layout.num_streamed)
        wanted = [m for number, found in enumerate(layout.rounds) if number in rounds for m in found]
        assert sorted(ran) == [(unit, microbatch) for unit in units for microbatch in wanted]
