"""The processes of a run: how they come together, what is the same for all, and where each writes.

One of several ranks finds in the run directory::

    run/                    rank 0, and what belongs to all: config.yaml, data/, checkpoints/
    ├── rank-001/           heartbeat.jsonl and log.txt of rank 1
    └── rank-002/           of rank 2

Rank 0 talks to people; what the others have to say goes to their log.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from outsize.accelerators import VENDORS, Devices, count_of, is_accelerator, kind_here, title_of
from outsize.config import Config
from outsize.errors import ConfigError
from outsize.group.group import Group, SingleGroup
from outsize.group.launched import Launched, open_group
from outsize.hardware.machine_spec import HOST_SHARE
from outsize.session.decide.rates import measure_exchange
from outsize.session.job.machine import CPU_DEVICE_SHARE, available_ram_bytes
from outsize.storage.directory import needed_directory
from outsize.streamed.spec import devices_of
from outsize.training.preflight import check_same_start
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
        restarted: whether the launcher has started the ranks again, so that the run goes on from what it has saved.
    """

    group: Group
    run_dir: Path
    own_dir: Path
    announce: Announce
    devices: Devices
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
    devices = devices_of(config.memory)
    if place is None or place.size == 1:
        run_dir = choose_run_dir(config)
        yield Ranks(group=SingleGroup(), run_dir=run_dir, own_dir=run_dir, announce=announce, devices=devices)
        return
    group = open_group(place, timeout_s=config.parallel.timeout_s)
    with contextlib.ExitStack() as stack:
        stack.push(lambda kind, error, trace: group.close(error))
        # Named after the time of the start where nobody has named it: rank 0's clock is the one that counts.
        run_dir = Path(group.gather_objects(str(choose_run_dir(config)))[0])
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
            restarted=restarted,
        )


def own_share(config: Config, place: Launched | None) -> Config:
    """Return ``config`` with what is this rank's of its machine, where it leaves that open: a GPU, a part of the RAM.

    Raises:
        ConfigError: there are more ranks on this machine than GPUs.
    """
    if place is None or place.size == 1:
        return config
    memory, available = config.memory, available_ram_bytes() // place.local_size
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
    return config.model_copy(update={"memory": memory.model_copy(update=mine)})


@contextlib.contextmanager
def _log(own_dir: Path) -> Iterator[Announce]:
    with (
        needed_directory(own_dir, "train.run_dir"),
        (own_dir / LOG).open("a", encoding="utf-8") as file,
    ):

        def say(text: str) -> None:
            file.write(f"{time.strftime('%H:%M:%S')} {text}\n")
            file.flush()

        yield say
