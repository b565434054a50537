"""The optimizer of a run, from its configuration: how state lies in the offload store, how a parameter steps."""

import contextlib
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Literal

from outsize.config import Config
from outsize.config.model_section import OptimizerConfig
from outsize.errors import ConfigError, StorageError
from outsize.model.sizes.model_spec import ModelSpec
from outsize.native import library
from outsize.optim.adamw import agrees_with_torch
from outsize.optim.optimizer_names import named
from outsize.optim.optimizer_spec import StateLayout
from outsize.optim.planes import UpdateRule, WholeRule
from outsize.optim.torch_class import rule_of_class
from outsize.optim.torch_trial import torch_class
from outsize.planner.memory.memory_table import gradients_at_home
from outsize.session.job.job_options import clip_of, may_skip, named_transport, state_layout
from outsize.storage.committed import find_record
from outsize.storage.home_layout import is_laid_out
from outsize.streamed.spec import RunSpec


def max_norm_of(optimizer: OptimizerConfig) -> float:
    """Return the norm that gradients are clipped to; infinity where they are not."""
    limit = optimizer.max_grad_norm
    return limit if limit and optimizer.clip != "none" else float("inf")


def layout_for(config: Config, spec: ModelSpec, num_ranks: int = 1, *, num_workers: int = 1) -> StateLayout:
    """Return how a trained unit of a run lies at home here.

    Raises:
        ConfigError: the masters cannot be split, or gradients not be rounded.
    """
    optimizer, tile = config.optimizer, config.memory.tile_elements
    kernels, skips = has_kernel(optimizer), may_skip(config.train, spec)
    state = state_layout(optimizer, spec, tile, num_workers=num_workers, num_ranks=num_ranks, kernels=kernels)
    return gradients_at_home(
        state,
        clip=clip_of(optimizer, num_ranks, may_skip=skips) == "global",
        num_workers=num_workers,
        nodes=num_ranks,
        transport=named_transport(config.transport),
    )


def has_kernel(optimizer: OptimizerConfig) -> bool:
    """Return whether a kernel in C steps exact state, to the bit as the torch at hand does."""
    row = named(optimizer.name)
    return row is not None and row.kernel and library.available() and agrees_with_torch(library.level())


_WAYS: tuple[Literal["split", "separate"], ...] = ("split", "separate")


def with_masters_of(path: Path, run: RunSpec, spec: ModelSpec) -> RunSpec:
    """Return a run with ``optimizer.masters`` as they lie in the home at ``path``, where it says ``auto``.

    Which of the two is best here may have changed since: by a version of this program, or by kernels that were built.

    Raises:
        ConfigError: see `layout_for`.
    """
    config = run.config
    is_open = config.optimizer.masters == "auto" and config.train.resume == "auto" and spec.dtype == "bf16"
    if run.group.size > 1 or not is_open:
        return run
    for masters in _WAYS:
        optimizer = config.optimizer.model_copy(update={"masters": masters})
        given = config.model_copy(update={"optimizer": optimizer})
        planes = layout_for(given, spec, num_workers=run.num_workers).planes
        with contextlib.suppress(StorageError):  # whoever goes on from that home says it
            record, _ = find_record(path, spec, planes)
            if record is not None and is_laid_out(record.layout, spec, planes):
                return replace(run, config=given)
    return run


# Settings of which a plan makes something, and not the rule.
_OF_THE_RUN = ("ns_on",)


def rule_of(optimizer: OptimizerConfig) -> UpdateRule | WholeRule:
    """Return how a parameter steps; the learning rate comes with each step.

    Raises:
        ConfigError: the optimizer does not take its arguments.
    """
    row = named(optimizer.name)
    if row is None:
        return rule_of_class(torch_class(optimizer.name, optimizer.args), optimizer.weight_decay)
    module, _, name = row.rule.rpartition(".")
    maker = getattr(importlib.import_module(module), name)
    settings = {key: getattr(optimizer, key) for key in row.keys if key not in _OF_THE_RUN}
    rule: UpdateRule | WholeRule
    try:
        rule = getattr(maker, "of", maker)(weight_decay=optimizer.weight_decay, **settings, **optimizer.args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.args: {optimizer.name} refuses them: {error}") from error
    return rule
