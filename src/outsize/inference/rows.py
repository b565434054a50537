"""An embedding of which only the rows that are asked for come up: a few thousand bytes per token, not the table."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outsize.compat.torch_private import parameters_of
from outsize.inference.forward_extent import no_grad_parameter
from outsize.inference.source import Source
from outsize.model.sizes.model_spec import TensorSpec, UnitSpec


def is_table(module: nn.Module, unit: UnitSpec) -> bool:
    """Whether ``module`` does nothing but look rows of its one tensor up."""
    return (
        unit.kind == "embedding"
        and len(unit.all_tensors) == len(unit.tensors) == 1
        and type(module).forward is nn.Embedding.forward
        and module.max_norm is None
    )


class Table:
    """Calls an embedding on the rows that its ids name, and no others.

    The module's own forward runs, over a table of those rows and ids that count in it; the values are the same, since a
    lookup computes nothing.
    """

    def __init__(self, module: nn.Module, unit: UnitSpec, source: Source) -> None:
        self._module = module
        self._unit = unit.index
        self._tensor: TensorSpec = unit.tensors[0]
        self._source = source

    def run(self, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module's own forward."""
        name, ids = next(
            ((name, kwargs[name]) for name in ("input", "input_ids") if name in kwargs), ("", None)
        )
        asked: Tensor = args[0] if ids is None else ids
        numbers, places = torch.unique(asked, return_inverse=True)
        _check(numbers, self._tensor)
        table = self._source.rows(self._unit, self._tensor, numbers.cpu())
        args, kwargs = ((places, *args[1:]), kwargs) if ids is None else (args, {**kwargs, name: places})
        module = self._module
        former, padding = parameters_of(module)["weight"], module.padding_idx
        parameters_of(module)["weight"], module.padding_idx = no_grad_parameter(table), None  # type: ignore[assignment]
        try:
            return real(*args, **kwargs)
        finally:
            parameters_of(module)["weight"], module.padding_idx = former, padding


def _check(numbers: Tensor, tensor: TensorSpec) -> None:
    if len(numbers) and (int(numbers[0]) < 0 or int(numbers[-1]) >= tensor.shape[0]):
        raise IndexError(
            f"token ids {int(numbers[0])} to {int(numbers[-1])} for an embedding of {tensor.shape[0]} rows"
        )
