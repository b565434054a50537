"""From what a user says of optimizer and clipping to how a trained unit lies at home."""

from outsize.config import Config
from outsize.config.optimizer_section import OptimizerConfig
from outsize.model.sizes.model_spec import ModelSpec
from outsize.native import library
from outsize.optim.adamw_kernel import agrees_with_torch
from outsize.optim.optimizer_names import named
from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.search.sizing import gradients_at_home
from outsize.session.job.job_options import clip_of, named_transport, state_layout


def max_norm_of(config: Config) -> float:
    """Return the norm that gradients are clipped to; infinity where they are not."""
    limit = config.optimizer.max_grad_norm
    return limit if limit and config.optimizer.clip != "none" else float("inf")


def layout_for(config: Config, spec: ModelSpec, num_ranks: int = 1, *, num_workers: int = 1) -> StateLayout:
    """Return how a trained unit of a run lies at home here.

    Raises:
        ConfigError: the masters cannot be split, or gradients not be rounded.
    """
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
    own = named(optimizer.name)
    return own is not None and own.kernel and library.available() and agrees_with_torch(library.level())
