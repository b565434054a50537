"""A wrapped model moves to another home: its weights, and what its backwards and its optimizer have left there."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from outsize.errors import ModelError
from outsize.model.sizes.model_spec import TensorSpec, UnitSpec
from outsize.model.split import Split
from outsize.optim.optimizer_spec import GRADIENT, MASTER, WEIGHTS, StateLayout
from outsize.wrapped.at_home.home_parameter import HomeParameter, flat_values, plainly, show_plainly
from outsize.wrapped.home_tensors import follow
from outsize.wrapped.parameters import HomeParameters


class Moving:
    """What goes along when a model moves, read from the former home while both are there.

    Args:
        model: as it is by now: parameters may have been added, and others may have got other names.
        split: the units of the former home.
        former: the parameters there; gradients that the caller has put in their place are brought home first.
        state: how a trained unit lies in either home.
        stepped: names of the parameters that an optimizer has stepped.

    Attributes:
        names: the name that a parameter has by now, by its former one.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        former: HomeParameters,
        state: StateLayout,
        stepped: Collection[str],
    ) -> None:
        self._former, self._units = former, split.spec.units
        self._planes = {*state.planes, GRADIENT} - {WEIGHTS}
        self._present = dict(model.named_parameters(remove_duplicate=False))
        self._known = {id(parameter): name for name, parameter in former.named.items()}
        self.names: dict[str, str] = {}
        for name, parameter in self._present.items():
            if id(parameter) in self._known:
                self.names.setdefault(self._known[id(parameter)], name)
        self._place = {tensor.name: unit for unit in self._units for tensor in unit.all_tensors}
        self._resized = {id(former.named[name]) for name in former.resized()}
        self._read: tuple[int, dict[str, Tensor]] = -1, {}  # one unit at a time
        self._stepped = frozenset(stepped)
        self._with_gradient = {
            unit.tensors[position].name
            for unit in self._units
            if unit.index in former.with_state
            for position in former.positions_with_gradient(unit)
        }
        self._loose = {n: g for n, g in former.gradients().items() if n not in self._with_gradient}

    def room_for(self, flags: Mapping[int, bool], former: Mapping[int, bool]) -> dict[int, bool]:
        """Return what gets room for a gradient and state: what trains, what has either, and adapters that are off now.

        Args:
            flags: whether each parameter trains by now, by its `id`.
            former: whether it did in the last plan.

        Raises:
            ModelError: what has either is of another dtype than what trains.
        """
        dtypes = {id(parameter): parameter.dtype for parameter in self._present.values()}
        trained = {dtypes[key] for key, trains in flags.items() if trains}
        named = self._former.named
        holding = {id(named[n]): n for n in self._stepped | self._with_gradient | self._loose.keys()}
        other = [name for key, name in holding.items() if trained and dtypes[key] not in trained]
        if other:
            raise ModelError(
                f"{min(other)} has been trained in {named[min(other)].dtype}, what trains by now is in "
                f"{min(map(str, trained))}, and a home holds state of one dtype: let both have the same (PEFT: "
                "autocast_adapter_dtype=False), or outsize.unwrap the model and wrap it as it is now"
            )
        off = {
            key
            for key, trains in former.items()
            if trains and key in dtypes and dtypes[key] in (trained or {dtypes[key]})
        }
        return {key: trains or key in off or key in holding for key, trains in flags.items()}

    def fill(self, tensor: TensorSpec, into: Tensor) -> None:
        """Copy the weights of a tensor for the new home, see `HomeParameters`."""
        parameter = self._present[tensor.name]
        name = self._known.get(id(parameter))
        if name is None or id(parameter) in self._resized:
            into.copy_(flat_values(tensor.name, parameter))
            return
        unit = self._place[name]
        if self._read[0] != unit.index:
            self._read = unit.index, self._former.read(unit)
        into.copy_(self._read[1][name].reshape(-1))

    def carry(self, split: Split, parameters: HomeParameters) -> None:
        """Write gradients, masters and moments to the new home, as long as the model shows the former one."""
        self._read = -1, {}
        place = {tensor.name: unit for unit in split.spec.units for tensor in unit.tensors}
        for unit in self._units:
            if unit.index not in self._former.with_state:
                continue
            own = {tensor.name for tensor in unit.tensors}
            for plane in self._planes:
                due = own & (self._with_gradient if plane == GRADIENT else self._stepped)
                self._carry_plane(unit, plane, due, place, parameters)
        parameters.factors.update({self.names[name]: f for name, f in self._former.factors.items()})
        # Whoever holds what was replaced has bytes of its own.
        for name, parameter in self._former.named.items():
            if name not in self.names and isinstance(parameter, HomeParameter):
                with plainly():
                    value = parameter.detach().clone()
                show_plainly(parameter, value)
        self._former.leave()

    def _carry_plane(
        self,
        unit: UnitSpec,
        plane: str,
        due: set[str],
        place: dict[str, UnitSpec],
        parameters: HomeParameters,
    ) -> None:
        if not due:
            return
        values = self._former.read(unit, plane)
        weights = self._former.read(unit) if plane == MASTER else {}
        for name in due:
            value = values[name]
            if plane == MASTER:  # weights that were changed since the last step count
                value = follow(value.clone(), weights[name])
            parameters.write(place[self.names[name]], {self.names[name]: value}, plane)

    def show(self, split: Split, parameters: HomeParameters) -> None:
        """Have parameters of the new home show the gradients that came along."""
        self._former.is_left = True
        gradients = {self.names[name] for name in self._with_gradient}
        for unit in split.spec.units:
            positions = {at for at, tensor in enumerate(unit.tensors) if tensor.name in gradients}
            parameters.show_gradients(unit, frozenset(positions))
        with plainly(), torch.no_grad():
            for name, gradient in self._loose.items():
                parameters.named[self.names[name]].grad = gradient
        for (name, plane), value in self._former.links.items():
            if name in self.names:
                parameters.link(self.names[name], value, plane)
