import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from outsize.errors import StorageError
from outsize.training.evaluation import SIGNALS, Interrupt
from outsize.training.loop import Run


@pytest.mark.parametrize("number", SIGNALS)
def test_where_steps_can_be_finished_the_first_signal_is_a_request(number: int):
    said: list[str] = []
    with Interrupt(said.append) as interrupt:
        interrupt.finish = lambda: "the run ends after step 7"
        assert not interrupt.requested
        signal.raise_signal(number)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    assert said == [f"{name} was heard: the run ends after step 7"]


def test_it_is_answered_while_the_step_that_is_waited_for_goes_on():
    """The thread that would end the step waits here until the answer has come."""
    answered = threading.Event()
    with Interrupt(lambda _: answered.set()) as interrupt:
        interrupt.finish = str
        signal.raise_signal(signal.SIGINT)
        assert answered.wait(60)


@pytest.mark.parametrize("number", SIGNALS)
def test_before_that_a_signal_ends_what_is_under_way(number: int):
    with Interrupt() as interrupt:
        interrupt.doing = "the model was built"
        with pytest.raises(
            KeyboardInterrupt, match=r"^interrupted while the model was built; .* nothing is lost$"
        ):
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


def test_a_run_that_waits_for_its_last_update_names_no_step_that_never_comes():
    def unreadable() -> str:
        raise StorageError("the disk is gone")

    run: Any = SimpleNamespace(
        watchdog=SimpleNamespace(doing="", typical_step_s=2.0),
        position=SimpleNamespace(step=10),
        config=SimpleNamespace(train=SimpleNamespace(steps=10)),
        _known_s=time.monotonic(),
        next_start=lambda: "--resume auto goes on after step 9",
    )
    assert Run._awaited(run) == (
        "the run ends after step 10, its last one, and saves. A second one stops it at once: --resume auto goes on "
        "after step 9"
    )
    run.next_start = unreadable
    assert Run._awaited(run).endswith("A second one stops it at once")
