"""Which parameters the model's own code uses between units, and where: seen while a trial forward runs."""

from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from outsize.model.split import Split
from outsize.runtime.forward.module_replicas import glue_places


class OuterUses(TorchFunctionMode):
    """While entered, notes for `unit` that code on the way to it uses a trained parameter of the rest.

    Args:
        split: a model whose parameters are in place.

    Attributes:
        unit: that the model is on its way to.
        found: units on the way to which one was used.
    """

    def __init__(self, split: Split) -> None:
        super().__init__()
        rest = [tensor for unit in split.spec.units if unit.kind == "rest" for tensor in unit.tensors]
        self._watched = {
            id(module._parameters[name])
            for tensor in rest
            if tensor.trainable
            for module, name in glue_places(split, tensor.name)
        }
        self.unit = 0
        self.found: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        if any(isinstance(leaf, nn.Parameter) and id(leaf) in self._watched for leaf in leaves):
            self.found.add(self.unit)
        return func(*args, **(kwargs or {}))


def units_that_share(split: Split) -> set[int]:
    """Units that hold a trained parameter of the rest themselves, such as a tied table."""
    rest = [tensor for unit in split.spec.units if unit.kind == "rest" for tensor in unit.tensors]
    places = {id(module) for tensor in rest if tensor.trainable for module, _ in split.owners[tensor.name]}
    return {
        index
        for index, unit in enumerate(split.modules)
        if any(id(module) in places for module in unit.modules())
    }
