import pytest
from classical import (
    Layers,
    Schedule,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    round_robin,
    run_schedule,
)

EVEN = Layers(num_layers=8, forward_s=1.0, backward_s=1.0, head_forward_s=0.0, head_backward_s=0.0)
# Llama-3.1-8B on eight RTX 4090, milliseconds for 4 sequences of 2,048 tokens.
LLAMA = Layers(
    num_layers=32,
    forward_s=18.5037,
    backward_s=41.2066,
    head_forward_s=37.2255,
    head_backward_s=74.501,
    hop_s=3.2,
)


@pytest.mark.parametrize("schedule", [gpipe(12, [2] * 4), one_f_one_b(12, [2] * 4)])
def test_equal_stages_leave_the_known_bubble(schedule):
    """(p-1) / (m+p-1) of the time, for p ranks and m microbatches."""
    _, idle = run_schedule(schedule, EVEN)
    assert idle.bubble == pytest.approx(3 / 15)


def test_loops_divide_the_bubble():
    """(p-1) / (v·m+p-1) with v stages per rank."""
    _, idle = run_schedule(looped_bfs(4, 12, [1] * 8), EVEN)
    assert idle.bubble == pytest.approx(3 / (2 * 12 + 3))
    _, idle = run_schedule(interleaved(4, 12, [1] * 8), EVEN)
    assert idle.bubble == pytest.approx(3 / (2 * 12 + 3))


def test_1f1b_holds_fewer_microbatches_than_gpipe():
    def most_held(schedule):
        held = most = 0
        for kind, _, _ in schedule.ranks[0]:
            held += 1 if kind == "F" else -1
            most = max(most, held)
        return most

    assert most_held(gpipe(12, [2] * 4)) == 12
    assert most_held(one_f_one_b(12, [2] * 4)) == 4


@pytest.mark.parametrize(
    ("schedule", "published"),
    [
        (gpipe(16, [4] * 8), 42.1),
        (one_f_one_b(16, [4] * 8), 42.1),
        (interleaved(8, 16, [1] * 32), 30.6),
        (looped_bfs(8, 16, [1] * 32), 29.2),
        (round_robin(8, 16, 8, [5, 5, 5, 5, 6, 6], [0, *[2] * 16]), 14.3),
    ],
    ids=["gpipe", "1f1b", "interleaved", "looped", "round-robin"],
)
def test_published_shares_are_reproduced_within_a_point(schedule, published):
    timeline, idle = run_schedule(schedule, LLAMA)
    assert 100 * idle.bubble == pytest.approx(published, abs=0.1)
    assert len(timeline.lanes) == 8


def test_without_a_barrier_only_the_inner_idle_time_counts():
    _, idle = run_schedule(round_robin(8, 16, 8, [5, 5, 5, 5, 6, 6], [0, *[2] * 16]), LLAMA)
    assert 100 * idle.inner == pytest.approx(1.3, abs=1)


def test_every_action_runs_once():
    timeline, _ = run_schedule(interleaved(4, 8, [1] * 8), EVEN)
    names = [event.op for event in timeline.events]
    assert len(set(names)) == len(names) == 2 * 8 * 8


def test_ranks_that_wait_for_each_other():
    backward_first = Schedule(ranks=((("B", 0, 0), ("F", 0, 0)),), forward_layers=(1,), backward_layers=(1,))
    with pytest.raises(ValueError, match=r"ranks \[0\] wait"):
        run_schedule(backward_first, EVEN)
