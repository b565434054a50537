import threading

import pytest
from feed import feed_through_ring, measure_feed

from outsize.accelerators import CPU
from patience import PATIENCE_S


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_every_chunk_is_computed_on_once_in_order_and_from_its_own_slot(num_slots):
    slots: list[int | None] = [None] * num_slots
    seen = []

    def load(index, slot):
        assert slots[slot] is None, "a slot was filled before what it held was used"
        slots[slot] = index

    def compute(slot):
        seen.append(slots[slot])
        slots[slot] = None

    feed_through_ring(load, compute, num_chunks=11, num_slots=num_slots)
    assert seen == list(range(11))


def test_two_slots_let_a_load_go_on_beside_a_computation():
    second_is_loaded = threading.Event()

    def load(index, slot):
        if index == 1:
            second_is_loaded.set()

    def compute(slot):
        # With one slot this would wait for ever: the second load has nowhere to go.
        assert second_is_loaded.wait(PATIENCE_S)

    feed_through_ring(load, compute, num_chunks=2, num_slots=2)


def test_an_error_of_either_side_ends_both():
    def fail(*_):
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        feed_through_ring(fail, lambda slot: None, num_chunks=9, num_slots=2)
    with pytest.raises(OSError, match="gone"):
        feed_through_ring(lambda index, slot: None, fail, num_chunks=9, num_slots=2)


def test_nothing_stays_where_the_chunks_were(tmp_path):
    rates = measure_feed(CPU, tmp_path, chunk_bytes=2**20, num_chunks=6)
    assert list(rates.bytes_per_s) == ["demand-paged", "waited for", "two buffers", "four buffers"]
    assert all(rate > 0 for (rate,) in rates.bytes_per_s.values())
    assert list(tmp_path.iterdir()) == []
