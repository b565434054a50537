"""What torchrun tells a process about itself, by environment variables, and the group that comes of it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from outsize.errors import ConfigError, LostRankError

if TYPE_CHECKING:
    from outsize.group.group import Group

# Set by torchrun, Ray Train, and by hand under SLURM's srun. Two of them alone are no launch.
REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """One process among several.

    Attributes:
        rank: of this process, from 0.
        size: how many processes there are.
        local_rank: the same among those of this machine.
        local_size: processes of this machine.
        address: host at which all meet.
        port: the same.
        restarts: how often the launcher has started the processes again.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    restarts: int = 0

    @property
    def num_nodes(self) -> int:
        """Machines, where all have as many processes."""
        return -(-self.size // self.local_size)

    def describe(self) -> str:
        """Describe the rank in a line for people."""
        again = f", restarted {self.restarts} times" if self.restarts else ""
        return (
            f"rank {self.rank} of {self.size} on {self.num_nodes} nodes, at {self.address}:{self.port}{again}"
        )


def launched(variables: Mapping[str, str] = os.environ) -> Launched | None:
    """Return what the launcher says, or None where this process was not launched as one of several.

    Raises:
        ConfigError: some of the variables are there and others are not, or one is no number.
    """
    there = [name for name in REQUIRED if variables.get(name)]
    if not {"RANK", "WORLD_SIZE"} & set(there):
        return None
    missing = [name for name in REQUIRED if name not in there]
    if missing:
        raise ConfigError(
            f"{', '.join(there)} are set but {', '.join(missing)} are not: start all processes with torchrun, or set "
            "all of them, or none"
        )
    rank, size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
    if not 0 <= rank < size:
        raise ConfigError(f"RANK={rank} of WORLD_SIZE={size}: ranks are numbered from 0")
    return Launched(
        rank=rank,
        size=size,
        local_rank=_number(variables, "LOCAL_RANK", 0),
        local_size=_number(variables, "LOCAL_WORLD_SIZE", 1),
        address=variables["MASTER_ADDR"],
        port=_number(variables, "MASTER_PORT"),
        restarts=_number(variables, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def open_group(
    place: Launched | None, *, timeout_s: float, variables: Mapping[str, str] = os.environ
) -> "Group":
    """Return the group of a launch: of one, or over gloo.

    Raises:
        LostRankError: the meeting place does not answer, or not all ranks came within ``timeout_s``.
    """
    from outsize.group.gloo import GlooGroup
    from outsize.group.single import SingleGroup

    if place is None or place.size == 1:
        return SingleGroup()
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # torchrun keeps the store in its agent, where it has one; otherwise rank 0 does.
    agent = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            place.address,
            place.port,
            is_master=place.rank == 0 and not agent,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,  # `GlooGroup` does, and can say who did not come
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise LostRankError(
            f"rank {place.rank} cannot reach {place.address}:{place.port} (MASTER_ADDR, MASTER_PORT): {first_line}",
            0,
        ) from error
    return GlooGroup(store, place.rank, place.size, timeout_s=timeout_s)


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"{name}={text!r} is no whole number") from None
