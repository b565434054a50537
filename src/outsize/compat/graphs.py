"""Autograd's graph, and its counters of changes in place."""

from typing import Any

import torch
from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """Return how often the memory of ``tensor`` was changed in place, as autograd counts it."""
    return tensor._version


def made_at(node: Any) -> int:
    """Return how many nodes of graphs its thread had made before ``node``."""
    return int(node._sequence_nr())


def num_nodes() -> int:
    """Return how many nodes of graphs this thread has made."""
    return int(torch._C._autograd._get_sequence_nr())


def will_run(node: Any) -> bool:
    """Return whether the backward under way comes to ``node``."""
    return bool(torch._C._will_engine_execute_node(node))


def keeping_versions(tensors: Any) -> Any:
    """Return a context in which changes in place of ``tensors`` are not counted."""
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter

    return _unsafe_preserve_version_counter(tensors)
