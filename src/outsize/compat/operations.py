"""Operations of torch below autograd, by their names."""

from typing import Any

import torch


def operations(*names: str) -> frozenset[Any]:
    """Return the operations called ``names``, such as ``mm.default``; those that this torch has not are left out."""
    found = set()
    for name in names:
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        found |= {operation} - {None}
    return frozenset(found)


def schema_of(operation: Any) -> Any:
    """Return the schema of ``operation``: its arguments, and which of them it writes to or returns."""
    return operation._schema


def form_grouped_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on tensors without values, products of tokens with their experts among them.

    torch knows the form of what these return for bf16 alone, and for sizes that its kernels take.
    """
    if func is not torch.ops.aten._grouped_mm.default:
        return func(*args, **kwargs)
    left, right = args[:2]
    groups = (args[2] if len(args) > 2 else kwargs["offs"]).shape if left.ndim == right.ndim == 2 else ()
    rows = left.shape[:-1] if left.ndim <= right.ndim else left.shape[1:-1]
    return left.new_empty(*groups, *rows[-2 if left.ndim == right.ndim == 3 else -1 :], right.shape[-1])
