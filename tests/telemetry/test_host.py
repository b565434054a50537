"""What a kernel counts, in planted files: two looks, and what the second says has happened since the first."""

import os

import pytest

from hardware.fake_machine import build
from outsize.telemetry import counters
from outsize.telemetry.counters import HostSampler
from outsize.telemetry.run_reading import HostSample

CPU = min(os.sched_getaffinity(0))
HZ, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


def kernel(
    *, ticks=0, stolen=0, cpu_ns=0, queued_ns=0, throttled_ns=0, pressure_us=0, swapped=0, threads=(7, 8)
):
    """The files of a kernel, with a control group of version 1 that has a quota."""
    return {
        "proc/stat": f"cpu 9 9 9 9 9 9 9 9 0 0\ncpu{CPU} {ticks} 0 0 5 0 0 0 {stolen} 0 0\ncpu9999 7 0 0 0 0 0 0 0\n",
        "proc/pressure/memory": f"some avg10=0.00 avg60=0.00 avg300=0.00 total={pressure_us}\nfull total=5\n",
        "proc/vmstat": f"nr_free_pages 5\npswpin {swapped}\npswpout 3\n",
        **{f"proc/self/task/{thread}/schedstat": f"{cpu_ns} {queued_ns} 4\n" for thread in threads},
        "proc/self/cgroup": "2:cpu,cpuacct:/docker/abc\n",
        "sys/fs/cgroup/cpu/docker/abc/cpu.stat": f"nr_throttled 3\nthrottled_time {throttled_ns}\n",
    }


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(counters.time, "monotonic", lambda: now[0])
    return now


def test_a_look_tells_what_was_counted_since_the_one_before(tmp_path, clock):
    sampler = HostSampler(build(tmp_path, kernel(ticks=50, stolen=5)))
    build(
        tmp_path,
        kernel(
            ticks=50 + 10_000 * HZ,
            stolen=5 + 2 * HZ,
            cpu_ns=10**9,
            queued_ns=3 * 10**9,
            throttled_ns=10**9,
            pressure_us=500_000,
            swapped=7,
            threads=(7, 8, 9),
        ),
    )
    clock[0] += 2.0
    found = sampler.sample()
    assert found.span_s == 2.0
    assert found.queued_s == 9.0  # that of a new thread, too
    assert found.cpu_s_by_thread == {counters.NATIVE: 3.0}
    assert 9_000 < found.others_cpu_s <= 10_000  # less what this process had itself
    assert found.stolen_cpu_s == pytest.approx(2.0)
    assert found.throttled_s == 1.0
    assert found.memory_pressure_s == 0.5
    assert found.swapped_in_bytes == 7 * PAGE
    clock[0] += 1.0
    again = sampler.sample()
    assert (again.span_s, again.queued_s, again.throttled_s, again.others_cpu_s) == (1.0, 0.0, 0.0, 0.0)


def test_a_new_thread_with_the_number_of_one_that_has_ended_takes_nothing_back(tmp_path, clock):
    sampler = HostSampler(build(tmp_path, kernel(queued_ns=10**9)))
    build(tmp_path, kernel(queued_ns=5))
    clock[0] += 1.0
    assert sampler.sample().queued_s == 0.0


def test_short_steps_share_a_look(tmp_path, clock):
    sampler = HostSampler(build(tmp_path, kernel()))
    clock[0] += 0.15
    assert sampler.sample() is None
    clock[0] += 0.15
    assert sampler.sample().span_s == pytest.approx(0.3)


def test_a_kernel_that_tells_nothing_is_no_error(tmp_path, clock):
    sampler = HostSampler(tmp_path)
    clock[0] += 1.0
    found = sampler.sample().model_dump()
    assert {name for name, value in found.items() if value is not None} == {
        "span_s", "kernel_cpu_s", "major_faults", "minor_faults",
    }  # fmt: skip


def test_this_kernel_is_read(clock):
    sampler = HostSampler()
    clock[0] += 1.0
    HostSample.model_validate(sampler.sample().model_dump())
