from dataclasses import replace
from types import SimpleNamespace

from outsize.probe import all_reduce
from outsize.probe.all_reduce import measure_all_reduce
from probe.efforts import MIB, TINY


def test_two_processes_sum_and_tell_their_bus_bandwidth():
    rates = measure_all_reduce(2, replace(TINY, all_reduce_bytes_max=2**14))
    assert [point.num_bytes for point in rates.points] == [2**power for power in range(10, 15)], rates.note
    assert rates.num_ranks == 2
    assert rates.fit is not None
    assert rates.seconds(4096) > 0


def test_what_cannot_be_summed_says_why(monkeypatch):
    assert "--full" in measure_all_reduce(2, TINY).note
    small = replace(TINY, all_reduce_bytes_max=2**14)
    assert "two of them" in measure_all_reduce(1, small).note
    assert "need 800.0" in measure_all_reduce(2, small, free_bytes=512 * MIB).note
    failed = SimpleNamespace(stderr="a trace\nno such backend\n")
    monkeypatch.setattr(all_reduce.subprocess, "run", lambda *_, **__: failed)
    assert measure_all_reduce(2, small).note == "torchrun: no such backend"
