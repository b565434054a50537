"""Compute and lanes that share cores."""

import pytest

from outsize.planner.program.program import Kind, parse_op
from outsize.planner.simulate.costs import EXCHANGE_S, UnitTimes
from outsize.planner.simulate.discrete import Cost
from outsize.planner.simulate.gpu_times import crowded
from outsize.planner.simulate.simulator import CostModel

OPS = [parse_op(text) for text in ("F 0.0@w0", "B 0.0@w0", "STEP 0", "REDUCE 0<h0", "READ 0#0>t0")]
COSTS = {
    Kind.FORWARD: Cost(seconds=1.0),
    Kind.BACKWARD: Cost(seconds=3.0),
    Kind.STEP: Cost(seconds=0.5, amount=10.0, through=("optimizer",)),
    Kind.REDUCE: Cost(seconds=EXCHANGE_S + 0.25, amount=50.0, through=("network",)),
    Kind.READ: Cost(seconds=1000.0),
}
MODEL = CostModel(cost_of=lambda op: COSTS[op.kind], capacity={"optimizer": 20.0, "network": 1.0})
TIMES = UnitTimes(forward_s=(1.0,), backward_s=(3.0,), kept_forward_s=(2.0,))


@pytest.mark.parametrize(
    ("cores", "threads", "factor"),
    [
        (
            1.0,
            1,
            1.5,
        ),  # beside four of compute one second of the optimizer, 0.25 of a codec, 0.75 of messages
        (0.5, 1, 1.5),
        (1.5, 1, 1.25),
        (2.0, 1, 1.0),
        (8.0, 1, 1.0),
        (2.0, 2, 1.25),
    ],
)
def test_what_lanes_compute_is_taken_from_compute_where_no_core_is_free(cores, threads, factor):
    """What waits for a disk or for the network takes no core, however long."""
    found = crowded(TIMES, OPS, MODEL, cores=cores, threads=threads, core_s_per_byte=0.015)
    assert found.forward_s == pytest.approx((factor,))
    assert found.backward_s == pytest.approx((3 * factor,))
    assert found.kept_forward_s == pytest.approx((2 * factor,))


def test_a_step_that_computes_nothing_is_left_alone():
    assert crowded(TIMES, OPS[2:], MODEL, cores=1.0, threads=1, core_s_per_byte=0.0) == TIMES
