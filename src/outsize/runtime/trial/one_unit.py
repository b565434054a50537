"""One unit of a model, passed through again and again by a microbatch, as the compute lane passes through all."""

from typing import Any

import torch
from torch import nn

from outsize.model.walk import UnitCall
from outsize.runtime.forward.boundary import Gradients, hand_out, is_differentiable
from outsize.runtime.forward.microbatch import MicrobatchRun
from outsize.runtime.forward.unit_visit import UnitVisit, visit_of
from outsize.runtime.ops.compute_ops import seed_of


class OneUnit(MicrobatchRun):
    """Passages through one unit: it is called as ``call`` says, and what it returns goes nowhere."""

    def __init__(self, model: nn.Module, call: UnitCall, num_units: int) -> None:
        def reseed(unit: int, glue: bool) -> None:
            torch.default_generator.manual_seed(seed_of(0, 0, unit, 0, glue))

        super().__init__(model, {}, (True,) * num_units, reseed)
        self._call = call

    def _arrive(self, unit: int) -> UnitVisit:
        visit = self._visits[unit] = visit_of(self._call)
        return visit

    def hand_out(self) -> Any:
        """Return what the unit returned last, with gradients that go nowhere."""
        assert self._returned is not None
        return self._returned.build(hand_out(self._waiting, Gradients(self._waiting)))

    @property
    def meets_objects(self) -> bool:
        """Whether the unit is given or returns what code may write into."""
        assert self._returned is not None
        return bool(self._returned.outline.places)

    def bring_gradients(self, unit: int) -> None:
        """Have gradients of all outputs, zeros, arrive at the unit."""
        values = [torch.zeros_like(leaf) if is_differentiable(leaf) else None for leaf in self._waiting]
        self._visits[unit].box.values = values
