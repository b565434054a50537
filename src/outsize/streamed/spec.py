"""What a run is before anything is measured: a configuration, resolved once for this machine.

Every entrance (`train`, its dry run, `verify`, short runs) makes one and passes it on; nothing behind it looks devices
or ranks up again. `outsize.wrap`, which has arguments instead of a configuration, and objectives resolve their devices
here, too.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast, get_args

from outsize.accelerators import Devices, choose_device
from outsize.choices import BlockKernels, Compile, ComputeDtype, Products
from outsize.config import Config, MemoryConfig
from outsize.errors import ConfigError
from outsize.group.group import Group, SingleGroup


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """How the blocks of a model compute.

    Attributes:
        mlp_parts: parts in which MLPs take the tokens of a microbatch.
        compile: what torch compiles.
        kernels: whose kernels they have.
        products: what their linear layers multiply in.

    Raises:
        ConfigError: a value that there is not, or two that do not go together.
    """

    mlp_parts: int = 1
    compile: Compile = "off"
    kernels: BlockKernels = "none"
    products: Products = "native"

    @classmethod
    def of(cls, config: Config) -> "BlockSettings":
        """Return what a configuration says."""
        model = config.model
        return cls(config.train.mlp_parts, model.compile, model.kernels, model.products)

    def __post_init__(self) -> None:
        if self.mlp_parts < 1:
            raise ConfigError(f"mlp_parts is {self.mlp_parts}; at 1 MLPs take all tokens at once")
        if self.compile not in get_args(Compile):
            raise ConfigError(f"compile={self.compile!r}: it is {' or '.join(get_args(Compile))}")
        if self.compile != "off" and self.mlp_parts > 1:
            raise ConfigError(
                "compile: blocks are compiled with whole MLPs; leave mlp_parts at 1, or compile off"
            )
        if self.products not in get_args(Products):
            raise ConfigError(f"products={self.products!r}: they are {' or '.join(get_args(Products))}")
        if self.kernels not in get_args(BlockKernels):
            raise ConfigError(f"kernels={self.kernels!r}: it is {' or '.join(get_args(BlockKernels))}")
        if self.kernels != "none" and (self.compile != "off" or self.mlp_parts > 1):
            raise ConfigError(
                f"kernels: {self.kernels} goes with mlp_parts at 1 and compile off; leave them, or set it none"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """A run as it is asked for.

    Attributes:
        config: that it follows, as the user gave it.
        run_dir: directory of the run; of several ranks, where this one writes its own files.
        devices: that compute.
        memory: section memory of the config, with this rank's share of its machine where the user leaves that open.
        dtype: in which the model computes; adapters are fp32 in any case.
        group: the ranks that share each step; of one, where none do.
        weights_from: checkpoint that a run goes on from, where it holds the model; None for ``model.path``.
        may_unpack: whether documents get a sequence each where the model cannot keep several apart.
    """

    config: Config
    run_dir: Path
    devices: Devices
    memory: MemoryConfig
    dtype: ComputeDtype
    group: Group = field(default_factory=SingleGroup)
    weights_from: Path | None = None
    may_unpack: bool = False

    @property
    def num_workers(self) -> int:
        """Devices that compute."""
        return len(self.devices.each)

    @property
    def blocks(self) -> BlockSettings:
        """How blocks compute."""
        return BlockSettings.of(self.config)

    def unpacked(self) -> "RunSpec":
        """Return the same run with a sequence for each document."""
        data = self.config.data.model_copy(update={"pack": "none"})
        return replace(self, config=self.config.model_copy(update={"data": data}), may_unpack=False)

    def in_microbatches(self, count: int) -> "RunSpec":
        """Return the same run with steps cut into ``count`` microbatches."""
        return replace(self, config=self.config.in_microbatches(count))

    def over(self, num_sequences: int) -> "RunSpec":
        """Return the same run with the steps that ``train.epochs`` come to over so many sequences.

        Raises:
            ConfigError: the warm-up is longer than that.
        """
        return replace(self, config=self.config.over(num_sequences))

    @property
    def model_path(self) -> str:
        """Directory or hub id that weights and configuration of the model are read from."""
        return self.config.model.path if self.weights_from is None else str(self.weights_from)

    @classmethod
    def of(
        cls,
        config: Config,
        run_dir: Path,
        group: Group | None = None,
        devices: Devices | None = None,
        memory: MemoryConfig | None = None,
    ) -> "RunSpec":
        """Resolve what ``config`` leaves open.

        Args:
            config: of the run.
            run_dir: its directory.
            group: the ranks that share each step; None for a single process.
            devices: of the run, where somebody has resolved them before; None to resolve them.
            memory: this rank's share of its machine; None for all that ``config`` says.

        Raises:
            ConfigError: there are no such devices.
        """
        memory = config.memory if memory is None else memory
        devices = devices_of(memory) if devices is None else devices
        return cls(
            config=config,
            run_dir=run_dir,
            devices=devices,
            memory=memory,
            dtype=choose_dtype(config.model.dtype, devices),
            group=group or SingleGroup(),
        )


def check_shares(config: Config, num_ranks: int) -> None:
    """Check that every rank has something to do in every microbatch.

    Raises:
        ConfigError: there are fewer sequences.
    """
    least = num_ranks * config.microbatches
    if num_ranks > 1 and config.sequences_per_step < least:
        raise ConfigError(
            f"train.tokens_per_step: {config.sequences_per_step} sequences per step are fewer than {num_ranks} ranks "
            f"of {config.microbatches} microbatches; raise it to {least * config.data.seq_len}, or lower "
            "train.microbatches"
        )


def devices_of(memory: MemoryConfig) -> Devices:
    """Return the devices that ``memory.device`` means on this machine.

    Raises:
        ConfigError: there are none.
    """
    return choose_device(memory.device)


def choose_dtype(name: str, devices: Devices, *, scaled: bool = True) -> ComputeDtype:
    """Resolve ``auto``: bf16 on accelerators that multiply it, fp16 on others, fp32 elsewhere.

    Args:
        name: what the user asked for.
        devices: that compute.
        scaled: whether losses are scaled, or nothing trains; else fp16 loses gradients, and fp32 takes its place.
    """
    if name != "auto":
        return cast("ComputeDtype", name)
    if devices.multiply_bf16:
        return "bf16"
    return "fp16" if devices.accelerated and scaled else "fp32"


def dtype_chosen(name: str, dtype: str, devices: Devices) -> str | None:
    """Return what a user is told of a dtype that ``auto`` became; None where it is the usual one."""
    if name != "auto" or dtype != "fp16":
        return None
    return (
        f"{devices} has no cores for bf16 (compute capability 8.0 has): model.dtype=auto computes in fp16, with its "
        "losses scaled"
    )
