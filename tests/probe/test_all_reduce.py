import signal
import subprocess
from types import SimpleNamespace

from outsize.probing import several_gpus
from outsize.probing.several_gpus import measure_all_reduce
from patience import PATIENCE_S
from probe.efforts import MIB


def test_two_processes_sum_and_tell_their_bus_bandwidth(monkeypatch):
    monkeypatch.setattr(several_gpus, "_START_S", PATIENCE_S)
    rates = measure_all_reduce(2, 2**14)
    assert [point.num_bytes for point in rates.points] == [2**power for power in range(10, 15)], rates.note
    assert rates.num_ranks == 2
    assert rates.fit is not None
    assert rates.seconds(4096) > 0


def test_what_cannot_be_summed_says_why(monkeypatch):
    assert "outsize all-reduce" in measure_all_reduce(2, 0).note
    small = 2**14
    assert "two of them" in measure_all_reduce(1, small).note
    assert "need 800.0" in measure_all_reduce(2, small, free_bytes=512 * MIB).note
    failed = SimpleNamespace(stderr="a trace\nno such backend\n")
    monkeypatch.setattr(several_gpus, "_launch", lambda *_: failed)
    assert measure_all_reduce(2, small).note == "torchrun: no such backend"


def test_ranks_that_do_not_answer_in_time_are_ended_by_torchrun(monkeypatch):
    """It ends them when it is asked to end; killed, it would leave them waiting for each other."""
    sent = []

    class Silent(subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__(["sleep", "60"], **options)

        def send_signal(self, number):
            sent.append(number)
            super().send_signal(number)

    monkeypatch.setattr(several_gpus, "_START_S", 0.05)
    monkeypatch.setattr(several_gpus.subprocess, "Popen", Silent)
    assert "timed out" in measure_all_reduce(2, 2**14).note
    assert sent == [signal.SIGTERM]
