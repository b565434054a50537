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
