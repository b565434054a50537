import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.data.batch import SeededPermutation


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 1000))
def test_every_position_is_hit_exactly_once(size, seed, epoch):
    images = SeededPermutation(size, seed, epoch)(np.arange(size))
    assert sorted(images.tolist()) == list(range(size))


@given(size=st.integers(2**40, 2**62), seed=st.integers(0, 2**32), positions=st.data())
def test_huge_domains_need_no_array_and_stay_inside(size, seed, positions):
    chosen = positions.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8, unique=True))
    images = SeededPermutation(size, seed)(np.array(chosen))
    assert len(set(images.tolist())) == len(chosen)
    assert all(0 <= image < size for image in images.tolist())


def test_positions_are_independent_of_how_they_are_asked_for():
    permutation = SeededPermutation(1000, seed=3)
    together = permutation(np.arange(1000))
    one_by_one = [permutation(np.array([i]))[0] for i in range(1000)]
    assert together.tolist() == one_by_one


def test_seed_and_epoch_change_the_order():
    orders = {
        tuple(SeededPermutation(100, seed, epoch)(np.arange(100)).tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


@pytest.mark.parametrize("size", [2, 3, 5, 1000])
def test_positions_go_everywhere_about_equally_often(size):
    trials = 2000
    images = np.array([SeededPermutation(size, seed)(np.array([1 % size]))[0] for seed in range(trials)])
    counts = np.bincount(images * min(size, 10) // size, minlength=min(size, 10))
    expected = trials / len(counts)
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 40  # 9 degrees of freedom: beyond 40 once in 100,000 fair trials


def test_does_not_leave_neighbours_together():
    images = SeededPermutation(100_000, seed=1)(np.arange(100_000))
    assert (np.abs(np.diff(images)) == 1).sum() < 20  # 2 expected


def test_refuses_an_empty_domain():
    with pytest.raises(ValueError, match="at least one"):
        SeededPermutation(0, seed=0)
