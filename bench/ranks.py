"""Ranks of a benchmark: processes on the loopback or in namespaces of their own, on a network that can be throttled.

Two throttles do the same at different places. `TokenBucket` delays what a rank sends, in the rank itself, so it works
anywhere. `Interface` tells the kernel (``tc``, a token bucket too) on the interface of the rank's own network
namespace, which takes root; what is sent then pays for the headers of TCP as well.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import common
from forked import free_port, rank_variables

from outsize.group.group import Group

NETWORK, INTERFACE = "10.77.0", "net0"


class TokenBucket(Group):
    """A group whose channels together send no more than a rate."""

    def __init__(self, inner: Any, shared: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._inner, self.rank, self.size = inner, inner.rank, inner.size
        self._shared = shared or {"lock": threading.Lock(), "free_at": 0.0, "bytes_per_s": None}

    def limit(self, bytes_per_s: float | None) -> None:
        """Send no more than that from now on; None for as much as there is."""
        self._shared["bytes_per_s"] = bytes_per_s

    def channel(self, name: str) -> "TokenBucket":
        return TokenBucket(self._inner.channel(name), self._shared)

    def exchange(self, outgoing: Mapping[int, Any], incoming: Mapping[int, Any]) -> None:
        shared, rate = self._shared, self._shared["bytes_per_s"]
        if rate is None:
            self._inner.exchange(outgoing, incoming)
            return
        with shared["lock"]:
            sent_s = sum(tensor.nbytes for tensor in outgoing.values()) / rate
            shared["free_at"] = max(shared["free_at"], time.monotonic()) + sent_s
            until = shared["free_at"]
        self._inner.exchange(outgoing, incoming)
        time.sleep(max(0.0, until - time.monotonic()))

    def close(self, error: BaseException | None = None) -> None:
        self._inner.close(error)


class Interface:
    """The interface of this process's network namespace."""

    def limit(self, bytes_per_s: float | None) -> None:
        """Send no more than that from now on; None for as much as there is."""
        command = ["tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf"]
        rate = int(bytes_per_s * 8) if bytes_per_s else 100_000_000_000
        subprocess.run([*command, "rate", f"{rate}bit", "burst", "256kb", "latency", "400ms"], check=True)


def check_namespaces() -> None:
    """End here, in a sentence, where this machine or this user cannot make network namespaces."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(f"--namespaces needs {' and '.join(missing)}, of iproute2: apt-get install iproute2")
    probe = f"outsize-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        raise SystemExit(
            f"--namespaces needs root, with CAP_SYS_ADMIN and CAP_NET_ADMIN: {made.stderr.strip()}"
        )
    subprocess.run(["ip", "netns", "del", probe], check=False)


@contextlib.contextmanager
def namespaces(size: int) -> Iterator[list[list[str]]]:
    """Make a network of ``size`` namespaces on a bridge; yields what a command in each begins with."""
    check_namespaces()
    switch = f"outsize-bench-{os.getpid()}"
    names = [f"{switch}-{rank}" for rank in range(size)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge0", "up")
        for rank, name in enumerate(names):
            port = f"port{rank}"
            ip("netns", "add", name)
            made = ("type", "veth", "peer", "name", port, "netns", switch)
            ip("-n", name, "link", "add", INTERFACE, *made)
            ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
            ip("-n", name, "addr", "add", f"{NETWORK}.{rank + 1}/24", "dev", INTERFACE)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", INTERFACE, "up")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def run_ranks(
    script: str, size: int, job: dict[str, Any], *, apart: bool, limit_s: float
) -> list[dict[str, Any]]:
    """Run ``script --child JOB`` as ``size`` ranks and return the JSON object that each ends with.

    Args:
        script: path of the benchmark.
        size: how many ranks.
        job: what it is told.
        apart: each in a network namespace of its own.
        limit_s: seconds for all of it.
    """
    port = free_port()
    network = namespaces(size) if apart else contextlib.nullcontext([[]] * size)
    with network as prefixes, contextlib.ExitStack() as stack:  # type: ignore[attr-defined]
        processes = []
        for rank, prefix in enumerate(prefixes):
            variables = {**os.environ, **rank_variables(rank, size, port), "OMP_NUM_THREADS": "1"}
            if apart:
                variables |= {"MASTER_ADDR": f"{NETWORK}.1", "GLOO_SOCKET_IFNAME": INTERFACE}
            command = [*prefix, sys.executable, script, "--child", json.dumps(job)]
            process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        outputs = [process.communicate(timeout=limit_s)[0] for process in processes]
    found = [common.last_json(output) for output in outputs]
    if any(result is None for result in found):
        raise SystemExit(f"a rank of {size} failed")
    return [result for result in found if result is not None]
