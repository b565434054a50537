"""Threads go where a placement says, and come back; on a machine of one node nothing changes."""

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from outsize.hardware.cpu import Placement, left_alone
from outsize.session import process_settings
from outsize.session.process_settings import address_of, bound
from outsize.training.run import train
from support import in_dir, make_run


def affinities() -> dict[int, set[int]]:
    return {int(p.name): os.sched_getaffinity(int(p.name)) for p in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_threads_old_and_new_are_bound_and_come_back():
    cpus = os.sched_getaffinity(0)
    one = frozenset({min(cpus)})
    go, old_ready = threading.Event(), threading.Event()
    ids = {}

    def live(name: str, ready: threading.Event) -> None:
        ids[name] = threading.get_native_id()
        ready.set()
        go.wait()

    old = threading.Thread(target=live, args=("old", old_ready))
    old.start()
    old_ready.wait()
    new_ready = threading.Event()
    new = threading.Thread(target=live, args=("new", new_ready))
    try:
        with bound(Placement(node=1, cpus=one, reason="a test")):
            new.start()
            new_ready.wait()
            assert all(os.sched_getaffinity(ids[name]) == one for name in ("old", "new"))
            assert os.sched_getaffinity(0) == one
        assert all(os.sched_getaffinity(ids[name]) == cpus for name in ("old", "new"))
        assert os.sched_getaffinity(0) == cpus
    finally:
        go.set()
        old.join()
        if new.ident is not None:
            new.join()


def test_a_thread_that_ends_meanwhile_holds_nobody_up(monkeypatch):
    own, gone = os.getpid(), 2**22 + 1  # above the most that a system gives out
    monkeypatch.setattr(process_settings, "_tasks", lambda: [own, gone])
    cpus = os.sched_getaffinity(0)
    with bound(Placement(node=0, cpus=frozenset(cpus), reason="a test")):
        pass
    assert os.sched_getaffinity(0) == cpus


def test_what_is_left_alone_is_not_touched(monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", None)
    before = affinities()
    with bound(left_alone("a test")):
        assert affinities() == before


def test_a_run_on_a_cpu_says_that_it_binds_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", None)
    config = make_run(tmp_path)
    run = in_dir(config, tmp_path / "run", steps=1)
    train(run.model_copy(update={"memory": run.memory.model_copy(update={"numa": "off"})}))
    said = json.loads((tmp_path / "run" / "run.json").read_text())["numa"]
    assert said == {"node": None, "num_cpus": 0, "reason": "memory.numa is off"}


def test_a_run_of_two_nodes_goes_to_that_of_its_gpu_by_what_the_machine_says(tmp_path, monkeypatch):
    """The GPU is pretended; the tree is of two nodes, the first with a processor of this process."""
    own = min(os.sched_getaffinity(0))
    for name, text in {
        "sys/devices/system/node/node0/cpulist": f"{own}",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 100000000 kB",
        "sys/devices/system/node/node1/cpulist": "4000-4001",
        "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal: 100000000 kB",
        "sys/bus/pci/devices/0000:41:00.0/numa_node": "0",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(process_settings.torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda task: {own, 4000})
    settings = SimpleNamespace(memory=make_run(tmp_path).memory)
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x41, pci_device_id=0)
    machine = SimpleNamespace(devices=SimpleNamespace(properties=[gpu]))
    plan = SimpleNamespace(memory={"host": {"home": 10**9}})
    prepared = SimpleNamespace(config=settings, machine=machine, plan=plan)
    found = process_settings.placement_of(prepared, 1, tmp_path)
    assert (found.node, found.cpus) == (0, {own})


def test_a_place_on_the_bus_is_written_as_the_kernel_writes_it():
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=193, pci_device_id=0)
    assert address_of(gpu) == "0000:c1:00.0"
    assert address_of(SimpleNamespace(name="of an older torch")) == ""
