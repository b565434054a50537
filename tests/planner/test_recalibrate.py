"""A trace of one machine, read with the figures of another, says what the first one does."""

from dataclasses import replace
from math import inf

import pytest

from outsize.hardware.cards import parse_gpus
from outsize.hardware.machine_spec import Figure
from outsize.planner.predict.decision import PlannedStep
from outsize.planner.program.program import Kind
from outsize.planner.search.offload_balance import UnitRates
from outsize.planner.search.plan_stages import plan_stages
from outsize.planner.search.step_plan import Budgets, PlanOptions, plan_step
from outsize.planner.simulate.comparison import compare, take_apart
from outsize.planner.simulate.costs import ADAMW_BYTES, UnitTimes
from outsize.planner.simulate.discrete import Cost
from outsize.planner.simulate.gpu_times import read_trace
from outsize.planner.simulate.simulator import Timeline
from planner.test_plan import make_demand, make_model

FORWARD_S = (1e-4, *[2e-3] * 6, 3e-3)


def unit_times(share=1.0):
    forward_s = tuple(share * seconds for seconds in FORWARD_S)
    return UnitTimes(forward_s=forward_s, backward_s=tuple(3 * seconds for seconds in forward_s))


TIMES, SLOW = unit_times(), unit_times(1.5)
GIB = 2**30


def planned(home="host", workers=1, **changes):
    model = make_model(rest=False)
    demand = make_demand(model)
    budgets = Budgets(device=64 * 2**20, host=GIB, disk=GIB)
    options = PlanOptions(home=home, below="host", clip=True, microbatches=2, **changes)
    if workers == 1:
        plan = plan_step(model, demand, budgets, options)
    else:
        rates = UnitRates(times=TIMES, up_bytes_per_s=inf, down_bytes_per_s=inf)
        options = replace(options, num_workers=workers, rates=rates, leaves_unasked=False)
        plan = plan_stages(model, demand, budgets, options)
    return PlannedStep(plan=plan, model=model, boundary_bytes=demand.boundary_bytes)


def machine(link=2e9, disk=1e9, workers=1):
    preset = parse_gpus("4090")
    figure = Figure(value=link, source="test")
    links = [replace(preset.links[0], up_bytes_per_s=figure, down_bytes_per_s=figure)] * workers
    rate = Figure(value=disk, source="test")
    drive = replace(preset.disk, read_bytes_per_s=rate, write_bytes_per_s=rate)
    return replace(preset, gpus=preset.gpus * workers, links=tuple(links), disk=drive)


@pytest.mark.parametrize(("home", "workers"), [("host", 1), ("disk", 1), ("host", 2)])
def test_what_a_trace_says_is_what_that_machine_does(home, workers):
    step = planned(home, workers)
    believed, true = machine(workers=workers), machine(5e8, 4e8, workers)
    really = step.expect(step.costs(true, SLOW))
    before = step.costs(believed, TIMES)
    trace = read_trace(really.timeline, step.costs(believed, TIMES, coarse=True))
    again = step.expect(trace.costs(before))
    assert step.expect(before).step_s < 0.9 * really.step_s
    assert again.step_s == pytest.approx(really.step_s, rel=0.05)
    assert trace.compute_share == pytest.approx(1.5, rel=0.01)


def test_rates_of_lanes_are_read_off_what_they_moved():
    step = planned()
    really = step.expect(step.costs(machine(5e8), TIMES))
    trace = read_trace(really.timeline, step.costs(machine(), TIMES))
    assert trace.rates["up:w0"] == pytest.approx(5e8, rel=0.05)
    assert trace.rates["down:w0"] == pytest.approx(5e8, rel=0.05)
    assert read_trace(Timeline(()), step.costs(machine(), TIMES)).rates == {}


def test_a_step_is_told_apart_from_what_comes_behind_its_bytes():
    step = planned()
    plain = step.costs(machine(), TIMES)

    def cost_of(op):
        cost = plain.cost_of(op)
        behind = Cost(seconds=0.01, amount=1e6, through=("up:w0",))
        return replace(cost, then=behind) if op.kind is Kind.STEP else cost

    costs = replace(plain, cost_of=cost_of)
    trace = read_trace(step.expect(costs).timeline, costs)
    assert trace.rates["optimizer"] == pytest.approx(
        machine().host.adamw_params_per_s.value * ADAMW_BYTES, rel=0.05
    )


def test_large_tiles_stand_for_small_ones():
    step = planned("disk", tile_elements=2**14)
    fine, coarse = (step.costs(machine(), TIMES, coarse=flag) for flag in (False, True))
    read = next(op for op in step.plan.program if op.tile is not None)
    trace = read_trace(step.expect(coarse).timeline, coarse)
    assert fine.cost_of(read).amount < coarse.cost_of(read).amount
    share = trace.costs(fine).cost_of(read).seconds / trace.costs(coarse).cost_of(read).seconds
    assert share == pytest.approx(fine.cost_of(read).amount / coarse.cost_of(read).amount)


@pytest.mark.parametrize("workers", [1, 2])
def test_differences_add_up_and_name_the_slow_lane(workers):
    step = planned(workers=workers)
    before = step.expect(step.costs(machine(workers=workers), TIMES))
    after = step.expect(step.costs(machine(2e8, workers=workers), TIMES))
    after = replace(after, ended_s=after.ended_s + 0.001)
    found = compare(take_apart(before), take_apart(after), 1.0)
    assert sum(part.seconds for part in found.parts) == pytest.approx(after.step_s - before.step_s)
    assert sum(part.measured_s for part in found.parts) == pytest.approx(after.step_s)
    assert min(part.predicted_s for part in found.parts) >= 0
    up = next(lane for lane in found.lanes if lane.name == "up:w0")
    assert up.measured_s > 5 * up.predicted_s
    text = "\n".join(found.lines())
    assert "waiting for weights to arrive +" in text
    assert "up:w0" in text
    assert found.to_dict()["error"] == pytest.approx(before.step_s / after.step_s - 1)
