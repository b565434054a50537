"""The models of a run by a trainer: the one that trains, and the frozen one that it is compared with, both streamed.

The frozen model is wrapped as well, and its forward goes through the device once per step; nothing is computed before
the first step, and nothing has to be kept for a resume. What a run may hold is shared out between the two: host memory
and disk as their states are large, and a third of the device to the frozen one, which keeps nothing for a backward.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from outsize.accelerators import Devices
from outsize.config import Config, MemoryConfig
from outsize.errors import ConfigError
from outsize.model.adapters import peft_config
from outsize.model.build import build_skeleton, load_hf_config
from outsize.objectives.recipes import Recipe
from outsize.session.job.machine import describe_machine, home_file
from outsize.streamed.spec import choose_dtype
from outsize.wrapped.api import Built, open_wrapped
from outsize.wrapped.arguments import BlockSettings, WrapSettings, transport_of
from outsize.wrapped.module import is_wrapped, runner_of

_FROZEN_DEVICE_SHARE = 3
# Of a parameter that trains: gradient and two moments, and a master beside weights of half the bytes.
_STATE_BYTES = {"fp32": 4 + 12, "bf16": 2 + 12 + 4}
_WEIGHT_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a run.

    Attributes:
        trained: wrapped, or PEFT's model around the wrapped one.
        frozen: what that is compared with, wrapped; None where it is not, or with itself.
        adapters: PEFT's configuration of those that train; None where the model itself does.
    """

    trained: nn.Module
    frozen: nn.Module | None
    adapters: Any

    def named(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield (role, model) of each wrapped model; role is ``trained`` or ``frozen``."""
        for name, model in (("trained", streamed(self.trained)), ("frozen", self.frozen)):
            if model is not None and is_wrapped(model):
                yield name, model


def store_of(config: Config, run_dir: Path) -> Path:
    """Return the directory of a run's homes on disk, which nobody else uses."""
    return home_file(config.memory, run_dir).with_suffix("")


def streamed(model: Any) -> nn.Module:
    """Return the model that is wrapped: what adapters were put around, where they were."""
    base: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base


def open_models(
    stack: ExitStack,
    config: Config,
    devices: Devices,
    recipe: Recipe,
    changes: Mapping[str, Any],
    run_dir: Path,
    *,
    empty: bool = False,
) -> Models:
    """Open the models of a run, their weights at home.

    Args:
        stack: gives their memory back.
        config: of the run.
        devices: that compute.
        recipe: of its objective.
        changes: what the config of the trained one says otherwise than its checkpoint's.
        run_dir: see `store_of`.
        empty: leave the weights as they are, zeros, for a plan alone.

    Raises:
        OutsizeError: one cannot be opened, or does not fit.
    """
    lora = config.train.method == "lora"
    other = config.train.teacher if config.train.objective == "distill" else None
    if recipe.compares and not lora:
        other = config.model.path
    memory, frozen_memory = (
        (config.memory,) * 2 if other is None else _shared(config, devices, recipe.auto, other, run_dir)
    )
    codecs = (config.lora.base_codec, config.lora.table_codec) if lora else ("raw", "raw")
    settings = WrapSettings(
        memory=memory,
        microbatches=config.microbatches,
        store_dir=store_of(config, run_dir),
        codecs=codecs,
        head="resident" if recipe.takes_head else "auto",
        transport=transport_of(config.transport.model_dump()),
        moments=config.optimizer.state,
        blocks=_blocks(config),
    )
    model, adapters = config.model, _adapters(config, recipe) if lora else None
    dtype = choose_dtype(model.dtype, devices, scaled=False)
    built = Built(dtype, model.attention, model.trust_remote_code, recipe.auto, empty=empty)
    frozen = None
    if other is not None:
        plain = replace(settings, memory=frozen_memory, codecs=("raw", "raw"))
        frozen = _opened(stack, other, plain, replace(built, frozen=True)).eval()
    built = replace(
        built,
        frozen=lora,
        lora=adapters,
        freeze=model.freeze,
        changes=changes,
        may_lack=recipe.task in ("SEQ_CLS", "FEATURE_EXTRACTION"),  # a head, a pooler
    )
    return Models(_opened(stack, model.path, settings, built), frozen, adapters)


def _blocks(config: Config) -> BlockSettings:
    model = config.model
    return BlockSettings(
        config.train.mlp_parts,
        "blocks" if model.compile == "blocks" else "off",  # refused where it is auto
        model.kernels,
        model.products,
    )


def _opened(stack: ExitStack, name: str, settings: WrapSettings, built: Built) -> nn.Module:
    wrapper = open_wrapped(name, settings, built)
    if is_wrapped(streamed(wrapper)):
        stack.callback(runner_of(streamed(wrapper)).close)
    return wrapper


def _adapters(config: Config, recipe: Recipe) -> Any:
    settings = config.lora.for_peft()
    adapter_config = peft_config(settings, config.model.path, causal=recipe.task == "CAUSAL_LM")
    adapter_config.task_type = recipe.task
    return adapter_config


def _shared(
    config: Config, devices: Devices, auto: str, other: str, run_dir: Path
) -> tuple[MemoryConfig, MemoryConfig]:
    """Return what the trained and the frozen model may hold of a run's memory.

    Raises:
        ConfigError: they have other vocabularies.
    """
    memory, trust = config.memory, config.model.trust_remote_code
    dtype = choose_dtype(config.model.dtype, devices, scaled=False)
    sizes, vocabularies = [], []
    for name in (config.model.path, other):
        hf_config = load_hf_config(name, trust)
        vocabularies.append(hf_config.get_text_config().vocab_size)
        skeleton = build_skeleton(hf_config, dtype, config.model.attention, trust, auto, frozen=True)
        sizes.append(sum(parameter.numel() for parameter in skeleton.parameters()))
    if vocabularies[0] != vocabularies[1]:
        raise ConfigError(
            f"train.teacher: {other} has a vocabulary of {vocabularies[1]:,} tokens, and {config.model.path} one of "
            f"{vocabularies[0]:,}; predictions can be compared over the same tokens alone"
        )
    states = sizes[0] * _STATE_BYTES[dtype], sizes[1] * _WEIGHT_BYTES[dtype]
    machine = describe_machine(memory, devices, sum(states), store_of(config, run_dir))

    def part(parameters: int, device_bytes: int) -> MemoryConfig:
        budgets = {
            f"{tier}_memory": tier_bytes * parameters // sum(states)
            for tier, tier_bytes in (("host", machine.host_bytes), ("disk", machine.disk_bytes))
        }
        return memory.model_copy(update={"home": machine.home, "device_memory": device_bytes, **budgets})

    frozen_bytes = machine.device_bytes // _FROZEN_DEVICE_SHARE
    return part(states[0], machine.device_bytes - frozen_bytes), part(states[1], frozen_bytes)
