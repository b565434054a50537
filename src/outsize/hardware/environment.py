"""What the machine runs in and on: container, virtual machine, versions."""

import importlib.metadata
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from pydantic import Field

from outsize.hardware.readings import Fact, Record
from outsize.native.library import available, level, reason

_PACKAGES = ("outsize", "torch", "transformers", "tokenizers", "safetensors", "numpy", "nvidia-ml-py")
# Of variables that set threads, allocators, devices and communication; no others are looked at.
_PREFIXES = (
    "NCCL_",
    "TORCH_NCCL_",
    "GLOO_",
    "OMP_",
    "MKL_NUM_",
    "CUDA_VISIBLE_",
    "CUDA_LAUNCH_",
    "PYTORCH_",
    "MALLOC_",
)


class Environment(Record):
    """Surroundings of the process; hints, since neither a container nor a virtual machine has to show itself.

    Attributes:
        container: which sign of a container was found; ``none seen`` else.
        virtual_machine: which sign of a hypervisor was found; ``none seen`` else.
        kernel: release of the kernel.
        python: version of the interpreter.
        packages: versions of what a run uses.
        iommu: IOMMUs at work, and what the kernel was told about them; ``none`` where there are none.
        variables: environment variables that libraries of a run listen to.
        native: instruction set of the kernels in C; ``none`` where they cannot be used, and why.
    """

    container: Fact
    virtual_machine: Fact
    kernel: Fact
    python: Fact
    packages: dict[str, Fact]
    iommu: Fact = Fact.unread()
    variables: dict[str, Fact] = Field(default_factory=dict)
    native: Fact = Fact.unread()


def read_environment(root: Path, variables: Mapping[str, str]) -> Environment:
    """Return the surroundings that ``root`` and the environment ``variables`` show."""
    release = root / "proc/sys/kernel/osrelease"
    return Environment(
        container=_container(root),
        virtual_machine=_virtual_machine(root),
        kernel=Fact.of(release, lambda: release.read_text().strip()),
        python=Fact.read(platform.python_version(), "the interpreter"),
        packages={name: Fact.of("installed packages", lambda n=name: _version(n)) for name in _PACKAGES},  # type: ignore[misc]
        iommu=Fact.of(root / "sys/class/iommu", lambda: _iommu(root)),
        variables={
            name: Fact.read(value, "the environment")
            for name, value in sorted(variables.items())
            if name.startswith(_PREFIXES)
        },
        native=_native(),
    )


def _native() -> Fact:
    return Fact.read(level(), "outsize.native") if available() else Fact.read("none", str(reason()))


@cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"{package} is not installed") from None


def _container(root: Path) -> Fact:
    groups = root / "proc/self/cgroup"
    try:
        for name in (".dockerenv", "run/.containerenv"):
            if (root / name).exists():
                return Fact.read("container", str(root / name))
        text = groups.read_text()
    except OSError as error:
        return Fact.absent(f"{groups}: {error.strerror}")
    for word in ("docker", "kubepods", "containerd", "lxc", "podman"):
        if word in text:
            return Fact.read(word, str(groups))
    return Fact.read("none seen", f"{root / '.dockerenv'}, {groups}")


def _virtual_machine(root: Path) -> Fact:
    release, info = root / "proc/sys/kernel/osrelease", root / "proc/cpuinfo"
    vendor = root / "sys/class/dmi/id/sys_vendor"
    try:
        if release.exists() and "microsoft" in release.read_text().lower():
            return Fact.read("WSL", str(release))
        if "hypervisor" in info.read_text(errors="replace").split():
            name = vendor.read_text().strip() if vendor.exists() else ""
            return Fact.read(name or "hypervisor", f"{info}, {vendor}")
    except OSError as error:
        return Fact.absent(f"{info}: {error.strerror}")
    return Fact.read("none seen", str(info))


def _iommu(root: Path) -> str:
    names = sorted(path.name for path in (root / "sys/class/iommu").iterdir())
    command_line = root / "proc/cmdline"
    words = command_line.read_text().split() if command_line.exists() else []
    return " ".join([*names, *(word for word in words if "iommu" in word)]) or "none"
