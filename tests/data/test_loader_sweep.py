import pytest
import torch

from outsize.data import Batch
from outsize.data.prefetch import LoaderRate, enough_workers, sweep_loader


class Counting:
    def __init__(self):
        self.steps = set()

    def batch(self, step, num_sequences):
        self.steps.add(step)
        ids = torch.zeros(num_sequences, 2, dtype=torch.int64)
        return Batch(ids, ids)


def test_each_number_of_workers_makes_the_batches_of_the_run():
    source = Counting()
    rates = sweep_loader(source, num_sequences=3, seq_len=2, num_batches=5, depth=1)
    assert [rate.workers for rate in rates] == [1, 2, 4]
    assert source.steps >= set(range(6))  # one before the clock starts, and five


@pytest.mark.parametrize(
    ("rates", "enough"),
    [((100, 105, 99), 1), ((100, 150, 160), 2), ((100, 150, 300), 4), ((0.5, 0.5, 0.5), 1)],
)
def test_the_fewest_that_are_nearly_the_fastest_are_enough(rates, enough):
    assert enough_workers([LoaderRate(*pair) for pair in zip((1, 2, 4), rates, strict=True)]) == enough
