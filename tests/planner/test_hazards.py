import pytest
from hypothesis import given, settings

from outsize.planner.passes.step_parts import build_step
from outsize.planner.program.hazards import SAVE_WINDOW, Hazards
from outsize.planner.program.program import COMPUTE_KINDS, FORWARD_KINDS, Kind, parse, parse_op
from planner.layouts import layouts, make_layout


def waits(text, rest=None, num_streamed=4):
    """Return {op: ops it waits for} for a program in which no op occurs twice."""
    hazards = Hazards(num_streamed, rest)
    ops = parse(text).ops
    return {str(op): [str(ops[n]) for n in hazards.dependencies(op)] for op in ops}


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("LOAD 1@w0.0", "F 1.0@w0"),
        ("LOAD 1@w0.0", "FREE 1@w0.0"),
        ("FREE 1@w0.0", "LOAD 2@w0.0"),
        ("F 1.0@w0", "F 2.0@w0"),
        ("F 1.0@w0", "SAVE 1.0@w0"),
        ("F 1.0@w0", "SAVE 2.0@w0"),
        ("SAVE 1.0@w0", "FETCH 1.0@w0"),
        ("FETCH 1.0@w0", "B 1.0@w0"),
        ("B 2.0@w0", "B 1.0@w0"),
        ("FB 2.0@w0", "B 1.0@w0"),
        ("NORM 1@w0", "CLIP"),
        ("CLIP", "STEP 1"),
        ("CLIP", "NORM 1@w0"),
        ("GRAD 1@w0", "STEP 1"),
        ("GRAD 1@w0", "READ 1#0>t0"),
        ("GRAD 1@w0>h0", "WRITE 1<h0"),
        ("WRITE 1<h0", "READ 1#0>t0"),
        ("WRITE 1<h0", "READ 2>h0"),
        ("READ 1>h0", "LOAD 1@w0.0<h0"),
        ("LOAD 1@w0.0<h0", "GRAD 2@w0>h0"),
        ("READ 1#0>t0", "STEP 1#0@t0"),
        ("STEP 1#0@t0", "WRITE 1#0<t0"),
        ("WRITE 1#0<t0", "READ 1#3>t0"),
        ("WRITE 1#0<t0", "LOAD 1@w0.0"),
        ("WRITE 1#0<t1", "READ 1#0>t0"),
        ("LOAD 1@w0.0", "WRITE 1#0<t0"),
        ("READ 1>h0", "WRITE 1#0<t0"),
        ("STEP 1", "LOAD 1@w0.0"),
        ("STEP 1", "STORE 1"),
        ("STORE 1", "STEP 1"),
        ("STORE 1", "STEP 1#0@t0"),
        ("WRITE 1#0<t0", "STORE 1"),
        ("STORE 1", "WRITE 1#0<t0"),
        ("LOAD 1@w0.0", "STEP 1"),
        ("STEP 1", "GRAD 1@w0"),
        ("READ 1#0>t0", "GRAD 1@w0"),
        ("GRAD 1@w0>h0", "REDUCE 1<h0"),
        ("REDUCE 1<h0", "GRAD 2@w0>h0"),
        ("GRAD 1@w0", "REDUCE 1"),
        ("REDUCE 1<h0", "AGREE"),
        ("REDUCE 1", "READ 1#0>t0"),
        ("REDUCE 1", "STEP 1"),
        ("AGREE", "CLIP"),
        ("COMMIT", "AGREE"),
        ("STEP 1", "GATHER 1"),
        ("WRITE 1#0<t0", "GATHER 1"),
        ("GATHER 1", "LOAD 1@w0.0"),
        ("GATHER 1", "READ 1>h0"),
        ("GATHER 1", "READ 1#0>t0"),
        ("GATHER 1", "STORE 1"),
        ("GATHER 1", "COMMIT"),
        ("GATHER 1", "REDUCE 1<h0"),
        ("STORE 1", "GATHER 1"),
        ("WRITE 1#0<t0", "STEP 1"),
        ("STEP 1", "READ 1#0>t0"),
        ("B 1.0@w0", "F 1.0@w0"),
        ("WRITE 1#0<t0", "COMMIT"),
        ("WRITE 3#2<t1", "COMMIT"),
        ("COMMIT", "WRITE 1#0<t0"),
        ("COMMIT", "STEP 1#0@t0"),
        ("GRAD 1#0@w0>t0", "STEP 1#0@t0"),
        ("STEP 1#0@t0", "GRAD 1#1@w0>t0"),
        ("STEP 1#0@t0", "LOAD 1@w0.0"),
    ],
)
def test_the_later_op_waits_for_the_earlier_one(earlier, later):
    hazards = Hazards(4, None)
    assert hazards.dependencies(parse_op(earlier)) == ()
    assert hazards.dependencies(parse_op(later)) == (0,)


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("LOAD 1@w0.0", "LOAD 2@w0.1"),
        ("LOAD 1@w0.0", "LOAD 1@w1.0"),
        ("F 1.0@w0", "F 1.1@w0"),
        ("GRAD 1@w0", "STEP 2"),
        ("STEP 1", "LOAD 2@w0.0"),
        ("READ 1#0>t0", "READ 1#1>t1"),
        ("WRITE 1#0<t0", "WRITE 1#1<t1"),
        ("NORM 1@w0", "STEP 1"),
        ("LOAD 1@w0.0<h0", "STEP 1"),
    ],
)
def test_the_later_op_does_not_wait_for_the_earlier_one(earlier, later):
    hazards = Hazards(4, None)
    hazards.dependencies(parse_op(earlier))
    assert hazards.dependencies(parse_op(later)) == ()


def test_every_unit_reads_the_rest_and_adds_to_its_gradient():
    found = waits(
        "LOAD 2@w0.1; ACC 2@w0.1; F 0.0@w0; FB 1.0@w0; B 0.0@w0; NORM 2@w0; GRAD 2@w0; FREE 2@w0.1", rest=2
    )
    assert "LOAD 2@w0.1" in found["F 0.0@w0"]
    assert "ACC 2@w0.1" in found["FB 1.0@w0"]
    assert found["B 0.0@w0"] == ["LOAD 2@w0.1", "F 0.0@w0", "FB 1.0@w0"]
    assert found["NORM 2@w0"] == ["B 0.0@w0"]
    assert found["FREE 2@w0.1"] == ["F 0.0@w0", "FB 1.0@w0", "B 0.0@w0"]


def test_accumulators_pass_from_unit_to_unit_through_grad():
    found = waits("ACC 2@w0.0; FB 2.0@w0; FB 2.1@w0; NORM 2@w0; GRAD 2@w0; ACC 1@w0.0; B 1.0@w0")
    assert found["FB 2.1@w0"] == ["FB 2.0@w0"]
    assert found["NORM 2@w0"] == ["FB 2.1@w0"]
    assert found["GRAD 2@w0"] == ["NORM 2@w0"]
    assert found["ACC 1@w0.0"] == ["GRAD 2@w0"]
    assert found["B 1.0@w0"] == ["FB 2.0@w0", "ACC 1@w0.0"]


def test_a_unit_is_loaded_again_after_all_its_tiles_are_written():
    found = waits("LOAD 1@w0.0; WRITE 1#0<t0; WRITE 1#1<t1; LOAD 1@w0.1; WRITE 1#2<t2")
    assert found["WRITE 1#1<t1"] == ["LOAD 1@w0.0"]
    assert found["LOAD 1@w0.1"] == ["WRITE 1#0<t0", "WRITE 1#1<t1"]
    assert found["WRITE 1#2<t2"] == ["LOAD 1@w0.1"]


def test_a_forward_waits_for_the_save_before_the_last():
    assert SAVE_WINDOW == 2
    found = waits("F 1.0@w0; SAVE 1.0@w0; F 1.1@w0; SAVE 1.1@w0; F 1.2@w0")
    assert found["F 1.1@w0"] == []
    assert found["F 1.2@w0"] == ["SAVE 1.0@w0"]


def test_a_fetch_waits_for_the_compute_op_before_it():
    found = waits("F 1.0@w0; SAVE 1.0@w0; FB 3.0@w0; FETCH 1.0@w0")
    assert found["FETCH 1.0@w0"] == ["SAVE 1.0@w0", "FB 3.0@w0"]


def test_a_fetch_waits_for_every_save_that_an_f_has_not_waited_for():
    found = waits("F 1.0@w0; SAVE 1.0@w0; F 1.1@w0; SAVE 1.1@w0; FB 3.0@w0; FETCH 1.0@w0")
    assert found["FETCH 1.0@w0"] == ["SAVE 1.0@w0", "SAVE 1.1@w0", "FB 3.0@w0"]


class Oracle:
    """The table of hazards said once more: what each op reads and writes, and what it conflicts with."""

    def __init__(self, layout):
        self.layout, self.slot_of, self.acc_of, self.history = layout, {}, {}, []

    def touches(self, op):
        u, m, whole = op.unit, op.microbatch, range(max(1, self.layout.tiles[op.unit or 0]))
        homes = {("home", u, p) for p in whole}
        reads, writes = set(), set()
        match op.kind:
            case Kind.LOAD:
                writes.add(("slot", op.slot))
                reads |= homes if op.buffer is None else {("host", op.buffer)}
                self.slot_of[u] = op.slot
            case Kind.FREE:
                writes.add(("slot", op.slot))
                del self.slot_of[u]
            case Kind.ACC:
                writes.add(("acc", op.slot))
                self.acc_of[u] = op.slot
            case Kind.SUM:
                reads.add(("grad", u))
                writes.add(("acc", op.slot))
                self.acc_of[u] = op.slot
            case kind if kind in COMPUTE_KINDS:
                units = {u, self.layout.rest}
                reads |= {("slot", self.slot_of[v]) for v in units if v in self.slot_of}
                writes.add(("act", u, m))
                if op.kind in FORWARD_KINDS:
                    writes.add(("act", u + 1, m))
                else:
                    writes |= {("acc", self.acc_of[v]) for v in units if v in self.acc_of} | {("dact", u, m)}
                    reads |= {("dact", u + 1, m)} if op.kind is Kind.BACKWARD else set()
            case Kind.SAVE | Kind.FETCH | Kind.OFFLOAD | Kind.ONLOAD:
                writes.add(("act", u, m))
            case Kind.NORM:
                reads.add(("acc", self.acc_of[u]))
                writes.add(("norm", u))
            case Kind.GRAD if op.tile is not None:
                writes |= {("acc", self.acc_of[u]), ("ring", op.buffer)}
                if op.tile + 1 == self.layout.tiles[u]:
                    del self.acc_of[u]
            case Kind.GRAD:
                writes |= {
                    ("acc", self.acc_of.pop(u)),
                    ("host", op.buffer) if op.buffer is not None else ("grad", u),
                }
            case Kind.CLIP:
                reads |= {("norm", v) for v in range(self.layout.num_units)}
                writes.add(("coef",))
            case Kind.READ if op.tile is None:
                reads |= homes
                writes.add(("host", op.buffer))
            case Kind.READ:
                reads |= {("home", u, op.tile), ("grad", u)}
                writes.add(("ring", op.buffer))
            case Kind.STEP:
                reads.add(("coef",))
                reads |= {("grad", u)} if op.tile is None else set()
                writes |= homes if op.tile is None else {("ring", op.buffer)}
                writes |= set() if self.layout.tiles_on_disk or op.tile is None else {("home", u, op.tile)}
            case Kind.WRITE if op.tile is None:
                reads.add(("host", op.buffer))
                writes.add(("grad", u))
            case Kind.WRITE:
                reads.add(("ring", op.buffer))
                writes.add(("home", u, op.tile))
        return reads, writes

    def conflicts(self, op):
        reads, writes = self.touches(op)
        found = {n for n, (r, w) in enumerate(self.history) if w & (reads | writes) or r & writes}
        self.history.append((reads, writes))
        return found


@settings(max_examples=60)
@given(layouts())
def test_conflicting_ops_are_ordered_whatever_the_layout_over_three_steps(layout):
    program = build_step(layout)
    hazards, oracle = Hazards(layout.num_streamed, layout.rest), Oracle(layout)
    before: list[int] = []  # bit sets of the ops that must have finished
    for op in program.ops * 3:
        reached = 0
        dependencies = hazards.dependencies(op)
        assert list(dependencies) == sorted(set(dependencies))
        for n in dependencies:
            assert n < len(before)
            reached |= before[n] | 1 << n
        missing = [n for n in oracle.conflicts(op) if not reached >> n & 1]
        assert not missing, f"{op} does not wait for {[str((program.ops * 3)[n]) for n in missing]}"
        before.append(reached)


def test_the_next_step_enters_while_later_units_still_step():
    program = build_step(make_layout(3, clip=True))
    ops = program.ops * 2
    hazards = Hazards(3, None)
    before = []
    for op in ops:
        reached = set()
        for n in hazards.dependencies(op):
            reached |= before[n] | {n}
        before.append(reached)
    second_forward = next(n for n in range(len(program), len(ops)) if str(ops[n]) == "F 0.0@w0")
    ordered = {str(ops[n]) for n in before[second_forward]}
    assert "STEP 0" in ordered
    assert not {"STEP 1", "STEP 2"} & ordered


def test_in_a_ring_the_disk_reads_ahead_of_a_backward_and_the_next_backward_goes_on():
    """State is read while a unit computes; a unit's STEPs and WRITEs hold up nobody but who needs its accumulator."""
    layout = make_layout(3, ring=True, tiles=(2, 2, 2), num_tile_buffers=4, accumulator_bytes=(1, 1))
    program = build_step(layout)
    before, hazards = [], Hazards(3, None)
    for op in program:
        reached = set()
        for n in hazards.dependencies(op):
            reached |= before[n] | {n}
        before.append(reached)
    waits_for = {str(op): {str(program.ops[n]) for n in before[i]} for i, op in enumerate(program)}
    assert not [name for name in waits_for["READ 1#0>t2"] if name.startswith(("B ", "FB "))]
    assert not [name for name in waits_for["B 1.0@w0"] if name.startswith(("STEP", "WRITE", "READ"))]


def test_memory_does_not_grow_with_the_number_of_steps():
    layout = make_layout(3, trainable=(False, True, True), tiles=(0, 3, 3), num_tile_buffers=2, clip=True)
    program = build_step(layout)
    hazards = Hazards(3, None)

    def size():
        cells = list(hazards._cells.values())
        for home in hazards._homes.values():
            cells += [home.whole, *home.tiles.values()]
        return sum(1 + len(cell.readers) for cell in cells)

    sizes = []
    for _ in range(200):
        for op in program:
            hazards.dependencies(op)
        sizes.append(size())
    assert max(sizes[100:]) <= max(sizes[:100])


def test_a_reader_of_what_is_never_written_waits_for_the_64_before_it_now_and_then():
    hazards = Hazards(1, None)
    found = [hazards.dependencies(parse_op(f"READ 0>h{n}")) for n in range(200)]
    assert {n: deps for n, deps in enumerate(found) if deps} == {
        64: tuple(range(64)),
        128: tuple(range(64, 128)),
        192: tuple(range(128, 192)),
    }


def test_a_unit_that_has_left_its_slot_does_not_read_it():
    assert waits("LOAD 1@w0.0; FREE 1@w0.0; LOAD 2@w0.0; F 1.0@w0")["F 1.0@w0"] == []


@pytest.mark.parametrize(
    "op", ["LOAD 1@w0.0", "READ 1>h0", "READ 1#0>t0", "F 1.0@w0", "GRAD 1@w0", "CLIP", "NORM 1@w0"]
)
def test_a_commit_holds_nothing_up_but_the_next_optimizer(op):
    hazards = Hazards(4, None)
    hazards.dependencies(parse_op("COMMIT"))
    assert hazards.dependencies(parse_op(op)) == ()


def test_an_f_does_not_wait_for_what_leaves_together_behind_the_one_before():
    """The last input of a stage and its output: both begin when that F ends, as the next F does."""
    text = (
        "F 0.0@w0; F 1.0@w0; SAVE 1.0@w0; SAVE 2.0@w0; F 0.1@w0; F 1.1@w0; SAVE 1.1@w0; SAVE 2.1@w0; F 0.2@w0"
    )
    found = waits(text)
    assert "SAVE 1.0@w0" not in found["F 0.1@w0"]
    assert "SAVE 1.0@w0" in found["F 1.1@w0"]
    assert "SAVE 2.0@w0" in found["F 0.2@w0"]
    assert "SAVE 1.1@w0" not in found["F 0.2@w0"]
