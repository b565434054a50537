from dataclasses import replace

import pytest

from outsize.planner.predict.decision import SIMULATED_TILES
from outsize.planner.predict.decision_search import planned_at
from outsize.planner.predict.prediction import fastest
from planner.questions import ask


def test_a_step_takes_at_least_its_compute_and_the_shares_add_up():
    question = ask()
    found = fastest(question)
    compute_s = 3 * sum(question.workload_of(16).forward_flops) / question.machine.gpus[0].flops_per_s("bf16")
    assert found.step_s >= compute_s
    assert sum(found.stalls.values()) == pytest.approx(found.bubble, abs=0.01)
    assert found.usage["compute"] == pytest.approx(1 - found.bubble, abs=0.02)
    assert found.tokens_per_s == pytest.approx(question.tokens_per_step / found.step_s)
    assert 0 < found.mfu <= 0.75


def test_a_recompute_is_not_counted_as_work_done():
    """A block's recompute comes on top of three forwards, and only those count; the head recomputes nothing."""
    question = ask(sequences=256)
    counted_of = question.workload_of
    # What lies between products is as usual: then they reach the share of the peak.
    question = replace(question, workload_of=lambda count: replace(counted_of(count), moved_elements=()))
    found = fastest(question.deciding(activations="recompute"))
    *blocks, head = question.workload_of(1).forward_flops
    again = sum(question.workload_of(1).recompute_flops[:-1])
    counted = 3 * (sum(blocks) + head) / (3 * (sum(blocks) + head) + again)
    efficiency = question.machine.gpus[0].efficiency.value
    assert found.binding == "compute"
    assert found.mfu == pytest.approx(efficiency * counted * (1 - found.bubble), rel=0.02)


def test_the_home_is_told_plane_by_plane():
    question = ask()
    memory = fastest(question).memory["host"]
    padded = sum(unit.numel for unit in question.model.units)
    assert [
        memory[name] / padded for name in ("weights", "master weights", "optimizer state", "gradients")
    ] == [
        2,
        4,
        8,
        4,
    ]


def tiles(question):
    """Tiles of the largest unit that are simulated."""
    ops = planned_at(question, 2, "disk").simulated.programs[0]
    return 1 + max(op.tile for op in ops if op.tile is not None)


def test_tiles_are_simulated_coarsely_and_take_the_same_time():
    question = ask(home="disk", microbatches=2)
    coarse_s = planned_at(question, 2, "disk").step_s
    assert tiles(question) == SIMULATED_TILES
    import outsize.planner.predict.decision as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SIMULATED_TILES", 10**6)
        assert tiles(question) > 4 * SIMULATED_TILES
        fine_s = planned_at(question, 2, "disk").step_s
    assert coarse_s == pytest.approx(fine_s, rel=0.05)


def test_a_load_hides_behind_the_tokens_of_the_break_even():
    """On a step with fewer tokens than that, compute waits for weights; with many more it does not."""
    even = fastest(ask()).break_even
    few = fastest(ask(sequences=1, clip=False))
    many = fastest(ask(sequences=256))
    assert few.break_even.tokens_per_visit < even.tokens < many.break_even.tokens_per_visit
    assert few.bubble > 0.3 > 0.05 > many.bubble


def test_of_several_gpus_the_bubble_is_told_beside_that_of_free_copies():
    found = fastest(ask("2x4090"))
    assert found.free_bubble is not None
    assert 0 < found.free_bubble < found.bubble
    assert fastest(ask()).free_bubble is None


def test_the_same_question_has_the_same_answer():
    assert fastest(ask("2x4090")).to_dict() == fastest(ask("2x4090")).to_dict()
