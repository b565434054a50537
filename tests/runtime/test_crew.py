"""Programs of several workers as they run: the bits of a resident run, whatever the cut, the rounds, the workers."""

import pytest
import torch
from torch import nn

import reference
from outsize.planner.stages import Stages, spans_down, spans_up
from reference import Recipe
from runtime.crews import train_crew
from runtime.oddities import Sparse, batch


def make() -> nn.Module:
    torch.manual_seed(1)
    return Sparse()


def batches(count: int, steps: int = 3) -> list[list[dict[str, torch.Tensor]]]:
    return [[batch(seed=10 * step + m, rows=1 + m % 2) for m in range(count)] for step in range(steps)]


def recipe(**changes) -> Recipe:
    return Recipe(steps=3, schedule="constant", causal=False, **changes)


def assert_same(got, want) -> None:
    assert got.losses == want.losses
    different = [name for name, weight in want.weights.items() if not torch.equal(got.weights[name], weight)]
    assert different == []


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_any_number_of_workers(num_workers, count, max_grad_norm):
    got = train_crew(make(), batches(count), num_workers, max_grad_norm=max_grad_norm)
    want = reference.train(make(), batches(count), recipe(max_grad_norm=max_grad_norm))
    assert_same(got, want)


def stages(forward, backward, round_size):
    return Stages(forward=spans_up(forward), backward=spans_down(backward, 4), round_size=round_size)


@pytest.mark.parametrize(
    "cut",
    [
        ([], [4], 1),
        ([], [4], 3),
        ([3], [1, 3], 2),
        ([1, 1, 1], [1, 1, 1, 1], 2),
        ([1, 1], [2, 1, 1], 2),
        ([2], [2, 2], 1),
        ([1], [3, 1], 3),
        ([1, 2], [1, 2, 1], 5),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_any_cut_and_any_rounds(cut, num_workers):
    chosen = stages(*cut)
    if chosen.num_stages < num_workers:
        return
    got = train_crew(make(), batches(5), num_workers, stages=chosen, max_grad_norm=0.5)
    assert_same(got, reference.train(make(), batches(5), recipe(max_grad_norm=0.5)))
