"""From what a user says of optimizer and clipping to how a parameter steps and a trained unit lies at home."""

from dataclasses import replace

from outsize.choices import Clip
from outsize.config import Config
from outsize.config.optimizer_section import OptimizerConfig
from outsize.errors import ConfigError
from outsize.model.sizes.model_spec import ModelSpec
from outsize.native import library
from outsize.optim.adafactor import Adafactor
from outsize.optim.adamw import PlaneAdamW
from outsize.optim.adamw_kernel import agrees_with_torch
from outsize.optim.lion import Lion
from outsize.optim.momentum_kernel import form_of_torch
from outsize.optim.optimizer_spec import StateLayout, masters_for, num_moments_of
from outsize.optim.sgd import SGD
from outsize.runtime.device.device_group import device_names
from outsize.session.job.machine import choose_device


def rule_of(optimizer: OptimizerConfig) -> PlaneAdamW | SGD | Lion | Adafactor:
    """Return how a parameter steps; the learning rate comes with each step."""
    if optimizer.name == "sgd":
        return SGD(
            momentum=optimizer.momentum,
            dampening=optimizer.dampening,
            nesterov=optimizer.nesterov,
            weight_decay=optimizer.weight_decay,
        )
    if optimizer.name == "lion":
        return Lion(betas=optimizer.betas, weight_decay=optimizer.weight_decay)
    if optimizer.name == "adafactor":
        return Adafactor(
            beta2_decay=optimizer.beta2_decay,
            eps=(optimizer.eps1, optimizer.eps2),
            d=optimizer.d,
            weight_decay=optimizer.weight_decay,
        )
    return PlaneAdamW(betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay)


def clip_of(config: Config, spec: ModelSpec, num_ranks: int = 1) -> Clip:
    """Return by which norm the gradients of a run are clipped.

    To skip a step is to know all its gradients before the first unit steps: the global norm is taken, if need be to
    clip to no limit. So it is where several ranks share a step: they have to agree on what is skipped.

    Raises:
        ConfigError: units are to be clipped by their own norm, and the run may have to skip a step, or has ranks.
    """
    optimizer = config.optimizer
    clip = optimizer.clip if optimizer.max_grad_norm else "none"
    if clip == "unit" and num_ranks > 1:
        raise ConfigError(
            "optimizer.clip: several ranks clip by the norm of all gradients; use global, or none"
        )
    if not may_skip(config, spec) and num_ranks == 1:
        return clip
    if clip == "unit":
        raise ConfigError(
            "optimizer.clip: unit steps a unit before the gradients of all are known, so fp16 cannot skip a step that "
            "overflows; use bf16, or optimizer.clip=global"
        )
    return "global"


def may_skip(config: Config, spec: ModelSpec) -> bool:
    """Return whether a run may have to skip a step: where it is told to, or where fp16 overflows."""
    return "fp16" in spec.dtypes or config.train.on_nonfinite == "skip"


def max_norm_of(config: Config) -> float:
    """Return the norm that gradients are clipped to; infinity where they are not."""
    limit = config.optimizer.max_grad_norm
    return limit if limit and config.optimizer.clip != "none" else float("inf")


def layout_for(config: Config, spec: ModelSpec, num_ranks: int = 1) -> StateLayout:
    """Return how a trained unit of a run lies at home.

    Raises:
        ConfigError: the masters cannot be split, or gradients not be rounded.
    """
    optimizer = config.optimizer
    if optimizer.masters == "split" and spec.dtype != "bf16":
        raise ConfigError(
            f"optimizer.masters: only those of bf16 weights can be split, and weights that train are {spec.dtype} "
            "here; leave it auto, or set model.dtype=bf16"
        )
    num_moments = num_moments_of(optimizer.name, optimizer.momentum)
    moments = optimizer.state if num_moments else "fp32"
    layout = StateLayout(
        dtype=spec.dtype,
        masters=masters_for(
            optimizer.masters, spec.dtype, moments, kernels=num_ranks == 1 and _has_kernel(optimizer)
        ),
        moments=moments,
        gradients=optimizer.gradients,
        num_moments=num_moments,
        factored=optimizer.name == "adafactor",
    )
    if layout.factored:
        _check_whole(config, spec, layout, num_ranks)
    tile = config.memory.tile_elements or 0
    if optimizer.masters == "auto" and layout.exact and tile % layout.quantum:
        layout = replace(layout, masters="separate")  # whose tiles may be smaller
    if num_ranks > 1 and layout.gradients != "fp32":
        raise ConfigError("optimizer.gradients: ranks sum gradients at home, in fp32; leave it fp32")
    several = len(device_names(choose_device(config.memory.device))) > 1
    if several and layout.gradients != "fp32":
        raise ConfigError(
            "optimizer.gradients: several workers sum gradients at home, in fp32; leave it fp32"
        )
    if (
        clip_of(config, spec, num_ranks) != "global"
        and not several
        and config.transport.gradients in ("raw", "auto")
    ):
        return replace(layout, gradients="none")
    return layout


def _check_whole(config: Config, spec: ModelSpec, layout: StateLayout, num_ranks: int) -> None:
    """Check that nothing cuts units into parts, where the optimizer steps whole parameters.

    Raises:
        ConfigError: something does.
    """
    if num_ranks > 1:
        raise ConfigError(
            "optimizer.name: adafactor steps whole parameters, and ranks share each by its elements; use a single "
            "process, or lion or adamw with optimizer.state=int8"
        )
    tile = config.memory.tile_elements
    largest = max((unit.numel for unit in spec.units if unit.trainable), default=0)
    if tile is not None and tile < largest:
        raise ConfigError(
            f"memory.tile_elements: adafactor steps whole parameters, and the largest unit has {largest} elements, "
            f"more than {tile}; leave it out"
        )


def _has_kernel(optimizer: OptimizerConfig) -> bool:
    """Return whether a kernel in C steps exact state, to the bit as the torch at hand does."""
    if not library.available():
        return False
    if optimizer.name == "sgd":
        return form_of_torch(library.level()) is not None
    return optimizer.name in ("lion", "adafactor") or agrees_with_torch(library.level())
