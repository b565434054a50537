"""Which parameters the model's own code uses between units, and where: seen while a trial forward runs."""

from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from outsize.compat import torch_private
from outsize.compat.torch_private import parameters_of
from outsize.model.split import Split
from outsize.runtime.forward.module_replicas import glue_places


class OuterUses(TorchFunctionMode):
    """While entered, notes for `unit` that code on the way to it uses a trained parameter of the rest.

    What lies in a unit is only where it should be while that unit runs: code that computes with it outside is noted by
    the names of such parameters.

    Args:
        split: a model whose parameters are in place.

    Attributes:
        unit: that the model is on its way to.
        found: units on the way to which one was used.
        names: parameters of units that were computed with outside of them.
    """

    def __init__(self, split: Split) -> None:
        super().__init__()
        rest = [tensor for unit in split.spec.units if unit.kind == "rest" for tensor in unit.tensors]
        self._watched = {
            id(parameters_of(module)[name])
            for tensor in rest
            if tensor.trainable
            for module, name in glue_places(split, tensor.name)
        }
        self._inside = {
            id(parameters_of(module)[attribute]): tensor.name
            for unit in split.spec.units
            if unit.kind != "rest"
            for tensor in unit.all_tensors
            for module, attribute in split.owners[tensor.name]
        }
        self.unit = 0
        self.found: set[int] = set()
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in torch_private.leaves_of((args, kwargs)) if isinstance(leaf, nn.Parameter)]
        if any(id(leaf) in self._watched for leaf in given):
            self.found.add(self.unit)
        names = {self._inside[id(leaf)] for leaf in given if id(leaf) in self._inside}
        if names and any(isinstance(leaf, Tensor) for leaf in torch_private.leaves_of(result)):
            self.names |= names  # not its form or place: its values
        return result


def units_that_share(split: Split) -> set[int]:
    """Units that hold a trained parameter of the rest themselves, such as a tied table."""
    rest = [tensor for unit in split.spec.units if unit.kind == "rest" for tensor in unit.tensors]
    places = {id(module) for tensor in rest if tensor.trainable for module, _ in split.owners[tensor.name]}
    return {
        index
        for index, unit in enumerate(split.modules)
        if any(id(module) in places for module in unit.modules())
    }
