"""What is checked before ranks train together: that all run the same, each on a device of its own.

Differences that would show as a hang or as other weights after hours show here as a sentence, on all ranks.
"""

import hashlib
import json
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from outsize.accelerators import Devices, uuids_of
from outsize.config import Config
from outsize.data.batch import Batch
from outsize.errors import ConfigError
from outsize.group.group import Group
from outsize.hardware.collectives import misspelt_variables, overriding_variables, wrong_interfaces
from outsize.session.job.prepare import Job
from outsize.storage.layout_digest import layout_digest

_PACKAGES = ("outsize", "torch", "transformers", "tokenizers", "safetensors", "numpy")
# May differ from machine to machine: paths (what lies there is compared by itself), and what a machine has.
_OWN_PATHS = {
    "model": ("path",),
    "data": ("path",),
    "train": ("run_dir", "resume"),
    "memory": ("store_dir", "device", "device_memory", "host_memory"),
}
# Bytes of the start and of the end of each file of weights that are compared.
_SAMPLE_BYTES = 2**16


def check_same_start(
    config: Config, devices: Devices, group: Group, variables: Mapping[str, str] = os.environ
) -> list[str]:
    """Compare what ranks know before they read anything; returns notes for people.

    Raises:
        ConfigError: ranks differ in what has to be the same, or share a device.
    """
    told = group.gather_objects(
        {
            **{f"config: {key}": value for key, value in _settings(config).items()},
            **{f"version of {name}": _version(name) for name in _PACKAGES},
            "version of Python": platform.python_version(),
        }
    )
    _compare(told, "use the same configuration and the same packages on all machines")
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
    told = group.gather_objects(
        {
            "model": layout_digest(prepared.split.spec),
            "weights": _sampled(prepared.directory),
            "data": hashlib.sha256(batch.input_ids.numpy().tobytes()).hexdigest()[:12],
            "checkpoint": resumed.name if resumed is not None else "none",
        }
    )
    _compare(
        told, "model, data and run directory have to be the same on all machines: copy them, or share a disk"
    )


def _settings(config: Config) -> dict[str, str]:
    """Return every setting that has to be the same, as text."""
    return {
        f"{section}.{key}": json.dumps(value)
        for section, keys in config.model_dump(mode="json").items()
        for key, value in keys.items()
        if key not in _OWN_PATHS.get(section, ())
    }


def _compare(told: Sequence[Mapping[str, str]], remedy: str) -> None:
    """Raise where ranks were told differently."""
    lines = []
    for key in told[0]:
        values = [facts.get(key, "none") for facts in told]
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
    told: list[dict[str, Any]] = group.gather_objects(wanted)
    names = sorted({name for values in told for name in values})
    return [f"{name} is not the same on all ranks" for name in names if len({v.get(name) for v in told}) > 1]


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
