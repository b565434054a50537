import pytest

from outsize.planner.program.program import lane_of, parse_op


@pytest.mark.parametrize(
    ("op", "lane"),
    [
        ("F 0.0@w0", "compute:w0"),
        ("FB 0.0@w0", "compute:w0"),
        ("B 0.0@w1", "compute:w1"),
        ("FREE 0@w0.1", "compute:w0"),
        ("ACC 0@w0.1", "compute:w0"),
        ("NORM 0@w0", "compute:w0"),
        ("LOAD 0@w0.1", "up:w0"),
        ("LOAD 0@w1.1<h0", "up:w1"),
        ("FETCH 0.0@w0", "up:w0"),
        ("SAVE 0.0@w0", "down:w0"),
        ("GRAD 0@w0>h1", "down:w0"),
        ("CLIP", "host"),
        ("STEP 0", "host"),
        ("STEP 0#1@t0", "host"),
        ("READ 0#1>t0", "read"),
        ("WRITE 0#1<t0", "write"),
        ("READ 0>h0", "read:units"),
        ("WRITE 0<h0", "write:units"),
        ("REDUCE 0", "net:reduce"),
        ("REDUCE 0<h0", "net:reduce"),
        ("AGREE", "net:reduce"),
        ("GATHER 0", "net:gather"),
        ("STORE 0", "store"),
        ("COMMIT", "commit"),
    ],
)
def test_every_op_has_its_lane(op, lane):
    assert lane_of(parse_op(op)) == lane
