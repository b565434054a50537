import threading

import pytest

from outsize.storage.prealloc import IOPool
from patience import PATIENCE_S


def test_calls_of_one_caller_are_in_flight_together(pool):
    barrier = threading.Barrier(pool.num_threads, timeout=PATIENCE_S)
    pool.run([barrier.wait] * pool.num_threads)


def test_the_first_error_is_raised_after_the_last_call_ended(pool):
    failed, finish, ended = threading.Event(), threading.Event(), []

    def fail():
        finish.set()
        failed.set()
        raise OSError("broken")

    def slow():
        assert finish.wait(PATIENCE_S)
        ended.append(True)

    with pytest.raises(OSError, match="broken"):
        pool.run([slow, fail])
    assert failed.is_set()
    assert ended == [True]
    pool.run([slow, slow])
    assert len(ended) == 3


def test_calls_after_an_error_are_left_out():
    ran = []
    with IOPool(1) as pool, pytest.raises(ZeroDivisionError):
        pool.run([lambda: 1 / 0, lambda: ran.append(1), lambda: ran.append(2)])
    assert ran == []


def test_callers_do_not_see_each_others_errors(pool):
    seen = []

    def bad_caller():
        try:
            pool.run([lambda: 1 / 0] * 5)
        except ZeroDivisionError:
            seen.append("bad")

    threads = [threading.Thread(target=bad_caller) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        pool.run([lambda: None] * 3)
    for thread in threads:
        thread.join()
    assert seen == ["bad"] * 4


def test_an_interrupt_waits_for_the_requests(monkeypatch):
    """1. A helper is inside a request. 2. The caller waits for it. 3. Ctrl-C. 4. It ends. 5. Raise."""
    helping, interrupted, ended = threading.Event(), threading.Event(), []
    caller = threading.current_thread()

    class InterruptedOnce(threading.Event):
        def wait(self, timeout=None):
            if not interrupted.is_set():
                interrupted.set()
                raise KeyboardInterrupt
            return super().wait(timeout)

    def request():
        if threading.current_thread() is caller:
            assert helping.wait(PATIENCE_S)
        else:
            helping.set()
            assert interrupted.wait(PATIENCE_S)
        ended.append(True)

    with IOPool(1) as pool:
        monkeypatch.setattr(threading, "Event", InterruptedOnce)
        with pytest.raises(KeyboardInterrupt):
            pool.run([request, request])
        assert ended == [True, True]


def test_close_is_idempotent_and_a_closed_pool_refuses():
    pool = IOPool(2)
    pool.run([])
    pool.close()
    pool.close()
    for calls in ([], [lambda: None], [lambda: None] * 2):
        with pytest.raises(ValueError, match="closed"):
            pool.run(calls)
    with pytest.raises(ValueError, match="at least one"):
        IOPool(0)
