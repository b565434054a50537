from dataclasses import replace
from itertools import product
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.planner.passes.step_parts import build_step
from outsize.planner.program.program import Kind
from outsize.planner.program.stages import Stages, spans_down, spans_up
from outsize.planner.search.cuts import StepBound
from outsize.planner.search.partition import Pipeline, partition
from outsize.planner.simulate.discrete import Cost
from outsize.planner.simulate.pipeline import StageSums, StageTimes, bubble, makespan_s
from outsize.planner.simulate.simulator import CostModel, simulate
from planner.test_staged import staged


def compositions(total):
    """Yield every way to cut ``total`` units."""
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        for rest in compositions(total - first):
            yield (first, *rest)


def brute_force(pipeline, round_sizes):
    top = len(pipeline.forward_s)
    best = float("inf")
    for fused in range(top):
        for forward, down in product(compositions(fused), compositions(fused)):
            if 1 + len(forward) + len(down) < pipeline.num_workers:
                continue
            for size in round_sizes:
                best = min(best, pipeline.step_s(pipeline.stages(forward, (top - fused, *down), size)))
    return best


def instance(random):
    num_units = random.randint(2, 6)
    forward = [random.choice([1.0, random.uniform(0.2, 3)]) for _ in range(num_units)]
    backward = [f * random.uniform(2.5, 3.5) for f in forward]
    return Pipeline(
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        num_workers=random.randint(1, min(4, num_units)),
        num_microbatches=random.randint(1, 8),
        hop_s=random.choice([0.0, 0.1]),
    )


@pytest.mark.parametrize("part", range(4))
def test_within_one_percent_of_brute_force_on_200_instances(part):
    random = Random(part)
    for _ in range(50):
        pipeline = instance(random)
        sizes = sorted({pipeline.num_microbatches, min(pipeline.num_workers, pipeline.num_microbatches)})
        found = pipeline.step_s(partition(pipeline, sizes))
        assert found <= brute_force(pipeline, sizes) * 1.01


@settings(max_examples=200)
@given(st.randoms(use_true_random=False))
def test_no_step_is_faster_than_what_it_takes_at_least(random):
    """Whatever the cut, the rounds, and what crosses links: what is ruled out by the bound is no faster."""
    plain = instance(random)
    count = len(plain.forward_s)
    moved = [tuple(random.choice([0.0, 1.0, 9.0]) * random.random() for _ in range(count)) for _ in range(2)]
    pipeline = replace(
        plain,
        hop_s=random.choice([0.0, 0.1, 4.0]),
        weights_s=moved[0],
        gradients_s=moved[1],
        recompute_s=tuple(unit_s * random.random() for unit_s in plain.forward_s),
        keeps=random.random() < 0.5,
        halves=random.choice([(2, 2), (2, 1), (1, 1)]),
        bottom=random.choice([0, random.randrange(count)]),
    )
    fused = random.randint(1, count - pipeline.bottom)
    beside = (count - fused, count - fused - pipeline.bottom)
    ups, downs = (random.choice(list(compositions(size))) for size in beside)
    size = random.randint(1, pipeline.num_microbatches)
    step_s = pipeline.step_s(pipeline.stages(ups, (fused, *downs), size))
    if len(ups) + 1 + len(downs) >= pipeline.num_workers:
        least = StepBound(pipeline).least(ups, (fused, *downs), size)
        assert least.step_s <= step_s * (1 + 1e-9)
        assert pipeline.least_s(size) <= step_s * (1 + 1e-9)
        # A step that is given up once a worker has waited too long is no faster than that, and any other is timed.
        limit_s = step_s * random.choice([0.5, 0.99, 1.01, 2.0])
        told_s = pipeline.step_s(pipeline.stages(ups, (fused, *downs), size), limit_s, least.busy_s)
        assert told_s == step_s or (told_s == inf and step_s >= limit_s)


def test_rounds_that_repeat_are_timed_once():
    """A thousand rounds take as long as ten of them and 990 more of what each adds once they repeat."""
    pipeline = replace(instance(Random(5)), weights_s=(), num_workers=2)
    count = len(pipeline.forward_s)
    stages = pipeline.stages((1,) * (count - 1), (1,) * count, 3)
    ten_s, twenty_s, thousand_s = (
        replace(pipeline, num_microbatches=3 * rounds).step_s(stages) for rounds in (10, 20, 1000)
    )
    assert thousand_s == pytest.approx(ten_s + 99 * (twenty_s - ten_s))


def test_the_same_units_give_the_same_cuts():
    pipeline = instance(Random(7))
    assert partition(pipeline) == partition(pipeline)


def test_a_faster_search_finds_what_the_slower_one_found():
    """Cuts found before the search remembered which directions fit; only what makes cuts better may change them."""
    uneven = Pipeline(
        forward_s=(0.001, *[1.0] * 12, 0.5),
        backward_s=(0.003, *[2.7] * 12, 2.1),
        recompute_s=(0.001, *[0.7] * 12, 0.5),
        num_workers=3,
        num_microbatches=8,
        hop_s=0.05,
        keeps=True,
        weights_s=(0.5, *[0.2] * 12, 0.6),
        gradients_s=(1.0, *[0.4] * 12, 1.2),
        halves=(2, 1),
        fits=lambda span, backward: span[1] - span[0] <= (2 if backward else 4),
    )
    frozen = Pipeline(
        forward_s=tuple(1.0 + 0.1 * (unit % 3) for unit in range(9)),
        backward_s=tuple(3.0 + 0.2 * (unit % 4) for unit in range(9)),
        num_workers=4,
        num_microbatches=5,
        bottom=3,
        holds=lambda stages: len(stages.backward) > 1,
    )
    found = [partition(pipeline, max_visits=60_000) for pipeline in (uneven, frozen)]
    assert [p.step_s(s) for p, s in zip((uneven, frozen), found, strict=True)] == pytest.approx(
        [129.774, 46.6]
    )


def test_stages_fit_the_workers():
    def fits(span, backward):
        return span[1] - span[0] <= (1 if backward else 2)

    pipeline = Pipeline(
        forward_s=(1.0,) * 6, backward_s=(3.0,) * 6, num_workers=2, num_microbatches=4, fits=fits
    )
    stages = partition(pipeline)
    assert all(fits(span, False) for span in stages.forward)
    assert all(fits(span, True) for span in stages.backward)
    with pytest.raises(ValueError, match="no cut fits"):
        partition(replace(pipeline, fits=lambda span, backward: False))
    with pytest.raises(ValueError, match="no cut fits"):
        partition(replace(pipeline, num_workers=20))


def test_equal_stages_in_rounds_of_one_microbatch_per_worker_leave_fill_and_drain():
    """k(k-1) idle stage times of k workers, in M·S + k(k-1)."""
    times = [StageTimes(1.0)] * 16
    assert bubble(times, 8, 8, 8) == pytest.approx(56 / (8 * 16 + 56))
    assert bubble(times, 64, 8, 8) == pytest.approx(56 / (64 * 16 + 56))
    assert bubble(times[:6], 16, 2, 4, overlaps=False) > bubble(times[:6], 16, 2, 4)
    assert bubble([StageTimes(0.0)], 1, 1, 1) == 0


@pytest.mark.parametrize("seed", range(24))
def test_the_program_of_the_stages_takes_the_same_time(seed):
    """The fast twin and the simulator agree, where copies cost nothing but the hop between stages."""
    random = Random(seed)
    pipeline = replace(instance(random), hop_s=random.choice([0.0, 0.25]), overlaps=lambda size: seed < 12)
    top = len(pipeline.forward_s)
    stages = partition(
        pipeline, [random.randint(1, pipeline.num_microbatches)], max_visits=random.choice([1, 20_000])
    )
    layout = staged(top, stages, pipeline.num_workers, num_microbatches=pipeline.num_microbatches)
    starts = {first for first, _ in (*stages.forward, stages.backward[0])}
    seen = set()

    def cost_of(op):
        if op.kind is Kind.FORWARD:
            return Cost(seconds=pipeline.forward_s[op.unit])
        if op.kind is Kind.RECOMPUTE:
            return Cost(seconds=pipeline.forward_s[op.unit])
        if op.kind in (Kind.FORWARD_BACKWARD, Kind.BACKWARD):
            apart = op.unit < stages.backward[0][0]
            return Cost(seconds=pipeline.backward_s[op.unit] - apart * pipeline.forward_s[op.unit])
        handed = op.kind is Kind.FETCH and op.unit in starts and (op.unit, op.microbatch) not in seen
        if handed:
            seen.add((op.unit, op.microbatch))
        return Cost(seconds=pipeline.hop_s if handed or op.kind is Kind.RECV else 0.0)

    done = simulate([build_step(layout)], layout, CostModel(cost_of=cost_of, capacity={}))
    assert done.makespan_s == pytest.approx(pipeline.step_s(stages))


def test_a_235b_mixture_of_experts_is_cut_in_no_time():
    """As a count of timed steps, since a test reads no clock."""
    pipeline = Pipeline(
        forward_s=(*[0.043] * 94, 0.0424),
        backward_s=(*[0.144] * 94, 0.0857),
        num_workers=8,
        num_microbatches=16,
        hop_s=0.0032,
        fits=lambda span, backward: span[1] - span[0] <= (1 if backward else 2),
    )
    stages = partition(pipeline, [16], max_visits=40_000)
    times = pipeline.sums.of(stages)
    assert bubble(times, 16, 16, 8, 0.0032) < 0.05


def test_makespan_of_one_stage_is_its_compute():
    assert makespan_s([StageTimes(2.0)], 5, 2, 1, 0.5) == 10
    stages = Stages(forward=spans_up([1]), backward=spans_down([1, 1], 2), round_size=1)
    assert [stage.seconds for stage in StageSums((1.0, 2.0), (3.0, 4.0)).of(stages)] == [1.0, 4.0, 3.0]
