"""The home of a run whose weights may lie there encoded: in host memory before it is on disk.

Weights that do not train and are sent by a lossless codec rest encoded (docs/codecs.md). A training state that host
memory cannot hold as it is may fit there so, and a scan of it then waits for no disk.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from outsize.codecs.codec_spec import LOSSLESS3, LOSSLESS4, RAW
from outsize.codecs.transport import Transport
from outsize.config import Config
from outsize.errors import InfeasiblePlanError
from outsize.model.sizes.model_spec import ModelSpec
from outsize.planner.memory.link_bytes import packed_bytes
from outsize.session.job.machine import RunMachine, describe_machine

Planned = TypeVar("Planned")
AUTO = "auto"
# The faster codec first.
CODECS = (LOSSLESS4.name, LOSSLESS3.name)


def with_codec(config: Config, name: str) -> Config:
    """Return ``config`` with weights that codec ``name`` writes."""
    transport = config.transport.model_copy(update={"weights": name})
    return config.model_copy(update={"transport": transport})


def settle_home(
    config: Config,
    model: ModelSpec,
    machine: RunMachine,
    state_bytes: int,
    place: Path,
    plan: Callable[[Config, RunMachine], Planned],
) -> tuple[RunMachine, Planned]:
    """Return the machine with the home where it rests best, and the plan of the run on it.

    Args:
        config: of the run. Where its ``transport.weights`` is auto and only an encoding brings the home to host memory,
            the one that is planned names the codec.
        model: that it trains.
        machine: with the home of a state that is not encoded.
        state_bytes: of that state.
        place: of a home on disk.
        plan: of a run on a machine.

    Raises:
        InfeasiblePlanError: no plan fits, and by how much.
    """
    plain, packed = (config, machine), _packed_homes(config, model, machine, state_bytes, place)
    failure = None
    # A state may fit host memory, and not what else a run needs.
    for one, where in (plain, *packed) if machine.home == "host" else (*packed, plain):
        try:
            return where, plan(one, where)
        except InfeasiblePlanError as error:
            if one is config:
                failure = error
    assert failure is not None
    raise failure


def _packed_homes(
    config: Config, model: ModelSpec, machine: RunMachine, state_bytes: int, place: Path
) -> Iterator[tuple[Config, RunMachine]]:
    """Yield the run with codecs that may bring its home to host memory, and the machine with the home there."""
    named = config.transport.weights
    if machine.device == "cpu" or config.memory.home == "disk":
        return
    if machine.home == "host" and named != AUTO:  # it lies there so already
        return
    for name in CODECS if named == AUTO else (named,) if named != RAW.name else ():
        encoded_bytes = state_bytes - packed_bytes(Transport(weights=name), model)
        found = describe_machine(config.memory, encoded_bytes, place)
        if found.home == "host":  # of what is free, as it was a moment ago
            there = replace(found, device_bytes=machine.device_bytes, host_bytes=machine.host_bytes)
            yield with_codec(config, name), there
