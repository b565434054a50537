import signal
import threading

import pytest

from outsize.train.interrupt import SIGNALS, Interrupt


@pytest.mark.parametrize("number", SIGNALS)
def test_where_steps_can_be_finished_the_first_signal_is_a_request(number: int):
    with Interrupt() as interrupt:
        interrupt.can_finish = True
        assert not interrupt.requested
        signal.raise_signal(number)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


@pytest.mark.parametrize("number", SIGNALS)
def test_before_that_a_signal_ends_what_is_under_way(number: int):
    with Interrupt() as interrupt:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert not interrupt.requested


def test_handlers_are_given_back():
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interrupt():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
    with pytest.raises(ZeroDivisionError), Interrupt():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_in_another_thread_it_does_nothing():
    before = [signal.getsignal(number) for number in SIGNALS]
    seen = []

    def elsewhere() -> None:
        with Interrupt() as interrupt:
            seen.append(([signal.getsignal(number) for number in SIGNALS], interrupt.requested))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [(before, False)]
