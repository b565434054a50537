import gc
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.errors import BudgetExceededError
from outsize.storage.ledger import Arena, Ledger
from patience import PATIENCE_S


def test_the_sum_of_reservations_never_exceeds_the_budget():
    ledger = Ledger({"host": 100})
    first = ledger.reserve("host", "weights", 60)
    with pytest.raises(BudgetExceededError):
        ledger.reserve("host", "moments", 41)
    assert ledger.used("host") == 60
    ledger.reserve("host", "moments", 40)
    first.release()
    assert (ledger.used("host"), ledger.statistics()["host"].high_water_bytes) == (40, 100)


def test_release_is_idempotent_and_the_block_releases():
    ledger = Ledger({"disk": 10})
    with ledger.reserve("disk", "scratch", 10) as reservation:
        assert ledger.used("disk") == 10
        reservation.release()
        ledger.reserve("disk", "other", 7)
    assert ledger.used("disk") == 7


def test_the_refusal_lists_what_is_held_largest_first():
    ledger = Ledger({"host": 4 * 2**20})
    ledger.reserve("host", "slots", 2**20)
    for _ in range(2):
        ledger.reserve("host", "home: exp_avg", 2**20)
    with pytest.raises(BudgetExceededError) as caught:
        ledger.reserve("host", "tile ring", 2**21)
    assert str(caught.value) == (
        "tile ring asks for 2.00 MiB of tier 'host', which holds 3.00 MiB of 4.00 MiB; raise host_memory, or compute "
        "less at once. It holds:\n"
        "  home: exp_avg      2.00 MiB\n"
        "  slots              1.00 MiB"
    )


def test_no_budget_is_no_limit_and_is_still_counted():
    ledger = Ledger({"disk": None})
    ledger.reserve("disk", "home", 10**15)
    statistics = ledger.statistics()["disk"]
    assert (statistics.budget_bytes, statistics.used_bytes) == (None, 10**15)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Ledger({"host": -1}),
        lambda: Ledger({"host": 1}).reserve("host", "x", -1),
        lambda: Ledger({"host": 1}).reserve("hots", "x", 1),
        lambda: Ledger({"host": 1}).used("device"),
    ],
)
def test_nonsense_is_a_value_error(call):
    with pytest.raises(ValueError, match=r"negative|cannot reserve|no tier"):
        call()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=40))
def test_books_agree_with_a_plain_list(moves):
    ledger, held, most = Ledger({"host": 100}), [], 0
    for take, number in moves:
        if take and sum(r.num_bytes for r in held) + number <= 100:
            held.append(ledger.reserve("host", "x", number))
        elif take:
            with pytest.raises(BudgetExceededError):
                ledger.reserve("host", "x", number)
        elif held:
            held.pop(number % len(held)).release()
        most = max(most, sum(r.num_bytes for r in held))
        assert ledger.used("host") == sum(r.num_bytes for r in held)
        assert ledger.statistics()["host"].high_water_bytes == most


def test_threads_share_one_budget():
    ledger, granted = Ledger({"host": 50}), []
    barrier = threading.Barrier(8)

    def work():
        barrier.wait()
        for _ in range(20):
            try:
                granted.append(ledger.reserve("host", "x", 1))
            except BudgetExceededError:
                return

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(granted) == ledger.used("host") == 50


class Collecting(str):
    """A name at which the collector runs."""

    __slots__ = ()

    def __hash__(self) -> int:
        gc.collect()
        return super().__hash__()


def test_the_collector_lets_an_arena_go_in_the_middle_of_a_reservation():
    """As it may at any call; what was a cycle had the ledger's own thread wait for itself."""
    ledger = Ledger({"host": 8192})
    ledger.reserve("host", Collecting("moments"), 4096)
    said: list[str] = []

    def reserve() -> None:
        with pytest.raises(BudgetExceededError) as refused:
            ledger.reserve("host", "weights", 8192)
        said.append(str(refused.value))

    gc.disable()
    try:
        arena = Arena(ledger=ledger)
        arena.take(4096, "keys and values")
        cycle: list[object] = [arena]
        cycle.append(cycle)
        del arena, cycle
        thread = threading.Thread(target=reserve, daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
    finally:
        gc.enable()
    assert said
    assert ledger.used("host") == 4096
