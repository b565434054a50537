"""Products as other processors compute them, to try whether a test of equality would hold there.

How a product rounds is the processor's own affair: its libraries choose kernels by shape, so a product of fewer rows
may have other bits, or the same. A test that compares a computation with one of other shapes passes on one machine and
fails on the next; one that wants two bits to differ does so the other way round. Two made-up processors catch both:

- ``by-shape``: no two shapes of a product round alike, but for what needs no rounding. What is equal here is equal
  since the same products are taken.
- ``exact``: products are summed in fp64 and rounded once, so that nearly all bits agree whatever the shapes are.

`pytest --products=by-shape` runs the tests on one of them.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The variants with an `out` compute, and are left as they are.
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")

_libraries: list[torch.library.Library] = []


def compute_as(processor: str) -> None:
    """Have this process compute its products as ``processor``, ``by-shape`` or ``exact``, until it ends."""
    library = torch.library.Library("aten", "IMPL")
    change = {"by-shape": _round_by_shape, "exact": _sum_in_fp64}[processor]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is overridden, as it should be
        for name in PRODUCTS:
            library.impl(name, change(getattr(torch.ops.aten, name).out), "CPU", allow_override=True)
    _libraries.append(library)


def _round_by_shape(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*tensors: Tensor, **scales: Any) -> Tensor:
        made = _compute(product, tensors, scales)
        if not made.is_floating_point() or not made.numel() or tensors[-1].shape[-2] == 1:
            return made  # of one term each, which leaves nothing to choose
        exact = product(
            *(t.double() for t in tensors), **scales, out=made.new_empty(made.shape, dtype=torch.double)
        )
        mark = hash(tuple(tuple(tensor.shape) for tensor in tensors)) % 1009
        index = torch.arange(made.numel(), dtype=torch.int64).mul_(2654435761).add_(mark * 40503)
        chosen = index.bitwise_right_shift_(7).remainder_(3).eq_(0).view(made.shape)
        above = torch.full((), torch.inf, dtype=made.dtype)
        return torch.where(chosen.bool() & made.ne(exact), torch.nextafter(made, above), made)

    return run


def _sum_in_fp64(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*tensors: Tensor, **scales: Any) -> Tensor:
        if not tensors[0].is_floating_point():
            return _compute(product, tensors, scales)
        return _compute(product, tuple(t.double() for t in tensors), scales).to(tensors[0].dtype)

    return run


def _compute(product: Callable[..., Tensor], tensors: tuple[Tensor, ...], scales: dict[str, Any]) -> Tensor:
    *_, left, right = tensors
    shape = (*left.shape[:-1], right.shape[-1])
    return product(*tensors, **scales, out=left.new_empty(shape))
