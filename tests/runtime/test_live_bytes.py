import gc

import pytest
import torch

from outsize.runtime.trial.live_bytes import LiveBytes

KIB = 1024


@pytest.fixture
def live():
    known = torch.empty(0).untyped_storage()
    counter = LiveBytes(known)
    with counter:
        yield counter
    counter.forget()


def kib(count: int) -> torch.Tensor:
    return torch.empty(count * KIB, dtype=torch.uint8)


def test_bytes_count_from_creation_to_release(live: LiveBytes):
    one = kib(2)
    assert live.now == 2 * KIB
    two = kib(3)
    assert live.now == 5 * KIB
    del one
    assert (live.now, live.peak) == (3 * KIB, 5 * KIB)
    del two
    assert live.now == 0


def test_views_and_work_in_place_count_nothing(live: LiveBytes):
    whole = kib(4)
    parts = [whole[:KIB], whole.view(4, KIB), whole.detach(), whole.t()]
    whole.add_(1)
    assert live.now == 4 * KIB
    del whole
    assert live.now == 4 * KIB  # the views keep it
    del parts
    assert live.now == 0


def test_what_autograd_keeps_is_counted_until_it_lets_go(live: LiveBytes):
    x = torch.ones(KIB, requires_grad=True)
    y = x.exp().sin()
    kept = live.now
    assert kept >= 3 * 4 * KIB  # x, exp(x) for both derivatives, and y
    y.sum().backward()
    del y
    gc.collect()
    assert live.now == 2 * 4 * KIB  # x and its gradient


def test_a_peak_is_measured_from_a_point_on(live: LiveBytes):
    del [kib(9)][0]
    assert live.peak == 9 * KIB
    held = kib(1)
    assert live.restart() == KIB
    assert live.peak == KIB
    del [kib(2)][0]
    assert live.peak == 3 * KIB
    assert held.numel() == KIB


def test_nothing_counts_outside(live: LiveBytes):
    inside = kib(1)
    live.__exit__(None, None, None)
    outside = kib(5)
    assert live.now == KIB
    del outside, inside
    assert live.now == 0
    live.__enter__()


def test_storage_that_was_there_before_does_not_count():
    plane = torch.empty(KIB)
    with LiveBytes(plane.untyped_storage()) as live:
        view = plane[:10].view(2, 5)
        assert live.now == 0
        copy = view + 1
        assert live.now == copy.untyped_storage().nbytes()
    live.forget()


def test_what_is_forgotten_is_followed_no_more():
    known = torch.empty(0).untyped_storage()
    with LiveBytes(known) as live:
        tensor = kib(1)
    live.forget()
    before = live.now
    del tensor
    assert live.now == before
