"""What a run reaches before its first step: its units, its lanes and the network of its ranks, timed for a moment.

All ranks of a run measure together (`outsize.group.group`), as they compute together.
"""

import contextlib
import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from outsize.accelerators import check_here
from outsize.group.group import Group, Pace
from outsize.hardware.machine_spec import Machine
from outsize.model.walk import Boundaries
from outsize.planner.program.stages import Choice, Extent
from outsize.planner.simulate.costs import UnitTimes
from outsize.planner.simulate.gpu_times import scaled
from outsize.runtime.device.heap import ResidentLimit, set_thresholds, trim
from outsize.runtime.trial.unit_clock import time_units
from outsize.session.decide.lane_rates import kept_rates, lane_rates
from outsize.session.job.demand import forward_flops, made_up_inputs, recompute_shares, spared_flops
from outsize.session.job.machine import home_file
from outsize.session.job.prepare import Job

# Units are timed on at most so many tokens, which fill a device; more take as much longer as they have operations.
TIMED_TOKENS = {"cpu": 512, "accelerator": 8192}
# The same for all processes of a machine, containers or not.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Exchanged by all ranks together, to know how fast that goes.
SAMPLE_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Rates:
    """What a run reaches.

    Attributes:
        machine: rates of its lanes.
        times: of its units, for one of its microbatches.
        microbatches: of a step; of several ranks, each may have another number.
        net_bytes_per_s: of several ranks, what each sends while all do.
        core_s_per_byte: what a core computes to send a byte, and to receive and add one meanwhile.
        cores: of this process, on a CPU that it may share with other ranks; none where a GPU computes.
    """

    machine: Machine
    times: UnitTimes
    microbatches: int = 1
    net_bytes_per_s: float = 0.0
    core_s_per_byte: float = 0.0
    cores: float = math.inf


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What an exchange with all other ranks takes.

    Attributes:
        bytes_per_s: that this rank sends while all do; 0 of a single process.
        core_s_per_byte: what a core computes for each byte sent, and as many received and added.
    """

    bytes_per_s: float = 0.0
    core_s_per_byte: float = 0.0


def measure_rates(prepared: Job, run_dir: Path) -> Rates:
    """Time the units of a run, and its lanes where a run before it has not left their rates in ``run_dir``.

    All ranks of a run do so at the same time, as they compute at the same time.

    Raises:
        OutsizeError: something could not be measured.
        RuntimeError: the same, said by torch.
    """
    cores = cores_of(prepared)  # before anything that may fail on one rank only
    with _memory_of_the_run(prepared), Pace(prepared.group) as pace:
        times, flops = _times(prepared, pace)
        recorded = kept_rates(run_dir, prepared)
        if pace.most("lanes", float(recorded is None)) or recorded is None:
            recorded = lane_rates(
                prepared, home_file(prepared.config.memory, run_dir).parent, times, flops, pace
            )
    return Rates(recorded, times, microbatches=prepared.config.microbatches, cores=cores)


def of_slowest(group: Group, rates: Rates, net: Exchanged) -> Rates:
    """Return ``rates`` with what all ranks wait for: the compute of the slowest, and the network of the slowest."""
    own_s = rates.microbatches * sum((*rates.times.forward_s, *rates.times.backward_s))
    answers = [answer for answer in group.gather_objects([own_s, net.bytes_per_s]) if answer is not None]
    compute_s, slowest_net = max(s for s, _ in answers), min(rate for _, rate in answers)
    times = scaled(rates.times, compute_s / own_s) if own_s else rates.times
    return replace(rates, times=times, net_bytes_per_s=slowest_net, core_s_per_byte=net.core_s_per_byte)


@contextlib.contextmanager
def _memory_of_the_run(prepared: Job) -> Iterator[None]:
    """Have freed memory kept as steps will have it: pages that the kernel hands out anew take their time."""
    if prepared.machine.devices.accelerated:
        yield
        return
    set_thresholds(heap=prepared.heap)
    try:
        yield
    finally:
        set_thresholds(heap=False)
        trim()


def _limit(prepared: Job) -> ResidentLimit | None:
    """The limit of resident memory that a run on a CPU keeps to; nothing lies at home yet."""
    if not prepared.machine.devices.is_cpu:
        return None
    return ResidentLimit(prepared.before_bytes, prepared.machine.device_bytes)


def cores_of(prepared: Job) -> float:
    """Return the cores that a rank has where compute and lanes are threads of a CPU: as many as the ranks beside it."""
    machine = BOOT_ID.read_text().strip() if BOOT_ID.is_file() else socket.gethostname()
    beside = prepared.group.gather_objects(machine).count(machine)
    return len(os.sched_getaffinity(0)) / beside if prepared.machine.devices.is_cpu else math.inf


def measure_exchange(group: Group) -> Exchanged:
    """Measure an all-to-all exchange: seconds and processor seconds of this rank."""
    if group.size == 1:
        return Exchanged()
    channel = group.channel("rate")
    part = SAMPLE_BYTES // group.size // 4
    ranges = [range(rank * part, (rank + 1) * part) for rank in range(group.size)]
    sample = torch.zeros(part * group.size)
    channel.all_gather(sample, ranges)  # connections are made, and buffers of the kernel grow
    channel.barrier()
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    channel.all_gather(sample, ranges)
    took_s = time.perf_counter() - began_s
    channel.reduce_scatter(sample, ranges)
    core_s, sent = time.process_time() - cpu_began_s, 4 * part * (group.size - 1)
    return Exchanged(sent / took_s, core_s / (2 * sent))


def _times(prepared: Job, pace: Pace) -> tuple[UnitTimes, tuple[float, ...]]:
    """Return the times of units in a microbatch of the run, and the operations of their forwards."""
    config = prepared.config
    check_here(prepared.machine.devices)
    rows, length = -(-prepared.num_sequences // config.microbatches), config.data.seq_len
    device = prepared.machine.devices.torch_device
    few_rows, short = rows, length
    if config.model.compile == "off":  # a compiled unit has kernels for microbatches of one size
        most = TIMED_TOKENS["accelerator" if prepared.machine.devices.accelerated else "cpu"]
        few_rows, short = _timed_size(rows, length, most)
    inputs = made_up_inputs(config.data.pack, prepared.hf_config, few_rows, short)
    num_kept = _num_kept(prepared, pace)
    with Boundaries(prepared.split.modules) as boundaries:
        prepared.split.model.train()
        times = time_units(
            prepared.split,
            boundaries.forwards,
            inputs,
            chunk_tokens=prepared.chunk_tokens,
            device=device,
            num_kept=num_kept,
            limit=_limit(prepared),
            pace=pace,
        )
    flops, timed = (
        forward_flops(prepared.split, prepared.measured, *size)
        for size in ((rows, length), (few_rows, short))
    )
    tokens = rows * length / (few_rows * short)
    shares = [work / fewer if fewer else tokens for work, fewer in zip(flops, timed, strict=True)]
    unit_times = _less_recompute(_scaled(times, shares), recompute_shares(prepared.split, prepared.measured))
    return replace(unit_times, spared_s=_spared_s(prepared, unit_times.forward_s, flops)), flops


def _num_kept(prepared: Job, pace: Pace) -> tuple[int, ...]:
    """Return how many forwards of each unit fit where the plan keeps some whole; none where no rank keeps any."""
    kept_blocks, saved = prepared.plan.layout.kept, prepared.measured.saved_bytes
    keeps = any(choice.extent is Extent.WHOLE for choices in kept_blocks for choice in choices)
    if not pace.most("kept", float(keeps)):
        return ()
    room = sum(saved[unit] * choices.count(Choice.KEEP) for unit, choices in enumerate(kept_blocks))
    return tuple(max(1, room // max(1, size)) for size in saved)  # one has the memory of a recompute


def _scaled(times: UnitTimes, shares: Sequence[float]) -> UnitTimes:
    """Return ``times`` of microbatches with ``shares`` as many operations, by unit."""
    forward_s, backward_s, kept_forward_s, kept_backward_s = (
        tuple(s * share for s, share in zip(seconds, shares, strict=bool(seconds)))
        for seconds in (times.forward_s, times.backward_s, times.kept_forward_s, times.kept_backward_s)
    )
    return UnitTimes(
        forward_s=forward_s,
        backward_s=backward_s,
        kept_forward_s=kept_forward_s,
        kept_backward_s=kept_backward_s,
    )


def _less_recompute(times: UnitTimes, shares: Sequence[float]) -> UnitTimes:
    """Return ``times``, taken with whole recomputes, of a run whose recomputes are ``shares`` of a forward."""
    recompute_s = tuple(s * share for s, share in zip(times.forward_s, shares, strict=True))
    spared_s = (forward_s - part for forward_s, part in zip(times.forward_s, recompute_s, strict=True))
    backward_s = (max(0.0, s - spared) for s, spared in zip(times.backward_s, spared_s, strict=True))
    return replace(times, backward_s=tuple(backward_s), recompute_s=recompute_s)


def _spared_s(
    prepared: Job, forward_s: tuple[float, ...], flops: tuple[float, ...]
) -> dict[Extent, tuple[float, ...]]:
    """Return what of a forward is spared where attention, or products, are kept: their share of its operations."""
    return {
        extent: tuple(
            seconds * min(1.0, spared / work) if work else 0.0
            for seconds, spared, work in zip(forward_s, spared_by_unit, flops, strict=True)
        )
        for extent, spared_by_unit in spared_flops(prepared.measured).items()
    }


def _timed_size(rows: int, length: int, most: int) -> tuple[int, int]:
    """Return sequences and tokens of each that are timed: fewer sequences before shorter ones."""
    return max(1, min(rows, most // length)), min(length, most)
