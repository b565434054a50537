"""The processes of a run: how they come together, checks that all are about to run the same, and where each writes.

One of several ranks finds in the run directory::

    run/                    rank 0, and what belongs to all: config.yaml, data/, checkpoints/
    ├── rank-001/           heartbeat.jsonl and log.txt of rank 1
    └── rank-002/           of rank 2

Rank 0 talks to people; what the others have to say goes to their log.

Differences that would show as a hang or as other weights after hours show here as a sentence, on all ranks, before they
train.
"""

import contextlib
import hashlib
import json
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from outsize.accelerators import VENDORS, Devices, count_of, is_accelerator, kind_here, title_of, uuids_of
from outsize.config import Config, MemoryConfig
from outsize.config.section import Mark, marked
from outsize.data.batch import Batch
from outsize.errors import ConfigError
from outsize.group.gloo import Launched, open_group
from outsize.group.group import Group, SingleGroup
from outsize.hardware.link_fit import misspelt_variables, overriding_variables, wrong_interfaces
from outsize.hardware.machine_spec import HOST_SHARE
from outsize.session.decide.rates import measure_exchange
from outsize.session.job.machine import CPU_DEVICE_SHARE, available_ram_bytes
from outsize.session.job.prepare import Job
from outsize.storage.directory import needed_directory
from outsize.storage.home_layout import layout_digest
from outsize.streamed.spec import devices_of
from outsize.training.run_dir import choose_run_dir
from outsize.units import format_rate

Announce = Callable[[str], None]
LOG = "log.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One process of a run, among the others.

    Attributes:
        group: all of them.
        run_dir: of the run, the same for all.
        own_dir: where this one writes what is its own; of rank 0 the same.
        announce: takes lines for people.
        devices: that this one computes on.
        memory: section memory, with what is this rank's of its machine.
        restarted: whether the launcher has started the ranks again, so that the run goes on from what it has saved.
    """

    group: Group
    run_dir: Path
    own_dir: Path
    announce: Announce
    devices: Devices
    memory: MemoryConfig
    restarted: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes what belongs to all."""
        return self.group.rank == 0

    def first_decides(self, wanted: bool) -> bool:
        """Return what rank 0 wants."""
        return self.any_wants(wanted and self.is_first)

    def any_wants(self, wanted: bool) -> bool:
        """Return whether any rank wants it."""
        if self.group.size == 1:
            return wanted
        num_wanting = torch.tensor([int(wanted)])
        self.group.channel("steps").all_reduce(num_wanting)
        return bool(num_wanting)

    @contextlib.contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """Have rank 0 run the block before the others: they find what it has made, where they share a disk."""
        if self.is_first:
            yield
            self.group.barrier()
        else:
            self.group.barrier()
            yield


@contextlib.contextmanager
def together(config: Config, place: Launched | None, announce: Announce) -> Iterator[Ranks]:
    """Meet the other ranks, if there are any, and check that all are about to run the same.

    Raises:
        LostRankError: not all came.
        ConfigError: they are not about to run the same, which says what differs, or there are no such devices.
    """
    memory = own_share(config.memory, place)
    devices = devices_of(memory)
    if place is None or place.size == 1:
        run_dir = choose_run_dir(config.train.run_dir)
        yield Ranks(
            group=SingleGroup(),
            run_dir=run_dir,
            own_dir=run_dir,
            announce=announce,
            devices=devices,
            memory=memory,
        )
        return
    group = open_group(place, timeout_s=config.parallel.timeout_s)
    with contextlib.ExitStack() as stack:
        stack.push(lambda kind, error, trace: group.close(error))
        # Named after the time of the start where nobody has named it: rank 0's clock is the one that counts.
        run_dir = Path(group.gather_objects(str(choose_run_dir(config.train.run_dir)))[0])
        own_dir = run_dir if place.rank == 0 else run_dir / f"rank-{place.rank:03}"
        say = announce if place.rank == 0 else stack.enter_context(_log(own_dir))
        say(place.describe())
        restarted = any(group.gather_objects(place.restarts))
        for note in check_same_start(config, devices, group):
            say(f"note: {note}")
        say(
            f"gloo over TCP: {format_rate(measure_exchange(group).bytes_per_s)} sent by each rank, all at once"
        )
        yield Ranks(
            group=group,
            run_dir=run_dir,
            own_dir=own_dir,
            announce=say,
            devices=devices,
            memory=memory,
            restarted=restarted,
        )


def own_share(memory: MemoryConfig, place: Launched | None) -> MemoryConfig:
    """Return ``memory`` with what is this rank's of its machine, where it leaves that open: a GPU, a part of the RAM.

    Raises:
        ConfigError: there are more ranks on this machine than GPUs.
    """
    if place is None or place.size == 1:
        return memory
    available = available_ram_bytes() // place.local_size
    mine: dict[str, object] = {}
    kind = kind_here() if memory.device == "auto" else memory.device
    if kind in VENDORS:
        count = count_of(kind)
        if place.local_rank >= count:
            raise ConfigError(
                f"rank {place.rank} is number {place.local_rank} on its machine, which has {count} {title_of(kind)} "
                f"devices; start torchrun with --nproc-per-node {max(count, 1)}, or use --device cpu"
            )
        mine["device"] = f"{kind}:{place.local_rank}"
    elif memory.device_memory is None and not is_accelerator(memory.device):
        mine["device_memory"] = int(available * CPU_DEVICE_SHARE)
    if memory.host_memory is None:
        mine["host_memory"] = int(available * HOST_SHARE)
    return memory.model_copy(update=mine)


@contextlib.contextmanager
def _log(own_dir: Path) -> Iterator[Announce]:
    with needed_directory(own_dir, "train.run_dir"), (own_dir / LOG).open("a", encoding="utf-8") as file:

        def say(text: str) -> None:
            file.write(f"{time.strftime('%H:%M:%S')} {text}\n")
            file.flush()

        yield say


_PACKAGES = ("outsize", "torch", "transformers", "tokenizers", "safetensors", "numpy")
# Bytes of the start and of the end of each file of weights that are compared.
_SAMPLE_BYTES = 2**16


def check_same_start(
    config: Config, devices: Devices, group: Group, variables: Mapping[str, str] = os.environ
) -> list[str]:
    """Compare what ranks know before they read anything; returns notes for people.

    Raises:
        ConfigError: ranks differ in what has to be the same, or share a device.
    """
    answers = group.gather_objects(
        {
            **{f"config: {key}": value for key, value in _settings(config).items()},
            **{f"version of {name}": _version(name) for name in _PACKAGES},
            "version of Python": platform.python_version(),
        }
    )
    _compare(answers, "use the same configuration and the same packages on all machines")
    _check_devices(group.gather_objects(_known_as(devices)), devices.kind)
    wrong = wrong_interfaces(variables, psutil.net_if_addrs())
    problems = [line for lines in group.gather_objects(wrong) for line in lines]
    if problems:
        raise ConfigError("; ".join(dict.fromkeys(problems)))
    return [*overriding_variables(variables), *misspelt_variables(variables), *_differing(group, variables)]


def check_same_run(prepared: Job, batch: Batch, resumed: Path | None, group: Group) -> None:
    """Compare what ranks have read: the model, the data, and where they go on.

    Raises:
        ConfigError: they differ; says in what.
    """
    answers = group.gather_objects(
        {
            "model": layout_digest(prepared.split.spec),
            "weights": _sampled(prepared.directory),
            "data": hashlib.sha256(batch.input_ids.numpy().tobytes()).hexdigest()[:12],
            "checkpoint": resumed.name if resumed is not None else "none",
        }
    )
    _compare(
        answers,
        "model, data and run directory have to be the same on all machines: copy them, or share a disk",
    )


def _settings(config: Config) -> dict[str, str]:
    """Return every setting that has to be the same, as text."""
    return {
        f"{section}.{key}": json.dumps(value)
        for section, keys in config.model_dump(mode="json").items()
        for key, value in keys.items()
        if key not in marked(type(getattr(config, section)), Mark.OF_A_RANK)
    }


def _compare(answers: Sequence[Mapping[str, str]], remedy: str) -> None:
    """Raise where ranks were told differently."""
    lines = []
    for key in answers[0]:
        values = [facts.get(key, "none") for facts in answers]
        if len(set(values)) > 1:
            kinds = (f"{value} on rank {values.index(value)}" for value in dict.fromkeys(values))
            lines.append(f"{key} is {', '.join(kinds)}")
    if lines:
        raise ConfigError(f"ranks differ: {'; '.join(lines)}; {remedy}")


def _check_devices(devices: Sequence[str | None], kind: str) -> None:
    """Raise where two ranks use the same device; ``kind`` is what memory.device says where each rank takes its own."""
    for rank, device in enumerate(devices):
        first = devices.index(device)
        if device is not None and first != rank:
            raise ConfigError(
                f"ranks {first} and {rank} would both use {device}: leave memory.device at {kind}, or start no more "
                "processes on a machine than it has of them"
            )


def _known_as(devices: Devices) -> str | None:
    """Return what a device of this machine is known by everywhere; None for processors, which can be shared."""
    if not devices.accelerated:
        return None
    if len(devices.indices) > 1:
        raise ConfigError(
            f"memory.device is {devices}: each of several ranks uses one device; start a process for each with "
            "torchrun --nproc-per-node, or one process for all of them without torchrun"
        )
    return f"{socket.gethostname()} {devices} {uuids_of(devices)[devices.index]}"


def _differing(group: Group, variables: Mapping[str, str]) -> list[str]:
    """Return a note for each variable of the transports that not all ranks have alike."""
    wanted = {name: value for name, value in variables.items() if name.startswith(("NCCL_", "GLOO_"))}
    answers: list[dict[str, Any]] = group.gather_objects(wanted)
    names = sorted({name for values in answers for name in values})
    return [
        f"{name} is not the same on all ranks" for name in names if len({v.get(name) for v in answers}) > 1
    ]


def _sampled(directory: Path) -> str:
    """Return a digest of the files of weights: their names, sizes, beginnings and ends."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(size - _SAMPLE_BYTES, 0))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:12]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
