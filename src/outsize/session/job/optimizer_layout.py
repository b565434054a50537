"""From what a user says of optimizer and clipping to how a parameter steps and a trained unit lies at home."""

from outsize.accelerators import choose_device
from outsize.config import Config
from outsize.config.optimizer_section import OptimizerConfig
from outsize.model.sizes.model_spec import ModelSpec
from outsize.native import library
from outsize.optim.adafactor import Adafactor
from outsize.optim.adamw import PlaneAdamW
from outsize.optim.adamw_kernel import agrees_with_torch
from outsize.optim.lion import Lion
from outsize.optim.momentum_kernel import form_of_torch
from outsize.optim.muon import Muon
from outsize.optim.optimizer_spec import StateLayout
from outsize.optim.sgd import SGD
from outsize.optim.update import UpdateRule, WholeRule
from outsize.planner.search.sizing import gradients_at_home
from outsize.session.job.job_options import clip_of, named_transport, state_layout


def rule_of(optimizer: OptimizerConfig) -> UpdateRule | WholeRule:
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
    adamw = PlaneAdamW(betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay)
    if optimizer.name == "muon":
        return Muon(
            momentum=optimizer.momentum,
            nesterov=optimizer.nesterov,
            ns_steps=optimizer.ns_steps,
            adjust_lr_fn=optimizer.adjust_lr_fn,
            weight_decay=optimizer.weight_decay,
            adamw=adamw,
        )
    return adamw


def max_norm_of(config: Config) -> float:
    """Return the norm that gradients are clipped to; infinity where they are not."""
    limit = config.optimizer.max_grad_norm
    return limit if limit and config.optimizer.clip != "none" else float("inf")


def layout_for(config: Config, spec: ModelSpec, num_ranks: int = 1) -> StateLayout:
    """Return how a trained unit of a run lies at home here.

    Raises:
        ConfigError: the masters cannot be split, or gradients not be rounded.
    """
    num_workers = len(choose_device(config.memory.device).each)
    kernels = has_kernel(config.optimizer)
    state = state_layout(config, spec, num_workers=num_workers, num_ranks=num_ranks, kernels=kernels)
    return gradients_at_home(
        state,
        clip=clip_of(config, spec, num_ranks) == "global",
        num_workers=num_workers,
        nodes=num_ranks,
        transport=named_transport(config),
    )


def has_kernel(optimizer: OptimizerConfig) -> bool:
    """Return whether a kernel in C steps exact state, to the bit as the torch at hand does."""
    if not library.available():
        return False
    if optimizer.name == "sgd":
        return form_of_torch(library.level()) is not None
    return optimizer.name in ("lion", "adafactor") or agrees_with_torch(library.level())
