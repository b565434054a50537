"""Programs of several workers: they obey the rules, sum in order, and never deadlock."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outsize.errors import ProgramError
from outsize.planner.passes.slots import validate
from outsize.planner.passes.step_parts import build_step
from outsize.planner.program.hazards import SAVE_WINDOW, Hazards
from outsize.planner.program.program import COMPUTE_KINDS, Kind, Program, parse, render
from outsize.planner.program.stages import (
    Choice,
    Extent,
    Stages,
    bytes_of,
    cursor_after,
    slots_for,
    spans_down,
    spans_up,
    visits_of,
)
from outsize.planner.search.stage_memory import arrival_bytes, num_handed_over
from outsize.planner.search.upgrades import ON_THEIR_WAY, Way, kept_in_stages
from outsize.planner.simulate.discrete import Cost
from outsize.planner.simulate.simulator import CostModel, simulate
from planner.held_bytes import critical_path, held_bytes
from planner.layouts import make_layout, staged_layouts

STAGES = Stages(forward=((0, 1),), backward=((1, 2), (0, 1)), round_size=2)


def staged(num_streamed, stages, num_workers, **changes):
    ones = (1,) * num_streamed
    return make_layout(
        num_streamed,
        slot_bytes=slots_for(stages, ones),
        accumulator_bytes=slots_for(stages, ones, only_backward=True),
        num_workers=num_workers,
        stages=stages,
        **changes,
    )


def test_two_units_on_two_workers():
    """The last stage of two workers starts the backward; unit 0 comes back to worker 0, summed from there."""
    layout = staged(2, STAGES, 2, num_microbatches=2)
    assert render(build_step(layout)).splitlines() == [
        "LOAD 0@w0.0",
        "F 0.0@w0",
        "SAVE 1.0@w0",
        "F 0.1@w0",
        "SAVE 1.1@w0",
        "FREE 0@w0.0",
        "LOAD 0@w0.1",
        "ACC 0@w0.0",
        "LOAD 1@w1.0",
        "ACC 1@w1.0",
        "FETCH 1.0@w1",
        "FETCH 1.1@w1",
        "FB 1.0@w1",
        "SEND 1.0@w1",
        "FB 1.1@w1",
        "SEND 1.1@w1",
        "FREE 1@w1.0",
        "GRAD 1@w1",
        "STEP 1",
        "RECV 1.0@w0",
        "RECV 1.1@w0",
        "R 0.0@w0",
        "B 0.0@w0",
        "R 0.1@w0",
        "B 0.1@w0",
        "FREE 0@w0.1",
        "GRAD 0@w0",
        "STEP 0",
    ]


def test_what_forwards_keep_goes_from_worker_to_worker():
    """It leaves behind what the next stage waits for, and comes up between the backwards of the microbatch before."""
    stages = Stages(forward=((0, 2),), backward=((2, 3), (0, 2)), round_size=2)
    away = dict.fromkeys((0, 1), Choice.OFFLOAD_PRODUCTS)
    kept = kept_in_stages(stages, 3, 2, Way(Choice.KEEP, away))
    layout = staged(3, stages, 2, num_microbatches=2, kept=kept)
    program = build_step(layout)
    validate(program, layout)
    forward = [str(op) for op in program if op.microbatch == 0 and op.worker == 0]
    assert forward[:6] == [
        "FP 0.0@w0",
        "OFFLOAD 0.0@w0",
        "FP 1.0@w0",
        "SAVE 1.0@w0",
        "SAVE 2.0@w0",
        "OFFLOAD 1.0@w0",
    ]
    text = render(program)
    backward = text[text.index("FETCH 1.0@w0") :].splitlines()
    moves = [line for line in backward if line.split()[0] in ("FETCH", "ONLOAD", "RECV", "R", "B")]
    assert moves == [
        "FETCH 1.0@w0",
        "ONLOAD 0.0@w0",
        "ONLOAD 1.0@w0",
        "RECV 2.0@w0",
        "FETCH 1.1@w0",
        "R 0.0@w0",
        "R 1.0@w0",
        "ONLOAD 0.1@w0",
        "B 1.0@w0",
        "ONLOAD 1.1@w0",
        "RECV 2.1@w0",
        "B 0.0@w0",
        "R 0.1@w0",
        "R 1.1@w0",
        "B 1.1@w0",
        "B 0.1@w0",
    ]
    with pytest.raises(ProgramError, match="what is kept of the forward of unit 0 is not on worker 0"):
        validate(parse(text.replace("ONLOAD 0.0@w0", "ONLOAD 0.0@w1")), layout)
    with pytest.raises(ProgramError, match="what its forward kept has not come back"):
        validate(parse(text.replace("ONLOAD 0.0@w0\n", "")), layout)


def test_between_workers_that_can_what_a_stage_makes_goes_from_device_to_device():
    """Into a place of its own; what the backward needs goes below from where it has arrived."""
    stages = Stages(forward=((0, 1), (1, 2)), backward=((2, 3), (1, 2), (0, 1)), round_size=2)
    layout = staged(3, stages, 2, num_microbatches=2, peers=frozenset({(0, 1), (1, 0)}))
    program = build_step(layout)
    validate(program, layout)
    kinds = (Kind.SAVE, Kind.FETCH, Kind.SEND, Kind.RECV, Kind.PASS, Kind.RETURN)
    assert [str(op) for op in program if op.kind in kinds and op.microbatch == 1] == [
        "PASS 1.1@w0>w1.1",
        "SAVE 1.1@w1",
        "PASS 2.1@w1>w0.1",
        "RETURN 2.1@w0>w1.1",
        "FETCH 1.1@w1",
        "RETURN 1.1@w1>w0.1",
    ]
    text = render(program)
    for broken, message in (
        (text.replace("PASS 1.1@w0>w1.1", "PASS 1.1@w0>w1.0"), "place 0 of worker 1 still holds unit 1's"),
        (text.replace("PASS 1.1@w0>w1.1", "PASS 1.1@w0>w1.2"), "has places 0 to 1"),
        (text.replace("PASS 1.1@w0>w1.1", "PASS 1.1@w0>w0.1"), "nothing goes from worker 0 to 0"),
        (text.replace("PASS 1.1@w0>w1.1\n", ""), "the input of unit 1 is not on worker 1"),
        (text.replace("RETURN 1.1@w1>w0.1\n", ""), "the gradient of the input of unit 1 is not on worker 0"),
    ):
        with pytest.raises(ProgramError, match=message):
            validate(parse(broken), layout)


@given(staged_layouts())
def test_nothing_arrives_in_a_place_before_all_that_used_it_before(layout):
    """Over three steps, whatever their order: ancestors of an arrival hold all users of what lay in its place."""
    hazards = Hazards(layout.num_streamed, layout.rest)
    ancestors, lying, users = [], {}, defaultdict(list)
    for _ in range(3):
        for op in build_step(layout):
            before = set(hazards.dependencies(op))
            ancestors.append(before.union(*(ancestors[i] for i in before)))
            seq, unit, microbatch = len(ancestors) - 1, op.unit or 0, op.microbatch
            if op.target is not None:
                place = (op.target, op.slot)
                assert set(users.pop(place, ())) <= ancestors[seq]
                lying = {key: found for key, found in lying.items() if found != place}
                lying[op.kind is Kind.PASS, unit, microbatch] = place
                users[place] = [seq]
            elif op.kind in COMPUTE_KINDS or op.kind is Kind.SAVE:
                keys = [(True, unit, microbatch)]
                keys += [(False, unit + 1, microbatch)] if op.kind is Kind.BACKWARD else []
                for key in keys:
                    if lying.get(key, (None,))[0] == op.worker:
                        users[lying[key]].append(seq)
                if op.kind in (Kind.SAVE, Kind.FORWARD_BACKWARD, Kind.BACKWARD):
                    lying.pop(keys[0], None)
        cursor = cursor_after(layout.stages, layout.num_microbatches, layout.num_workers)
        layout = replace(layout, stages=replace(layout.stages, cursor=cursor))


@given(staged_layouts())
def test_what_is_handed_over_has_left_before_its_room_is_used_again(layout):
    """Over three steps, whatever their order: each microbatch under way has one place for each input and gradient."""
    at_once = layout.microbatches_at_once
    hazards = Hazards(layout.num_streamed, layout.rest, at_once=at_once)
    ancestors, left = [], {}
    for _ in range(3):
        for op in build_step(layout):
            before = set(hazards.dependencies(op))
            ancestors.append(before.union(*(ancestors[i] for i in before)))
            key = (op.kind in (Kind.SAVE, Kind.FETCH), op.unit, (op.microbatch or 0) % at_once)
            if op.kind in (Kind.SAVE, Kind.SEND):
                assert left.pop(key, None) in {None, *ancestors[-1]}
            elif op.kind in (Kind.FETCH, Kind.RECV):
                left[key] = len(ancestors) - 1
        cursor = cursor_after(layout.stages, layout.num_microbatches, layout.num_workers)
        layout = replace(layout, stages=replace(layout.stages, cursor=cursor))


def test_the_cursor_goes_on_from_round_to_round():
    workers = [visit.worker for visit in visits_of(STAGES, 5, 2)]
    assert workers == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert cursor_after(STAGES, 5, 2) == 1
    assert [v.microbatches for v in visits_of(STAGES, 5, 2)][::3] == [range(2), range(2, 4), range(4, 5)]


def test_later_rounds_sum_on():
    program = build_step(staged(2, STAGES, 2, num_microbatches=4))
    of_unit_0 = [
        op.kind for op in program if op.unit == 0 and op.kind in (Kind.ACC, Kind.SUM, Kind.GRAD, Kind.STEP)
    ]
    assert of_unit_0 == [Kind.ACC, Kind.GRAD, Kind.SUM, Kind.GRAD, Kind.STEP]


def test_a_worker_that_begins_late_takes_the_rest_before_it_steps():
    stages = Stages(forward=((0, 1),), backward=((1, 3), (0, 1)), round_size=1)
    frozen = {"trainable": (False,) * 3 + (True,), "gradient_bytes": (0, 0, 0, 1), "rest": 3}
    layout = staged(3, stages, 3, **frozen, rest_users=frozenset({1}))
    program = build_step(layout)
    validate(program, layout)
    kinds = [(op.kind, op.worker) for op in program if op.unit == 3]
    assert kinds.index((Kind.LOAD, 2)) < kinds.index((Kind.STEP, None))


@given(staged_layouts())
def test_every_program_obeys_the_rules(layout):
    program = build_step(layout)
    validate(program, layout)
    assert parse(render(program)) == program


@given(staged_layouts())
def test_gradients_are_summed_in_the_order_of_the_microbatches(layout):
    """One op after the other on an accumulator or between home and accumulator, whatever the workers."""
    hazards = Hazards(layout.num_streamed, layout.rest)
    program = build_step(layout)
    before = [set(hazards.dependencies(op)) for op in program]
    ancestors = []
    for index in range(len(program)):
        ancestors.append(before[index].union(*(ancestors[i] for i in before[index])))
    summing = defaultdict(list)
    for index, op in enumerate(program):
        if op.kind in (Kind.FORWARD_BACKWARD, Kind.BACKWARD) and layout.trainable[op.unit]:
            summing[op.unit].append((op.microbatch, index))
    for found in summing.values():
        assert [microbatch for microbatch, _ in found] == list(range(layout.num_microbatches))
        assert all(a in ancestors[b] for (_, a), (_, b) in pairwise(found))


@given(staged_layouts(), st.randoms(use_true_random=False), st.integers(1, 3))
def test_no_deadlock_and_no_leak_at_any_speed(layout, random, num_steps):
    speed = {kind: random.choice([0.0, 0.1, 1.0, 5.0]) for kind in Kind}
    slow = [random.choice([1.0, 3.0]) for _ in range(layout.num_workers)]
    costs = CostModel(
        cost_of=lambda op: Cost(seconds=speed[op.kind] * slow[op.worker or 0], amount=1, through=("x",)),
        capacity={"x": 2.0},
    )
    programs = []
    for _ in range(num_steps):
        programs.append(build_step(layout))
        cursor = cursor_after(layout.stages, layout.num_microbatches, layout.num_workers)
        layout = replace(layout, stages=replace(layout.stages, cursor=cursor))
    sizes = tuple(range(1, layout.num_streamed + 1))
    kept_sizes = {extent: (size,) * layout.num_streamed for size, extent in enumerate(Extent, 3)}
    done = simulate(programs, layout, costs)
    peak, left = held_bytes(done, layout, sizes, kept_sizes)
    assert len(done.timeline.events) == sum(map(len, programs))
    run = done.run
    assert sum(run.end_s[i] - run.start_s[i] for i in critical_path(run)) == pytest.approx(done.makespan_s)
    assert not any(left.values()), "what ops take they give back"
    spans = (*layout.stages.forward, *layout.stages.backward)
    deepest = max(end - first for first, end in spans)
    # This microbatch's inputs and gradients, the next one's on their way up, two on their way down.
    activations = (2 * (deepest + 2) + SAVE_WINDOW) * max(sizes) + arrival_bytes(layout, max(sizes))
    kept = [bytes_of(layout.choice(unit, 0), unit, kept_sizes) for unit in range(layout.num_streamed)]
    activations += max(
        *(ON_THEIR_WAY * max(kept[slice(*span)]) for span in layout.stages.forward),
        *(sum(kept[slice(*span)]) for span in layout.stages.backward),
        0,
    )
    rest = layout.rest
    resident = 0 if rest is None else layout.weight_bytes[rest] + layout.gradient_bytes[rest]
    places = sum(layout.slot_bytes) + sum(layout.accumulator_bytes) + resident
    for worker in range(layout.num_workers):
        assert peak.get(f"device:w{worker}", 0) <= places + activations
    leaving = (kept[unit] for unit in layout.leavable if layout.choice(unit, 0).leaves)
    below = num_handed_over(layout) * max(sizes) + layout.microbatches_at_once * sum(leaving)
    assert peak.get("host", 0) <= below


@given(staged_layouts(), st.randoms(use_true_random=False), st.data())
def test_a_slow_worker_slows_the_step_by_no_more_than_its_own_work(layout, random, data):
    speed = {kind: random.choice([0.0, 0.1, 1.0, 5.0]) for kind in Kind}
    slow = data.draw(st.integers(0, layout.num_workers - 1))
    program = build_step(layout)

    def makespan(factor):
        def cost_of(op):
            return Cost(seconds=speed[op.kind] * (factor if op.worker == slow else 1.0))

        return simulate([program], layout, CostModel(cost_of=cost_of, capacity={})).makespan_s

    own = sum(speed[op.kind] for op in program if op.worker == slow)
    even = makespan(1.0)
    assert even * (1 - 1e-9) <= makespan(2.0) <= (even + own) * (1 + 1e-9)


@given(staged_layouts(), staged_layouts())
def test_a_plan_for_another_model_or_other_workers_is_refused(layout, other):
    assume((layout.num_streamed, layout.num_workers) != (other.num_streamed, other.num_workers))
    assume(layout.num_streamed != other.num_streamed or other.num_workers > layout.num_workers)
    with pytest.raises(ProgramError):
        validate(build_step(other), layout)


@given(staged_layouts(), st.data())
def test_a_program_without_one_of_its_ops_breaks_a_rule(layout, data):
    program = build_step(layout)
    needed = [i for i, op in enumerate(program) if op.kind is not Kind.FETCH or op.unit != 0]
    index = data.draw(st.sampled_from(needed))
    with pytest.raises(ProgramError):
        validate(Program(program.ops[:index] + program.ops[index + 1 :]), layout)


def test_an_input_on_another_worker_is_not_found():
    layout = staged(2, STAGES, 2, num_microbatches=2)
    text = render(build_step(layout)).replace("FETCH 1.0@w1\n", "")
    with pytest.raises(ProgramError, match="the input of unit 1 is not on worker 1"):
        validate(parse(text), layout)
    text = render(build_step(layout)).replace("RECV 1.0@w0\n", "")
    with pytest.raises(ProgramError, match="the gradient of the input of unit 1 is not on worker 0"):
        validate(parse(text), layout)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": None}, "several workers need stages"),
        ({"num_workers": 4}, "4 workers need as many stages"),
        ({"stages": replace(STAGES, cursor=2)}, "no worker 2"),
        (
            {"stages": Stages(forward=((0, 1),), backward=((1, 2),), round_size=1)},
            "backward stages cover units 0 to 1",
        ),
        ({"peers": frozenset({(0, 2)})}, "peers may name"),
        ({"kept": ((Choice.OFFLOAD,), (Choice.RECOMPUTE,))}, "but no graph does"),
        ({"kept": ((Choice.KEEP,), (Choice.RECOMPUTE,))}, "but no graph does"),
    ],
)
def test_layouts_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(staged(2, STAGES, 2), **changes)


@pytest.mark.parametrize(
    "fields",
    [
        {"forward": (), "backward": ()},
        {"forward": ((0, 1), (2, 3)), "backward": ((3, 4), (0, 3))},
        {"forward": ((0, 2),), "backward": ((3, 4), (0, 3))},
        {"forward": ((0, 3),), "backward": ((3, 4), (0, 2))},
        {"forward": ((0, 0),), "backward": ((0, 1),)},
    ],
)
def test_stages_that_cannot_be(fields):
    with pytest.raises(ValueError, match=r"stage|consecutive"):
        Stages(**fields, round_size=1)


def test_spans():
    assert spans_up([2, 1]) == ((0, 2), (2, 3))
    assert spans_down([1, 2], 3) == ((2, 3), (0, 2))
