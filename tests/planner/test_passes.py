"""Programs are tested as text; ``@w0`` is left out on both sides to keep lines short."""

from dataclasses import replace

from hypothesis import given

from outsize.planner.passes.cycle import (
    COMPUTE,
    insert_gradients,
    insert_loads,
    insert_saves,
    insert_steps,
    v_cycle,
)
from outsize.planner.passes.slots import insert_disk, validate
from outsize.planner.passes.step_parts import build_step
from outsize.planner.program.program import Kind, Program, parse, render
from planner.layouts import layouts, make_layout


def text(program: Program) -> str:
    return render(program).replace("@w0", "").replace("\n", "; ")


def program(ops: str) -> Program:
    """Parse ops separated by ``;`` that leave the worker out."""

    def with_worker(op: str) -> str:
        kind, _, rest = op.strip().partition(" ")
        if kind in ("F", "FB", "B", "SAVE", "FETCH", "NORM"):
            return f"{kind} {rest}@w0"
        if kind == "GRAD":
            return f"{kind} {rest.replace('>', '@w0>')}" if ">" in rest else f"{kind} {rest}@w0"
        if kind in ("LOAD", "FREE", "ACC"):
            return f"{kind} {rest.replace('.', '@w0.')}"
        return op

    return parse("; ".join(map(with_worker, ops.split(";"))))


def test_the_v_cycle_goes_down_turns_and_comes_back_layer_by_layer():
    layout = make_layout(3, num_microbatches=2)
    assert text(v_cycle(layout)) == "F 0.0; F 0.1; F 1.0; F 1.1; FB 2.0; FB 2.1; B 1.0; B 1.1; B 0.0; B 0.1"


def test_a_frozen_prefix_has_no_backward():
    layout = make_layout(4, trainable=(False, False, True, True))
    assert text(v_cycle(layout)) == "F 0.0; F 1.0; F 2.0; FB 3.0; B 2.0"


def test_a_frozen_prefix_has_a_backward_if_the_rest_trains():
    layout = make_layout(2, rest=2, trainable=(False, False, True))
    assert text(v_cycle(layout)) == "F 0.0; FB 1.0; B 0.0"


def test_prefetch_starts_the_next_load_before_compute():
    forward = program("F 0.0; F 1.0; F 2.0")
    expected = "LOAD 0.0; LOAD 1.1; F 0.0; FREE 0.0; LOAD 2.0; F 1.0; FREE 1.1; F 2.0; FREE 2.0"
    loaded = insert_loads(forward, make_layout(3, prefetch_depth=1))
    assert text(loaded) == expected


def test_without_prefetch_a_load_stands_right_before_its_use():
    forward = program("F 0.0; F 1.0; F 2.0")
    loaded = insert_loads(forward, make_layout(3, prefetch_depth=0))
    assert text(loaded) == "LOAD 0.0; F 0.0; FREE 0.0; LOAD 1.0; F 1.0; FREE 1.0; LOAD 2.0; F 2.0; FREE 2.0"


def test_units_still_in_slots_at_the_turn_are_not_loaded_again():
    layout = make_layout(4, slot_bytes=(1, 1, 1))
    assert text(insert_loads(v_cycle(layout), layout)) == (
        "LOAD 0.0; LOAD 1.1; F 0.0; FREE 0.0; LOAD 2.2; F 1.0; LOAD 3.0; F 2.0; FB 3.0; FREE 3.0; B 2.0; "
        "FREE 2.2; LOAD 0.0; B 1.0; FREE 1.1; B 0.0; FREE 0.0"
    )


def test_the_rest_is_loaded_first_and_stays():
    layout = make_layout(2, rest=2)
    assert text(insert_loads(v_cycle(layout), layout)) == (
        "LOAD 2.2; LOAD 0.0; LOAD 1.1; F 0.0; FB 1.0; FREE 1.1; B 0.0; FREE 0.0; FREE 2.2"
    )


def test_a_unit_without_weights_needs_no_slot():
    layout = make_layout(2, weight_bytes=(0, 1), trainable=(False, True), slot_bytes=(1,))
    assert text(insert_loads(v_cycle(layout), layout)) == "LOAD 1.0; F 0.0; FB 1.0; FREE 1.0"


def test_a_large_unit_finds_the_large_slot_free():
    forward = program("F 0.0; F 1.0; F 2.0; F 3.0")
    layout = make_layout(4, weight_bytes=(9, 1, 1, 9), slot_bytes=(9, 1, 1))
    loaded = text(insert_loads(forward, layout))
    assert "FREE 0.0; LOAD 2.2; F 1.0; FREE 1.1; LOAD 3.0; F 2.0" in loaded


def test_inputs_leave_after_their_forward_and_come_back_one_ahead():
    layout = make_layout(3, num_microbatches=2, offload=frozenset({1}))
    assert text(insert_saves(v_cycle(layout), layout)) == (
        "F 0.0; F 0.1; F 1.0; SAVE 1.0; F 1.1; SAVE 1.1; FB 2.0; FETCH 1.0; FB 2.1; FETCH 1.1; B 1.0; B 1.1; "
        "B 0.0; B 0.1"
    )


def test_gradients_are_summed_normed_and_sent_home():
    layout = make_layout(2, num_microbatches=2, clip=True)
    backward = program("FB 1.0; FB 1.1; B 0.0; B 0.1")
    assert text(insert_gradients(backward, layout)) == (
        "ACC 1.0; FB 1.0; FB 1.1; NORM 1; GRAD 1; ACC 0.0; B 0.0; B 0.1; NORM 0; GRAD 0"
    )


def test_the_next_round_begins_where_one_has_come_back_and_sums_on():
    """A sum comes up while the visit before computes, and the unit at which a round begins stays in its slot."""
    layout = make_layout(2, num_microbatches=3, round_microbatches=2, accumulator_bytes=(1, 1), clip=True)
    assert text(build_step(layout)) == (
        "LOAD 0.0; LOAD 1.1; F 0.0; F 0.1; ACC 1.0; FB 1.0; FB 1.1; GRAD 1; ACC 0.1; SUM 1.0; B 0.0; B 0.1; GRAD 0; "
        "F 0.2; SUM 0.1; FB 1.2; NORM 1; GRAD 1; FREE 1.1; B 0.2; NORM 0; GRAD 0; FREE 0.0; CLIP; STEP 0; STEP 1"
    )


def test_one_accumulator_is_free_for_a_sum_where_the_gradient_before_it_has_left():
    layout = make_layout(2, num_microbatches=2, round_microbatches=1)
    assert text(build_step(layout)) == (
        "LOAD 0.0; LOAD 1.1; F 0.0; ACC 1.0; FB 1.0; GRAD 1; ACC 0.0; B 0.0; GRAD 0; "
        "F 0.1; SUM 1.0; FB 1.1; GRAD 1; STEP 1; FREE 1.1; SUM 0.0; B 0.1; GRAD 0; STEP 0; FREE 0.0"
    )


def test_units_that_stay_come_up_once():
    layout = make_layout(2, num_microbatches=2, round_microbatches=1, slot_bytes=(1,), stays=frozenset({1}))
    validate(build_step(layout), layout)
    assert text(build_step(layout)) == (
        "LOAD 0.0; LOAD 1.1; F 0.0; ACC 1.0; FB 1.0; GRAD 1; ACC 0.0; B 0.0; GRAD 0; "
        "F 0.1; SUM 1.0; FB 1.1; GRAD 1; STEP 1; FREE 1.1; SUM 0.0; B 0.1; GRAD 0; STEP 0; FREE 0.0"
    )


def test_a_sum_comes_up_before_what_is_loaded_meanwhile():
    layout = make_layout(3, num_microbatches=2, round_microbatches=1, accumulator_bytes=(1, 1, 1))
    ops = text(build_step(layout)).split("; ")
    assert ops.index("GRAD 2") < ops.index("SUM 2.0") < ops.index("F 0.1") < ops.index("LOAD 2.0", 12)


def test_the_rest_is_summed_over_all_rounds_where_it_lies():
    layout = make_layout(1, rest=1, num_microbatches=2, round_microbatches=1)
    assert text(build_step(layout)) == (
        "LOAD 1.2; LOAD 0.0; ACC 1.1; ACC 0.0; FB 0.0; GRAD 0; SUM 0.0; FB 0.1; GRAD 0; STEP 0; GRAD 1; STEP 1; "
        "FREE 0.0; FREE 1.2"
    )


def test_nothing_comes_back_before_the_first_backward_of_its_round():
    layout = make_layout(
        3, num_microbatches=2, round_microbatches=1, offload=frozenset({1}), prefetch_depth=4
    )
    assert text(insert_saves(v_cycle(layout), layout)) == (
        "F 0.0; F 1.0; SAVE 1.0; FETCH 1.0; FB 2.0; B 1.0; B 0.0; "
        "F 0.1; F 1.1; SAVE 1.1; FETCH 1.1; FB 2.1; B 1.1; B 0.1"
    )


def test_accumulators_take_turns_and_the_rest_has_its_own():
    layout = make_layout(3, rest=3, accumulator_bytes=(1, 1))
    backward = program("FB 2.0; B 1.0; B 0.0")
    assert text(insert_gradients(backward, layout)) == (
        "ACC 3.2; ACC 2.0; FB 2.0; GRAD 2; ACC 1.1; B 1.0; GRAD 1; ACC 0.0; B 0.0; GRAD 0; GRAD 3"
    )


def test_a_frozen_unit_has_a_backward_but_no_gradient():
    layout = make_layout(3, trainable=(True, False, True))
    backward = program("FB 2.0; B 1.0; B 0.0")
    assert text(insert_gradients(backward, layout)) == (
        "ACC 2.0; FB 2.0; GRAD 2; B 1.0; ACC 0.0; B 0.0; GRAD 0"
    )


def test_with_clipping_units_step_in_the_order_of_the_next_forward():
    layout = make_layout(2, rest=2, clip=True)
    assert text(insert_steps(program("GRAD 1; GRAD 0; GRAD 2"), layout)) == (
        "GRAD 1; GRAD 0; GRAD 2; CLIP; STEP 2; STEP 0; STEP 1"
    )


def test_without_clipping_each_unit_steps_behind_its_gradient():
    stepped = insert_steps(program("GRAD 1; FREE 1.0; GRAD 0"), make_layout(2))
    assert text(stepped) == "GRAD 1; STEP 1; FREE 1.0; GRAD 0; STEP 0"


def test_tiles_go_through_the_ring_with_reads_ahead():
    layout = make_layout(2, clip=True, tiles=(3, 1), num_tile_buffers=2)
    assert text(insert_disk(program("CLIP; STEP 0; STEP 1"), layout)) == (
        "CLIP; READ 0#0>t0; READ 0#1>t1; STEP 0#0@t0; WRITE 0#0<t0; READ 0#2>t0; STEP 0#1@t1; WRITE 0#1<t1; "
        "READ 1#0>t1; STEP 0#2@t0; WRITE 0#2<t0; STEP 1#0@t1; WRITE 1#0<t1"
    )


def test_the_ring_goes_on_turning_from_unit_to_unit():
    layout = make_layout(2, tiles=(1, 1), num_tile_buffers=2)
    assert text(insert_disk(program("GRAD 1; STEP 1; GRAD 0; STEP 0"), layout)) == (
        "GRAD 1; READ 1#0>t0; STEP 1#0@t0; WRITE 1#0<t0; GRAD 0; READ 0#0>t1; STEP 0#0@t1; WRITE 0#0<t1"
    )


def test_units_are_staged_through_host_buffers_of_their_own():
    layout = make_layout(2, staged=True, num_host_buffers=3)
    assert text(insert_disk(program("LOAD 0.0; LOAD 1.1; LOAD 1.0; GRAD 1; GRAD 0"), layout)) == (
        "READ 0>h0; LOAD 0.0<h0; READ 1>h1; LOAD 1.1<h1; READ 1>h0; LOAD 1.0<h0; "
        "GRAD 1>h2; WRITE 1<h2; GRAD 0>h2; WRITE 0<h2"
    )


def test_a_small_step_as_a_whole():
    layout = make_layout(
        3, num_microbatches=1, offload=frozenset({1}), clip=True, tiles=(1, 1, 1), num_tile_buffers=3
    )
    assert text(build_step(layout)) == (
        "LOAD 0.0; LOAD 1.1; F 0.0; FREE 0.0; LOAD 2.0; F 1.0; SAVE 1.0; FETCH 1.0; ACC 2.0; FB 2.0; "
        "NORM 2; GRAD 2; FREE 2.0; LOAD 0.0; ACC 1.0; B 1.0; NORM 1; GRAD 1; FREE 1.1; ACC 0.0; B 0.0; "
        "NORM 0; GRAD 0; FREE 0.0; CLIP; READ 0#0>t0; READ 1#0>t1; READ 2#0>t2; STEP 0#0@t0; WRITE 0#0<t0; "
        "STEP 1#0@t1; WRITE 1#0<t1; STEP 2#0@t2; WRITE 2#0<t2"
    )


@given(layouts())
def test_passes_only_insert(layout):
    step = build_step(layout)
    compute = [op for op in step if op.kind in COMPUTE]
    assert tuple(compute) == v_cycle(layout).ops


@given(layouts())
def test_in_each_round_weights_come_up_at_most_twice_and_gradients_go_down_once(layout):
    step = build_step(layout)
    for unit in range(layout.num_units):
        loads = sum(op.kind is Kind.LOAD and op.unit == unit for op in step)
        grads = [op.tile for op in step if op.kind is Kind.GRAD and op.unit == unit]
        sums = sum(op.kind is Kind.SUM and op.unit == unit for op in step)
        rounds = 1 if unit == layout.rest else layout.num_rounds  # what stays is summed where it lies
        leaves = layout.trainable[unit] and unit not in layout.resident
        whole = [None] * leaves * rounds
        assert loads <= 2 * rounds
        assert sums == (rounds - 1) * leaves
        assert grads == (list(range(layout.tiles[unit])) if layout.ring else whole)


@given(layouts())
def test_the_step_does_not_depend_on_microbatches_in_what_crosses_the_link(layout):
    def transfers(num_microbatches):
        kinds = (Kind.LOAD, Kind.GRAD, Kind.READ, Kind.WRITE)
        one_round = replace(layout, num_microbatches=num_microbatches, round_microbatches=None, kept=())
        step = build_step(one_round)
        return [op for op in step if op.kind in kinds]

    assert transfers(1) == transfers(4)


def test_gradients_that_pass_through_a_ring_step_behind_their_backward():
    """Each tile fills the buffer that the one before last has left; the accumulator is free behind the last."""
    layout = make_layout(
        1, ring=True, unit_clip=True, tiles=(3,), tiles_on_disk=False, num_tile_buffers=2, slot_bytes=(1,)
    )
    assert render(build_step(layout)).splitlines() == [
        "LOAD 0@w0.0", "ACC 0@w0.0", "FB 0.0@w0", "NORM 0@w0",
        "GRAD 0#0@w0>t0", "GRAD 0#1@w0>t1",
        "STEP 0#0@t0", "GRAD 0#2@w0>t0",
        "STEP 0#1@t1",
        "STEP 0#2@t0",
        "FREE 0@w0.0",
    ]  # fmt: skip


def test_on_disk_the_rest_of_a_tile_is_read_ahead_of_its_gradient():
    layout = make_layout(1, ring=True, tiles=(2,), num_tile_buffers=1, slot_bytes=(1,))
    assert render(build_step(layout)).splitlines() == [
        "LOAD 0@w0.0", "ACC 0@w0.0", "FB 0.0@w0",
        "READ 0#0>t0", "GRAD 0#0@w0>t0", "STEP 0#0@t0", "WRITE 0#0<t0",
        "READ 0#1>t0", "GRAD 0#1@w0>t0", "STEP 0#1@t0", "WRITE 0#1<t0",
        "FREE 0@w0.0",
    ]  # fmt: skip
