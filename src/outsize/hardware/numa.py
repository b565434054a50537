"""Whether a process that trains is best bound to the NUMA node of its device, and which processors those are.

Bound threads find the memory that they first write on their own node: the kernel puts a page near whoever touches it.
So a GPU copies from memory on its own side, and the optimizer steps there. What does not fit one node is better left to
all of them: an optimizer is bound by memory, and two nodes have twice the memory channels of one.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outsize.hardware.cpu import NumaNode, listed
from outsize.hardware.machine_spec import HOST_SHARE
from outsize.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the threads of a process may run.

    Attributes:
        node: to which they are bound; None where they stay as they are.
        cpus: logical processors of the node that the process may use; empty where there is no node.
        reason: for people.
    """

    node: int | None
    cpus: frozenset[int] = frozenset()
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are written to JSON."""
        return {"node": self.node, "num_cpus": len(self.cpus), "reason": self.reason}


def left_alone(reason: str) -> Placement:
    """Return that nothing is bound."""
    return Placement(node=None, reason=reason)


def node_of_pci(root: Path, address: str) -> int | None:
    """Return the NUMA node of a device, by its address on the bus such as ``0000:41:00.0``; None where none is told."""
    try:
        node = int((root / "sys/bus/pci/devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def place(
    nodes: Collection[NumaNode],
    usable: Iterable[int],
    of_devices: Collection[int | None],
    *,
    host_bytes: int,
    num_threads: int,
    local_processes: int = 1,
) -> Placement:
    """Decide where a process runs.

    Args:
        nodes: of the machine.
        usable: logical processors that the process may run on.
        of_devices: NUMA node of each device that it computes on, None where it is not known; none of a CPU.
        host_bytes: what it is going to take of host memory.
        num_threads: threads that compute together.
        local_processes: processes on this machine that train together, each as large, spread over the nodes.
    """
    if len(nodes) < 2:
        return left_alone("the machine has one NUMA node")
    if not of_devices:
        return left_alone("the CPU computes, with the memory of all nodes")
    wanted = set(of_devices)
    if len(wanted) > 1:
        return left_alone("its devices hang on several nodes")
    near = next((node for node in nodes if node.index == next(iter(wanted))), None)
    memory_bytes = near.memory_bytes.number() if near is not None else None
    if near is None or near.cpus.value is None or memory_bytes is None:
        return left_alone("the node of its device is not known")
    allowed = frozenset(usable)
    cpus = allowed & listed(str(near.cpus.value))
    if not cpus:
        return left_alone(f"it may not run on node {near.index}, on which its device hangs")
    if any(allowed <= listed(str(node.cpus.value or "")) for node in nodes):
        return left_alone(f"it is bound to node {near.index} already")
    if num_threads > len(cpus):
        return left_alone(
            f"its {num_threads} threads want more than the {len(cpus)} processors of node {near.index}"
        )
    room = int(memory_bytes * HOST_SHARE)
    needed = host_bytes * -(-local_processes // len(nodes))
    if needed > room:
        return left_alone(
            f"node {near.index} has room for {format_bytes(room)}, and {format_bytes(needed)} are wanted there"
        )
    return Placement(node=near.index, cpus=cpus, reason=f"its device hangs on node {near.index}")
