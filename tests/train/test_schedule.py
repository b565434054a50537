import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from outsize.session.steps import LearningRateSchedule

THEIRS = {
    "constant": lambda optimizer, warmup, total: transformers.get_constant_schedule_with_warmup(
        optimizer, warmup
    ),
    "linear": transformers.get_linear_schedule_with_warmup,
    "cosine": transformers.get_cosine_schedule_with_warmup,
    "cosine_restarts": lambda optimizer, warmup, total: (
        transformers.get_cosine_with_hard_restarts_schedule_with_warmup(optimizer, warmup, total, 3)
    ),
    "wsd": lambda optimizer, warmup, total: transformers.get_wsd_schedule(
        optimizer, warmup, total // 5, num_training_steps=total
    ),
    "inverse_sqrt": lambda optimizer, warmup, total: transformers.get_inverse_sqrt_schedule(
        optimizer, warmup
    ),
}
MORE = {"cosine_restarts": {"num_cycles": 3}}


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize(("warmup", "total"), [(0, 10), (3, 10), (1, 1), (10, 10), (0, 0), (0, 1)])
def test_every_step_has_the_rate_of_transformers(kind, warmup, total):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    theirs = THEIRS[kind](optimizer, warmup, total)
    more = {"num_decay_steps": total // 5} if kind == "wsd" else MORE.get(kind, {})
    ours = LearningRateSchedule(kind=kind, lr=3e-4, num_warmup_steps=warmup, num_training_steps=total, **more)
    for step in range(total + 3):
        assert ours.learning_rate(step) == optimizer.param_groups[0]["lr"], step
        optimizer.step()
        theirs.step()


@given(st.sampled_from(sorted(THEIRS)), st.integers(0, 50), st.integers(0, 50), st.integers(0, 200))
def test_rates_lie_between_zero_and_the_peak(kind, warmup, rest, step):
    schedule = LearningRateSchedule(
        kind=kind, lr=0.5, num_warmup_steps=warmup, num_training_steps=warmup + rest
    )
    assert 0.0 <= schedule.learning_rate(step) <= 0.5


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_a_least_rate_is_reached_at_the_end_and_not_undercut(kind):
    schedule = LearningRateSchedule(
        kind=kind, lr=1e-3, min_lr=1e-4, num_warmup_steps=5, num_training_steps=100, num_decay_steps=20
    )
    assert schedule.learning_rate(5) == 1e-3
    assert schedule.learning_rate(100) == pytest.approx(1e-4)
    assert min(schedule.learning_rate(step) for step in range(5, 120)) == pytest.approx(1e-4)
    if kind == "wsd":
        assert {schedule.learning_rate(step) for step in range(5, 80)} == {1e-3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "cosin"}, "choose constant, linear, cosine"),
        ({"lr": -1.0}, "lr must be"),
        ({"lr": float("nan")}, "lr must be"),
        ({"min_lr": 0.2}, "min_lr must lie in 0..lr"),
        ({"num_warmup_steps": -1}, "num_warmup_steps"),
        ({"num_warmup_steps": 11}, "num_warmup_steps"),
    ],
)
def test_nonsense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        LearningRateSchedule(**({"lr": 0.1, "num_training_steps": 10} | change))
