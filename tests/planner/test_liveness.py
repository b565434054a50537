from collections import Counter, deque
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.planner.memory.step_bytes import ActivationMeter, Live
from outsize.planner.passes.cycle import cycle_peak, insert_saves, v_cycle
from outsize.planner.passes.step_parts import build_step
from outsize.planner.program.hazards import Hazards
from outsize.planner.program.program import FORWARD_KINDS, Kind, lane_of, parse
from outsize.planner.program.stages import Choice, Extent, bytes_of
from planner.held_bytes import peak_activations
from planner.layouts import first_kept, layouts, make_layout


def meter(text, layout, boundary_bytes):
    found = ActivationMeter(layout, boundary_bytes)
    return {str(op): tuple(found.add(op)) for op in parse(text)}


def test_inputs_are_kept_for_the_backward_and_gradients_take_their_place():
    live = meter("F 0.0@w0; F 1.0@w0; FB 2.0@w0; B 1.0@w0; B 0.0@w0", make_layout(3), (0, 10, 3))
    assert [device for device, _ in live.values()] == [10, 13, 16, 23, 10]


def test_the_ids_are_not_counted():
    assert peak_activations(parse("F 0.0@w0; FB 1.0@w0; B 0.0@w0"), make_layout(2), (999, 1)) == (2, 0)


def test_what_a_backward_needs_is_live_from_its_forward_until_it_is_workspace():
    layout = make_layout(3, num_microbatches=2, kept=first_kept((0, 1, 0), 2))
    found = ActivationMeter(layout, (0, 10, 3), {Extent.WHOLE: (100, 50, 0)})
    text = "F 0.0@w0; F 0.1@w0; FK 1.0@w0; F 1.1@w0; FB 2.0@w0; FB 2.1@w0; B 1.0@w0; B 1.1@w0"
    live = {str(op): found.add(op).device_bytes for op in parse(text)}
    assert live["FK 1.0@w0"] == 23  # in the making it is workspace
    assert live["F 1.1@w0"] == 50 + 26
    assert live["FB 2.0@w0"] == 50 + 29
    assert live["B 1.0@w0"] == 36


def test_inputs_below_the_lowest_backward_are_not_kept():
    layout = make_layout(3, trainable=(False, False, True))
    live = meter("F 0.0@w0; F 1.0@w0; FB 2.0@w0", layout, (0, 10, 3))
    assert [device for device, _ in live.values()] == [10, 13, 3]


def test_a_save_counts_until_something_has_waited_for_it():
    layout = make_layout(5, offload=frozenset({1, 2, 3}))
    live = meter(
        "F 0.0@w0; F 1.0@w0; SAVE 1.0@w0; F 2.0@w0; SAVE 2.0@w0; F 3.0@w0; SAVE 3.0@w0; FETCH 3.0@w0",
        layout,
        (0, 10, 10, 10, 10),
    )
    assert live == {
        "F 0.0@w0": (10, 0),
        "F 1.0@w0": (20, 0),
        "SAVE 1.0@w0": (20, 10),
        "F 2.0@w0": (30, 10),  # saved, but nothing has waited for it
        "SAVE 2.0@w0": (30, 20),
        "F 3.0@w0": (30, 20),  # waits for the first SAVE
        "SAVE 3.0@w0": (30, 30),
        "FETCH 3.0@w0": (20, 30),  # waits for all SAVEs
    }


@given(layouts())
def test_everything_is_freed_in_the_end(layout):
    boundary_bytes = tuple(range(1, layout.num_streamed + 1))
    found = ActivationMeter(layout, boundary_bytes, dict.fromkeys(Extent, boundary_bytes))
    for op in build_step(layout):
        assert min(found.add(op)) >= 0
    # What is left belongs to the lowest backward: its input gradient is not made, its input is consumed.
    assert (found._device, found._below) == (0, 0)


@given(layouts())
def test_a_step_of_rounds_holds_what_one_of_them_does(layout):
    """Whatever is kept or offloaded: each round uses the room of the one before."""
    boundary_bytes = tuple(range(1, layout.num_streamed + 1))
    kept_bytes = dict.fromkeys(Extent, boundary_bytes)
    one = replace(layout, num_microbatches=layout.round_size)
    alone = peak_activations(build_step(one), one, boundary_bytes, kept_bytes)
    assert peak_activations(build_step(layout), layout, boundary_bytes, kept_bytes) == alone


@given(layouts(), st.integers(1, 6), st.integers(1, 5), st.booleans())
def test_a_cycle_is_counted_at_once_as_op_by_op(layout, times, depth, cut):
    """However many microbatches are alike, however far ahead something comes back, and where the turn is cut."""
    size = layout.round_microbatches
    layout = replace(
        layout,
        num_microbatches=times * layout.num_microbatches,
        round_microbatches=None if size is None else times * size,
        kept=tuple(tuple(choice for choice in choices for _ in range(times)) for choices in layout.kept),
        prefetch_depth=depth,
        cut=cut,
        clip=False,
        ring=False,
        resident=frozenset(),
        tiles=(0,) * layout.num_units,
    )
    boundary_bytes = tuple(range(1, layout.num_streamed + 1))
    kept_bytes = {extent: tuple(3 * size + i for size in boundary_bytes) for i, extent in enumerate(Extent)}
    program = insert_saves(v_cycle(layout), layout)
    counted = peak_activations(program, layout, boundary_bytes, kept_bytes)
    assert cycle_peak(layout, boundary_bytes, kept_bytes) == counted


@given(
    st.integers(4, 9),
    st.lists(st.sampled_from(Choice), min_size=1, max_size=5),
    st.integers(0, 9),
    st.integers(1, 4),
)
def test_units_that_are_alike_are_counted_as_op_by_op(num_units, choices, first, depth):
    layout = make_layout(num_units, num_microbatches=len(choices), prefetch_depth=depth)
    none = (Choice.RECOMPUTE,) * len(choices)
    kept = tuple(tuple(choices) if unit in layout.keepable else none for unit in range(num_units))
    layout = replace(layout, kept=kept, offload=frozenset(u for u in layout.offloadable if u >= first))
    boundary_bytes = (5,) * num_units
    kept_bytes = {extent: (3 + i,) * num_units for i, extent in enumerate(Extent)}
    program = insert_saves(v_cycle(layout), layout)
    counted = peak_activations(program, layout, boundary_bytes, kept_bytes)
    assert cycle_peak(layout, boundary_bytes, kept_bytes) == counted


@given(layouts(), st.integers(1, 20))
def test_choices_are_those_of_each_microbatch(layout, count):
    for unit in range(layout.num_streamed):
        each = Counter(layout.choice(unit, microbatch) for microbatch in range(count))
        assert layout.choices(unit, count) == each


def peak(num_units, num_microbatches, offload):
    layout = make_layout(num_units, num_microbatches=num_microbatches)
    layout = replace(layout, offload=frozenset(layout.offloadable) if offload else frozenset())
    return peak_activations(build_step(layout), layout, (0,) + (1,) * (num_units - 1))


def test_with_offload_device_bytes_do_not_depend_on_the_number_of_units():
    assert peak(10, 3, offload=True).device_bytes == peak(40, 3, offload=True).device_bytes
    assert peak(40, 3, offload=False).device_bytes >= 3 * 38
    assert peak(40, 3, offload=True).below_bytes == 3 * 38


def test_with_offload_each_microbatch_carries_one_tensor_from_unit_to_unit():
    # Beside these: an output in the making and two inputs on their way out; or a gradient in the making,
    # an input in use and one on its way back.
    assert [peak(10, m, offload=True).device_bytes for m in (4, 5, 6)] == [7, 8, 9]


class LanesAtRandom:
    """Runs a program on in-order lanes that honour the hazards and nothing else, in a random order."""

    def __init__(self, layout, boundary_bytes, kept_bytes, ops, draw_index):
        self.layout, self.bytes, self.ops, self.draw_index = layout, (0, *boundary_bytes[1:]), ops, draw_index
        self.sizes = kept_bytes
        hazards = Hazards(layout.num_streamed, layout.rest)
        self.waits_for = [hazards.dependencies(op) for op in ops]
        self.lanes = {}
        for n, op in enumerate(ops):
            self.lanes.setdefault(lane_of(op), deque()).append(n)
        self.device = self.below = 0
        self.peak = Live(0, 0)

    def run(self):
        running, done = set(), set()
        while any(self.lanes.values()):
            heads = [lane[0] for lane in self.lanes.values() if lane]
            ready = [n for n in heads if n not in running and done.issuperset(self.waits_for[n])]
            choices = ready + sorted(running)
            n = choices[self.draw_index(len(choices))]
            if n in running:
                running.remove(n)
                done.add(n)
                self.lanes[lane_of(self.ops[n])].popleft()
                self.finish(self.ops[n])
            else:
                running.add(n)
                self.start(self.ops[n])
                self.peak = Live(max(self.peak[0], self.device), max(self.peak[1], self.below))
        return self.peak

    def kept(self, op):
        return bytes_of(self.layout.choice(op.unit, op.microbatch), op.unit, self.sizes)

    def start(self, op):
        if op.kind in FORWARD_KINDS:
            self.device += self.bytes[op.unit + 1]
        elif op.kind is Kind.FETCH:
            self.device += self.bytes[op.unit]
        elif op.kind is Kind.SAVE:
            self.below += self.bytes[op.unit]
        elif op.kind is Kind.ONLOAD:
            self.device += self.kept(op)
        elif op.kind is Kind.OFFLOAD:
            self.below += self.kept(op)
        elif op.kind in (Kind.BACKWARD, Kind.FORWARD_BACKWARD):
            self.device += self.bytes[op.unit] * (op.unit > self.layout.first_backward)
            self.device -= self.kept(op)

    def finish(self, op):
        if op.kind in FORWARD_KINDS:
            self.device += self.kept(op)
            self.device -= self.bytes[op.unit] if op.unit < self.layout.first_backward else 0
        elif op.kind is Kind.SAVE:
            self.device -= self.bytes[op.unit]
        elif op.kind is Kind.OFFLOAD:
            self.device -= self.kept(op)
        elif op.kind is Kind.ONLOAD:
            self.below -= self.kept(op)
        elif op.kind is Kind.FETCH:
            self.below -= self.bytes[op.unit]
        elif op.kind in (Kind.BACKWARD, Kind.FORWARD_BACKWARD):
            self.device -= self.bytes[op.unit] + (self.bytes[op.unit + 1] if op.kind is Kind.BACKWARD else 0)


@settings(max_examples=200)
@given(layouts(), st.randoms(use_true_random=False))
def test_however_far_lanes_run_apart_no_more_is_live_than_was_counted(layout, random):
    boundary_bytes = tuple(random.randrange(1, 9) for _ in range(layout.num_streamed))
    program = build_step(layout)
    kept_bytes = {e: tuple(random.randrange(30) for _ in range(layout.num_streamed)) for e in Extent}
    counted = peak_activations(program, layout, boundary_bytes, kept_bytes)
    live = LanesAtRandom(layout, boundary_bytes, kept_bytes, program.ops * 2, random.randrange).run()
    assert live.device_bytes <= counted.device_bytes
    assert live.below_bytes <= counted.below_bytes


def test_a_backward_may_run_before_the_fetch_that_stands_before_it():
    """With one microbatch the last unit's backward waits for no FETCH, so both inputs may still be on their way out."""
    layout = replace(make_layout(4, num_microbatches=1), offload=frozenset({1, 2}))
    counted = peak_activations(build_step(layout), layout, (0, 2, 1, 2))
    assert counted.device_bytes == 2 + 1 + 2 + 2
