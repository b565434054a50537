"""Between which devices of a run stages hand over by themselves, and how fast that is.

A run computes the same either way, so what a machine can do may decide.
"""

import time

import torch

from outsize.accelerators import Devices
from outsize.codecs.transport import CODECS
from outsize.config import Config
from outsize.errors import ConfigError
from outsize.hardware.machine_spec import Figure, Peer
from outsize.runtime.device.peer_copies import can_copy
from outsize.session.job.job_options import AUTO
from outsize.session.job.machine import RunMachine

Pairs = frozenset[tuple[int, int]]
# Large enough to hide what a copy costs besides its bytes; the best of so many.
_COPY_BYTES, _REPEATS = 16 * 2**20, 5


def peers_of(config: Config, machine: RunMachine) -> Pairs:
    """Return the pairs of workers (source, target), one after the other in turn, of which one copies to the other.

    Raises:
        ConfigError: ``parallel.handover`` is ``peer``, and a pair cannot, or inputs lose something on their way below.
    """
    handover, each = config.parallel.handover, machine.devices.each
    count = len(each)
    if count == 1 or handover == "host":
        return frozenset()
    activations = config.transport.activations
    if activations not in (*CODECS["weights"], AUTO):
        if handover == "peer":
            raise ConfigError(
                f"parallel.handover=peer: a backward would find inputs that {activations} has rounded, and its forward "
                "those as they were; leave transport.activations lossless, or use parallel.handover=auto"
            )
        return frozenset()
    pairs = frozenset((worker, (worker + 1) % count) for worker in range(count))
    found = frozenset(pair for pair in pairs if _can_copy(config, each[pair[0]], each[pair[1]]))
    if handover == "peer" and found != pairs:
        source, target = min(pairs - found)
        advice = "set memory.peer_gb_per_s" if machine.devices.emulated else "see outsize doctor"
        raise ConfigError(
            f"parallel.handover=peer: {each[source]} does not copy to {each[target]} by itself; {advice}, or use "
            "parallel.handover=auto"
        )
    return found


def measured_peers(config: Config, machine: RunMachine, pairs: Pairs) -> tuple[Peer, ...]:
    """Return what copies between ``pairs`` reach; on emulated devices what they are throttled to."""
    each, rate = machine.devices.each, config.memory.peer_gb_per_s
    found = []
    for source, target in sorted(pairs):
        if rate is not None:
            figure = Figure(value=rate * 1e9, source="memory.peer_gb_per_s", measured=True)
        else:
            value = _bytes_per_s(each[source].torch_device, each[target].torch_device)
            figure = Figure(value=value, source="copies between the two, timed", measured=True)
        found.append(Peer(source=source, target=target, bytes_per_s=figure, own_wire=True))
    return tuple(found)


def _can_copy(config: Config, source: Devices, target: Devices) -> bool:
    if source.emulated:
        return config.memory.peer_gb_per_s is not None
    return can_copy(source, target)


def _bytes_per_s(source: torch.device, target: torch.device) -> float:
    sent = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=source)
    arrived = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=target)
    best_s = float("inf")
    for _ in range(_REPEATS + 1):  # the first opens the way
        torch.accelerator.synchronize(source)
        began = time.perf_counter()
        arrived.copy_(sent)
        torch.accelerator.synchronize(source)
        torch.accelerator.synchronize(target)
        best_s = min(best_s, time.perf_counter() - began)
    return _COPY_BYTES / best_s
