import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.planner.passes.step_parts import build_step
from outsize.planner.program.program import Kind, parse
from outsize.planner.program.stages import Extent
from outsize.planner.simulate.discrete import Cost
from outsize.planner.simulate.simulator import CostModel, simulate
from planner.held_bytes import critical_path, held_bytes, peak_activations
from planner.layouts import layouts, make_layout

SECONDS = {Kind.LOAD: 2.0, Kind.FORWARD: 1.0, Kind.FORWARD_BACKWARD: 3.0, Kind.BACKWARD: 3.0, Kind.GRAD: 1.0}


def fixed(op):
    return Cost(seconds=SECONDS.get(op.kind, 0.5))


FIXED = CostModel(cost_of=fixed, capacity={})


def test_a_load_is_hidden_behind_the_compute_before_it():
    layout = make_layout(2)
    program = parse("LOAD 0@w0.0; LOAD 1@w0.1; F 0.0@w0; FREE 0@w0.0; FB 1.0@w0")
    simulation = simulate([program], layout, FIXED)
    starts = {str(event.op): event.start_s for event in simulation.timeline.events}
    assert starts == {"LOAD 0@w0.0": 0, "LOAD 1@w0.1": 2, "F 0.0@w0": 2, "FREE 0@w0.0": 3, "FB 1.0@w0": 4}
    last = simulation.timeline.lane("compute:w0")[-1]
    assert (str(last.waited_for), last.waited_s) == ("LOAD 1@w0.1", 0.5)
    assert simulation.timeline.stall_s_by_owner() == {"up:w0": 2.5}


def test_steps_follow_one_another_as_the_engine_submits_them():
    layout = make_layout(3, clip=True)
    simulation = simulate([build_step(layout)] * 3, layout, FIXED)
    events = simulation.timeline.events
    loads = [e.start_s for e in events if str(e.op).startswith("LOAD 0@")]
    steps = [e.end_s for e in events if str(e.op) == "STEP 0"]
    first_of_second_step = loads[2]  # down and up again, then down
    assert first_of_second_step == max(simulation.decided_s[0], steps[0])
    assert simulation.step_s == pytest.approx(simulation.decided_s[2] - simulation.decided_s[1])


@st.composite
def costs(draw):
    numbers = st.sampled_from([0.0, 0.1, 1.0, 2.7])
    table = {
        kind: Cost(seconds=draw(numbers), amount=1.0, through=draw(st.sampled_from([("x",), ("x", "y")])))
        for kind in Kind
    }
    return CostModel(cost_of=lambda op: table[op.kind], capacity={"x": 1.5, "y": 1.0})


@settings(max_examples=60)
@given(layouts(), costs(), st.integers(1, 3))
def test_critical_path_order_and_memory_hold_for_any_program_and_any_speed(layout, costs, num_steps):
    program = build_step(layout)
    done = simulate([program] * num_steps, layout, costs)
    run = done.run
    assert sum(run.end_s[i] - run.start_s[i] for i in critical_path(run)) == pytest.approx(done.makespan_s)
    assert len(done.timeline.events) == num_steps * len(program)
    assert {event.op for event in done.timeline.events} == set(program.ops)
    assert simulate([program] * num_steps, layout, costs) == done


@settings(max_examples=60)
@given(layouts(), costs())
def test_what_is_held_never_exceeds_what_the_plan_sets_aside(layout, costs):
    program = build_step(layout)
    sizes = tuple(range(1, layout.num_streamed + 1))
    kept = dict.fromkeys(Extent, sizes)
    peak, _ = held_bytes(simulate([program] * 2, layout, costs), layout, sizes, kept)
    live = peak_activations(program, layout, sizes, kept)
    resident = sum(layout.weight_bytes[unit] for unit in layout.stays)  # in places of their own
    if layout.rest is not None:
        resident += layout.weight_bytes[layout.rest] + layout.gradient_bytes[layout.rest] * layout.rest_trains
    aside = sum(layout.slot_bytes) + sum(layout.accumulator_bytes) + resident + live.device_bytes
    assert peak.get("device:w0", 0) <= aside
    assert peak.get("host", 0) <= live.below_bytes
