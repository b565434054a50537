"""Where a process is bound: decided from what the kernel says of machines with several nodes."""

from pathlib import Path

import pytest

from hardware.fake_machine import SERVER, build
from outsize.hardware.cpu import node_of_pci, place, read_cpu

GB = 10**9
# Two sockets of 32 cores whose threads are numbered as the kernel does, and 256 GB each.
TWO_SOCKETS = {
    "sys/devices/system/node/node0/cpulist": "0-31,64-95\n",
    "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       250000000 kB\n",
    "sys/devices/system/node/node1/cpulist": "32-63,96-127\n",
    "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:       250000000 kB\n",
    "sys/bus/pci/devices/0000:41:00.0/numa_node": "0\n",
    "sys/bus/pci/devices/0000:c1:00.0/numa_node": "1\n",
    "sys/bus/pci/devices/0000:02:00.0/numa_node": "-1\n",
}
ALL = range(128)
FITTING = {"host_bytes": 100 * GB, "num_threads": 8}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return build(tmp_path, SERVER, TWO_SOCKETS)


def test_a_process_goes_to_the_node_of_its_device(root):
    nodes = read_cpu(root).numa_nodes
    for address, node, cpus in (
        ("0000:41:00.0", 0, {*range(32), *range(64, 96)}),
        ("0000:C1:00.0", 1, {*range(32, 64), *range(96, 128)}),
    ):
        found = place(nodes, ALL, [node_of_pci(root, address)], **FITTING)
        assert (found.node, found.cpus) == (node, cpus)
        assert found.to_dict() == {
            "node": node,
            "num_cpus": 64,
            "reason": f"its device hangs on node {node}",
        }


@pytest.mark.parametrize("address", ["0000:02:00.0", "0000:99:00.0", ""])
def test_a_device_of_which_no_node_is_told_binds_nothing(root, address):
    assert node_of_pci(root, address) is None
    found = place(read_cpu(root).numa_nodes, ALL, [None], **FITTING)
    assert (found.node, found.cpus, found.reason) == (
        None,
        frozenset(),
        "the node of its device is not known",
    )


def test_a_process_takes_no_processor_that_it_was_not_given(root):
    nodes = read_cpu(root).numa_nodes
    found = place(nodes, range(24, 48), [1], **FITTING)
    assert (found.node, found.cpus) == (1, set(range(32, 48)))


@pytest.mark.parametrize(
    ("usable", "devices", "changes", "reason"),
    [
        (ALL, [], {}, "the CPU computes"),
        (ALL, [0, 1], {}, "hang on several nodes"),
        (ALL, [7], {}, "not known"),
        (range(32), [1], {}, "may not run on node 1"),
        (range(32, 40), [1], {}, "bound to node 1 already"),
        (ALL, [1], {"num_threads": 65}, "65 threads want more than the 64 processors of node 1"),
        (ALL, [1], {"host_bytes": 250 * GB}, "room for"),
        (ALL, [1], {"local_processes": 8}, "are wanted there"),
    ],
)
def test_what_does_not_fit_one_node_is_left_alone(root, usable, devices, changes, reason):
    found = place(read_cpu(root).numa_nodes, usable, devices, **{**FITTING, **changes})
    assert (found.node, found.cpus) == (None, frozenset())
    assert reason in found.reason


def test_processes_of_a_machine_share_its_nodes(root):
    """Four are two to a node."""
    nodes = read_cpu(root).numa_nodes
    assert place(nodes, ALL, [0], local_processes=4, **FITTING).node == 0


def test_a_machine_of_one_node_is_left_alone(tmp_path):
    nodes = read_cpu(build(tmp_path, SERVER)).numa_nodes[:1]
    assert place(nodes, range(4), [0], **FITTING).reason == "the machine has one NUMA node"
