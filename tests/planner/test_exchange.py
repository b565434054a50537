"""Several nodes in programs: what they exchange obeys the rules, and none of them ever waits for ever."""

import random
from collections import defaultdict, deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.errors import ProgramError
from outsize.planner.passes.slots import validate
from outsize.planner.passes.step_parts import build_step
from outsize.planner.program.hazards import Hazards
from outsize.planner.program.program import Kind, Program, lane_of, parse_op, render
from planner.layouts import layouts, make_layout, shared_layouts, staged_layouts

EXCHANGES = (Kind.REDUCE, Kind.AGREE, Kind.GATHER)


def two_nodes(num_streamed=2, **changes):
    fields = {"num_nodes": 2, "own_elements": (1,) * num_streamed, "num_host_buffers": 2, "clip": True}
    return make_layout(num_streamed, **{**fields, **changes})


def exchanged(program):
    return [op for op in program if op.kind in EXCHANGES]


def test_a_step_of_two_nodes():
    text = "; ".join(render(build_step(two_nodes())).splitlines())
    assert text == (
        "LOAD 0@w0.0; LOAD 1@w0.1; F 0.0@w0; ACC 1@w0.0; FB 1.0@w0; GRAD 1@w0>h0; REDUCE 1<h0; FREE 1@w0.1; "
        "ACC 0@w0.0; B 0.0@w0; GRAD 0@w0>h1; REDUCE 0<h1; FREE 0@w0.0; "
        "AGREE; CLIP; STEP 0; GATHER 0; STEP 1; GATHER 1"
    )


def test_of_several_rounds_the_last_is_exchanged():
    layout = two_nodes(1, num_microbatches=2, round_microbatches=1, tiles_on_disk=False)
    text = "; ".join(render(build_step(layout)).splitlines())
    assert text == (
        "LOAD 0@w0.0; ACC 0@w0.0; FB 0.0@w0; GRAD 0@w0; SUM 0@w0.0; FB 0.1@w0; GRAD 0@w0>h0; REDUCE 0<h0; FREE 0@w0.0; "
        "AGREE; CLIP; STEP 0; GATHER 0"
    )
    layout = replace(layout, staged=True, tiles=(1,), num_tile_buffers=1, tiles_on_disk=True)
    text = "; ".join(render(build_step(layout)).splitlines())
    assert "GRAD 0@w0>h1; WRITE 0<h1; SUM 0@w0.0; FB 0.1@w0; GRAD 0@w0>h1; REDUCE 0<h1;" in text


def test_a_unit_on_disk_is_gathered_once_its_last_tile_is_written():
    layout = two_nodes(tiles=(2, 1), num_tile_buffers=3, commits=True)
    ops = [str(op) for op in build_step(layout)]
    assert ops[-2:] == ["GATHER 1", "COMMIT"]
    assert ops[ops.index("GATHER 0") - 1] == "WRITE 0#1<t1"
    assert not any(op.startswith("WRITE 0<") for op in ops)


@given(layouts())
def test_a_single_node_exchanges_nothing(layout):
    assert not exchanged(build_step(layout))


@given(shared_layouts())
def test_every_step_of_several_nodes_obeys_the_rules(shared):
    for layout in shared:
        validate(build_step(layout), layout)


@given(staged_layouts())
def test_so_do_stages(layout):
    layout = replace(layout, unit_clip=False, num_nodes=2, own_elements=(1,) * layout.num_units)
    validate(build_step(layout), layout)


@given(shared_layouts())
def test_all_nodes_exchange_the_same_in_the_same_order_on_each_lane(shared):
    def by_lane(layout):
        lanes = defaultdict(list)
        for op in exchanged(build_step(layout)):
            lanes[lane_of(op)].append((op.kind, op.unit))
        return lanes

    first, *others = map(by_lane, shared)
    assert all(other == first for other in others)


@given(shared_layouts(), st.data())
def test_no_exchange_can_be_left_out_or_run_twice(shared, data):
    layout = shared[0]
    ops = build_step(layout).ops
    places = [i for i, op in enumerate(ops) if op.kind in EXCHANGES]
    if not places:
        return
    n = data.draw(st.sampled_from(places))
    for wrong in (ops[:n] + ops[n + 1 :], ops[: n + 1] + ops[n:]):
        with pytest.raises(ProgramError):
            validate(Program(wrong), layout)


@pytest.mark.parametrize(
    ("op", "instead", "message"),
    [
        ("GRAD 1@w0>h0", "GRAD 1@w0", "goes into a host buffer"),
        ("REDUCE 1<h0", "WRITE 1<h0", "is reduced"),
        ("REDUCE 1<h0", "REDUCE 0<h0", "holds nothing of unit 0"),
        ("AGREE", "NORM 1@w0", "in no accumulator"),
        ("AGREE", "CLIP", "have not agreed"),
        ("GATHER 0", "GATHER 1", "unit 1 has not stepped"),
        ("REDUCE 0<h1", "AGREE", r"gradients of units \[0\] have not been reduced"),
    ],
)
def test_a_wrong_op_is_named(op, instead, message):
    layout = two_nodes()
    ops = list(build_step(layout).ops)
    ops[ops.index(parse_op(op))] = parse_op(instead)
    with pytest.raises(ProgramError, match=message):
        validate(Program(tuple(ops)), layout)


@pytest.mark.parametrize("op", ["REDUCE 0", "AGREE", "GATHER 0"])
def test_a_single_node_has_nobody_to_exchange_with(op):
    layout = make_layout(1, clip=True)
    ops = build_step(layout).ops
    with pytest.raises(ProgramError, match="single node"):
        validate(Program((*ops[:-1], parse_op(op), ops[-1])), layout)


@settings(max_examples=60)
@given(shared_layouts(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_nodes_never_wait_for_each_other_in_a_circle(shared, steps, chance):
    """Whatever each does next of what it could, all come to the end: lanes in order, exchanges only together."""
    nodes = [Node(layout, steps) for layout in shared]
    while not all(node.done for node in nodes):
        alone = [(node, lane) for node in nodes for lane in node.ready() if not lane.startswith("net:")]
        together = [
            lane for lane in ("net:reduce", "net:gather") if all(lane in node.ready() for node in nodes)
        ]
        assert alone or together, "nobody can go on"
        if together and (not alone or chance.random() < 0.5):
            lane = random.Random(chance.random()).choice(together)
            assert len({node.run(lane) for node in nodes}) == 1
        else:
            node, lane = alone[chance.randrange(len(alone))]
            node.run(lane)


class Node:
    """A node's lanes: what is next on each, and what it waits for."""

    def __init__(self, layout, steps):
        hazards = Hazards(layout.num_streamed, layout.rest)
        self.lanes = defaultdict(deque)
        self.finished = set()
        for number, op in enumerate(build_step(layout).ops * steps):
            self.lanes[lane_of(op)].append((number, op, hazards.dependencies(op)))

    @property
    def done(self):
        return not any(self.lanes.values())

    def ready(self):
        return [lane for lane, ops in self.lanes.items() if ops and self.finished.issuperset(ops[0][2])]

    def run(self, lane):
        number, op, _ = self.lanes[lane].popleft()
        self.finished.add(number)
        return op.kind, op.unit


def test_a_step_that_is_cut_is_not_shared():
    with pytest.raises(ValueError, match="not shared"):
        two_nodes(clip=False, cut=True)


def test_what_each_node_steps_has_to_be_known():
    with pytest.raises(ValueError, match="own_elements"):
        make_layout(2, num_nodes=2)
