import itertools

from outsize.planner.program.program import parse
from outsize.runtime.ops.compute_ops import seed_of
from outsize.runtime.ops.context import slots_used


def test_every_piece_of_code_has_a_seed_of_its_own():
    """And the same one in every process: runs resume in another one."""
    seeds = {
        key: seed_of(*key)
        for key in itertools.product((0, 1, 2**62), (0, 1, 12), (0, 1, 12), (0, 1, 12), (False, True))
    }
    assert len(set(seeds.values())) == len(seeds)
    assert all(0 <= seed < 2**56 for seed in seeds.values())
    assert seed_of(5, 1, 2, 3, False) == 64466062339890485


def test_an_op_finds_its_unit_where_the_program_has_last_put_it():
    program = parse(
        "LOAD 2@w0.9; LOAD 0@w0.0; F 0.0@w0; LOAD 1@w0.1; FREE 0@w0.0; FB 1.0@w0; FREE 1@w0.1; LOAD 0@w0.1; B 0.0@w0"
    )
    found = {str(op): slots for op, slots in slots_used(program).items()}
    assert found == {
        "F 0.0@w0": {2: 9, 0: 0},
        "FB 1.0@w0": {2: 9, 1: 1},
        "B 0.0@w0": {2: 9, 0: 1},
    }
