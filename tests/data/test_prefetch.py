import threading

import pytest
import torch

from outsize.data import Batch, Prefetcher
from patience import PATIENCE_S


class Numbered:
    """Batch s holds the number s. Stops at ``fail_at``; tells when it begins a batch."""

    def __init__(self, fail_at=None):
        self.fail_at = fail_at
        self.begun = []
        self.second_begun = threading.Event()

    def batch(self, step, num_sequences):
        self.begun.append(step)
        if len(self.begun) >= 2:
            self.second_begun.set()
        if step == self.fail_at:
            raise OSError(f"no step {step}")
        ids = torch.full((num_sequences, 2), step)
        return Batch(ids, ids)


def test_batches_come_in_order_from_the_start_step():
    with Prefetcher(Numbered(), num_sequences=3, start_step=5) as prefetcher:
        batches = [prefetcher.next() for _ in range(20)]
    assert [int(batch.input_ids[0, 0]) for batch in batches] == list(range(5, 25))
    assert all(batch.num_sequences == 3 for batch in batches)


def test_works_ahead_before_anyone_asks():
    source = Numbered()
    with Prefetcher(source, num_sequences=1, depth=2):
        assert source.second_begun.wait(timeout=PATIENCE_S)


@pytest.mark.parametrize("depth", [1, 3])
def test_never_holds_more_than_depth(depth):
    source = Numbered()
    with Prefetcher(source, num_sequences=1, depth=depth) as prefetcher:
        for taken in range(1, 30):
            prefetcher.next()
            assert len(source.begun) <= taken + depth


def test_an_exception_comes_after_the_batches_before_it_and_stays():
    with Prefetcher(Numbered(fail_at=2), num_sequences=1) as prefetcher:
        prefetcher.next()
        prefetcher.next()
        for _ in range(2):
            with pytest.raises(OSError, match="no step 2"):
                prefetcher.next()


def test_leaving_early_stops_the_thread():
    prefetcher = Prefetcher(Numbered(), num_sequences=1, depth=1)

    def train():
        with prefetcher:
            prefetcher.next()
            raise KeyError

    with pytest.raises(KeyError):
        train()
    with pytest.raises(RuntimeError, match="not open"):
        prefetcher.next()
    prefetcher.close()


def test_closing_wakes_who_waits():
    release = threading.Event()
    errors = []

    class Stuck:
        def batch(self, step, num_sequences):
            assert release.wait(timeout=PATIENCE_S)
            raise OSError("late")

    def consume():
        with pytest.raises(RuntimeError) as caught:
            prefetcher.next()
        errors.append(caught.value)

    with Prefetcher(Stuck(), num_sequences=1) as prefetcher:
        consumer = threading.Thread(target=consume)
        closer = threading.Thread(target=prefetcher.close)
        consumer.start()
        closer.start()
        consumer.join(timeout=PATIENCE_S)  # although no batch ever came
        release.set()
        closer.join(timeout=PATIENCE_S)
    assert len(errors) == 1


def test_several_workers_make_batches_at_once_and_hand_them_out_in_order():
    together = threading.Barrier(3)

    class Together(Numbered):
        def batch(self, step, num_sequences):
            if step < 3:
                together.wait(timeout=PATIENCE_S)  # none of the three comes alone
            return super().batch(step, num_sequences)

    with Prefetcher(Together(), num_sequences=1, depth=3, num_workers=3) as prefetcher:
        batches = [prefetcher.next() for _ in range(20)]
    assert [int(batch.input_ids[0, 0]) for batch in batches] == list(range(20))


def test_an_error_of_a_later_batch_waits_for_its_turn():
    failed = threading.Event()

    class FailsFirst(Numbered):
        def batch(self, step, num_sequences):
            if step == 0:
                assert failed.wait(timeout=PATIENCE_S)
            if step == 1:
                failed.set()
                raise OSError("no step 1")
            return super().batch(step, num_sequences)

    with Prefetcher(FailsFirst(), num_sequences=1, depth=2, num_workers=2) as prefetcher:
        assert int(prefetcher.next().input_ids[0, 0]) == 0
        with pytest.raises(OSError, match="no step 1"):
            prefetcher.next()


def test_a_worker_gives_batches_the_form_in_which_they_are_used():
    def doubled(batch):
        assert threading.current_thread() is not threading.main_thread()
        return Batch(batch.input_ids * 2, batch.labels)

    with Prefetcher(Numbered(), num_sequences=1, start_step=3, finish=doubled) as prefetcher:
        assert int(prefetcher.next().input_ids[0, 0]) == 6


@pytest.mark.parametrize("wrong", [{"depth": 0}, {"num_workers": 0}])
def test_needs_room_for_one_and_one_worker(wrong):
    with pytest.raises(ValueError, match="at least 1"):
        Prefetcher(Numbered(), num_sequences=1, **wrong)
