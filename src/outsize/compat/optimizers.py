"""The kernels of torch's own optimizers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def fused_adamw(
    weights: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, count: int, **settings: Any
) -> None:
    """Step ``weights`` and their moments for the ``count``-th time, as `torch.optim.AdamW` does with ``fused=True``."""
    torch._fused_adamw_(
        [weights], [gradient], [exp_avg], [exp_avg_sq], [], [torch.tensor(float(count))],
        amsgrad=False, maximize=False, **settings,
    )  # fmt: skip


def norms(tensors: list[Tensor]) -> Tensor:
    """Return the norms of ``tensors``, by the kernel of `torch.nn.utils.clip_grad_norm_`."""
    return torch.stack(torch._foreach_norm(tensors, 2.0))


@contextmanager
def muon_products(instead: Callable[..., Tensor]) -> Iterator[Callable[..., Tensor]]:
    """Have `torch.optim.Muon` orthogonalize by ``instead`` while the context lasts; yields its own way of it."""
    from torch.optim import _muon

    own = _muon._zeropower_via_newtonschulz
    _muon._zeropower_via_newtonschulz = instead
    try:
        yield own
    finally:
        _muon._zeropower_via_newtonschulz = own
