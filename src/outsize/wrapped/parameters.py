"""The parameters that a wrapped model shows: what rests at home, under the names and in the modules of the model.

Over a host home a parameter is a view of its unit's weights (`HomeParameter`), and its ``.grad`` a view of the
gradient plane, so any optimizer of `torch.optim` steps where the bytes are. Over a disk home both have a shape and no
bytes, and read and write home as they are used (`AtRest`). So have, over either home, frozen weights that a codec has
written, and those that ``transport.weights`` keeps encoded.

In both, ``parameter.grad is None`` means: there is no gradient, the next backward begins anew.
"""

import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import Tensor, nn

from outsize.checkpoint.checkpoint_state import plane_of
from outsize.compat.torch_private import has_gradient_hooks, parameters_of, share_gradient_hooks, version_of
from outsize.model.sizes.model_spec import ModelSpec, TensorSpec, UnitSpec
from outsize.model.split import Split
from outsize.optim.optimizer_spec import GRADIENT, MASTER, WEIGHTS, StateLayout
from outsize.storage.home import Home
from outsize.storage.ledger import Arena
from outsize.wrapped.at_home.at_rest import AtRest, Place, value_to_assign
from outsize.wrapped.at_home.home_parameter import (
    HandedGradient,
    HomeParameter,
    alone,
    hooks_run,
    plainly,
    show_at_home,
    show_gradient,
    stands_in,
    weakly,
)
from outsize.wrapped.home_tensors import HomeTensors, codec_part, follow

Fill = Callable[[TensorSpec, Tensor], None]


class HomeParameters(HomeTensors):
    """Parameters of a model, moved into a home.

    Args:
        split: the model's units.
        home: where the weights go.
        fill: copies the weights of a tensor into a flat fp32 or compute-dtype tensor.
        state: how a trained unit lies in it.
        carry: called with this once all weights are there, before the model lets go of what it has; with None it lets
            go of each unit as soon as that is there.
        settle: returns when no step is under way.

    Attributes:
        named: the parameters by name.
        names: their names, by `id`.
        in_memory: whether all of them show their bytes.
        with_state: units that have room for gradients and optimizer state.
    """

    def __init__(
        self,
        split: Split,
        home: Home,
        fill: Fill,
        state: StateLayout,
        *,
        carry: Callable[["HomeParameters"], None] | None = None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(home, state, settle)
        self._spec = split.spec
        planes = ((unit, plane) for unit in split.spec.units for plane, _ in self._members(unit, WEIGHTS))
        self.in_memory = all(self._is_view(unit, plane) for unit, plane in planes)
        self._versions: dict[str, int] = {}
        self.named: dict[str, nn.Parameter] = {}
        self.names: dict[int, str] = {}
        self._handed_gradients: dict[str, HandedGradient] = {}
        self._gradient_places: weakref.WeakValueDictionary[str, Place] = weakref.WeakValueDictionary()
        units = split.spec.units
        self.with_state = {unit.index for unit in units if unit.trainable}
        for group in ((unit,) for unit in units) if carry is None else (units,):
            for unit in group:
                self._bring(unit, fill)
            if carry is not None:
                carry(self)
            for unit in group:
                self._adopt(unit, split)

    def can_train(self, names: Collection[str]) -> bool:
        """Whether the home has a place for gradients and state of these parameters, or can be extended by one."""
        room = {
            tensor.name
            for unit in self._spec.units
            if unit.index in self.with_state or (unit.tensors and self._is_view(unit, WEIGHTS))
            for tensor in unit.tensors
        }
        return room.issuperset(names)

    def extend(self, spec: ModelSpec) -> None:
        """Note that there is room for state of units that train by now; masters begin as the weights are."""
        for unit in spec.units:
            if unit.trainable and unit.index not in self.with_state:
                self.with_state.add(unit.index)
                if self._half:
                    for tensor in unit.tensors:
                        self._view(unit, tensor, MASTER).copy_(self._view(unit, tensor, WEIGHTS))

    def positions_with_gradient(self, unit: UnitSpec) -> frozenset[int]:
        """Positions of the tensors of ``unit`` that have a gradient now; one that the user put there goes home."""
        found = set()
        with plainly(), torch.no_grad():
            for position, tensor in enumerate(unit.tensors):
                gradient = self.named[tensor.name].grad
                if gradient is None:
                    self.unlink(tensor.name, GRADIENT)
                    self._let_go(tensor.name)
                    continue
                found.add(position)
                if not self._is_own(unit, tensor, gradient):
                    self._let_go(tensor.name)
                    self.write(unit, {tensor.name: gradient}, GRADIENT)
                    self.link(tensor.name, gradient, GRADIENT)
                    if (tensor.name, GRADIENT) not in self.links:
                        self._show(unit, tensor)
        return frozenset(found)

    def resized(self) -> list[str]:
        """Return the names of parameters that were given other sizes than they have at home."""
        tensors = (tensor for unit in self._spec.units for tensor in unit.all_tensors)
        return [tensor.name for tensor in tensors if self.named[tensor.name].shape != tensor.shape]

    def strayed(self) -> str | None:
        """Return the name of a parameter that shows other bytes than those of its home; None for none."""
        with plainly():
            for name, parameter in self.named.items():
                if name not in self._pointers:
                    if not isinstance(parameter, AtRest):  # `torch.utils.swap_tensors`
                        return name
                elif parameter.data_ptr() != self._pointers[name]:
                    return name
        return None

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients that there are now, by name."""
        with plainly():
            gradients = {name: parameter.grad for name, parameter in self.named.items()}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def show_gradients(self, unit: UnitSpec, positions: frozenset[int]) -> None:
        """Let the parameters at ``positions`` have a ``.grad``."""
        with plainly():
            for position in positions:
                if self.named[unit.tensors[position].name].grad is None:
                    self._show(unit, unit.tensors[position])

    def multiply_gradients(self, names: Iterable[str]) -> None:
        """Multiply the gradients of these names by what is noted for them."""
        due = {name: self.factors.pop(name) for name in names if name in self.factors}
        if due:
            self.settle()
        for unit in self._spec.units if due else ():
            for tensor in unit.tensors:
                if tensor.name in due:
                    value = self.read_one(unit, tensor, GRADIENT)
                    self.write(unit, {tensor.name: value.mul_(due[tensor.name])}, GRADIENT)

    def hooks_run(self) -> AbstractContextManager[None]:
        """See `hooks_run`."""
        with plainly():
            hooked = {name: each for name, each in self.named.items() if has_gradient_hooks(each)}
            self.multiply_gradients(hooked)
        for unit in self._spec.units if hooked else ():
            if unit.trainable:
                self.positions_with_gradient(unit)  # what was assigned just now is linked
        return hooks_run(hooked, {n: self.links[n, GRADIENT] for n in hooked if (n, GRADIENT) in self.links})

    def begin_state(self, names: Collection[str], planes: Iterable[str]) -> None:
        """Have the optimizer's state of these names begin anew, at zero."""
        for unit in self._spec.units:
            for plane in planes:
                zeros = {
                    t.name: torch.zeros(t.shape, dtype=self._form(unit, plane)[1])
                    for t in plane_of(self._state, unit, plane).tensors
                    if t.name in names
                }
                if zeros:
                    self.write(unit, zeros, plane)

    def round_gradients(self, among: Iterable[nn.Parameter]) -> None:
        """Round gradients of half-precision weights ``among`` these to the dtype of those, until the next pass."""
        asked = {id(parameter) for parameter in among if self._half}
        with plainly():
            for parameter in self.named.values():
                gradient = parameter.grad
                here = id(parameter) in asked and not isinstance(parameter, AtRest)
                if here and gradient is not None and gradient.dtype != parameter.dtype:
                    parameter.grad = None
                    parameter.grad_dtype = parameter.dtype
                    parameter.grad = gradient.to(parameter.dtype)

    def version(self, unit: UnitSpec, *, frozen: bool = False) -> int:
        """Return a number that grows whenever anybody but the engine changes the weights of ``unit``.

        Args:
            unit: any.
            frozen: whether changes in place of weights that train do not count.
        """
        with plainly():
            in_place = sum(
                version_of(self.named[tensor.name])
                for tensor in unit.all_tensors
                if not (frozen and tensor.trainable)
            )
        return self.num_writes[unit.index] + in_place

    @property
    def version_of_all(self) -> int:
        """Return a number that grows whenever anybody but the engine changes a weight."""
        with plainly():
            in_place = sum(version_of(parameter) for parameter in self.named.values())
        return sum(self.num_writes.values()) + in_place

    def refresh_masters(self, unit: UnitSpec) -> None:
        """Where half-precision weights are not their masters rounded, make them the masters: they are what counts."""
        given = unit.index in self._given_masters
        self._given_masters.discard(unit.index)
        if not self._half:
            return
        if not self._is_view(unit, WEIGHTS):
            if given:
                self.write(unit, self.read(unit))
            return
        for tensor in unit.tensors:
            parameter = self.named[tensor.name]
            if tensor.trainable and (given or version_of(parameter) != self._versions[tensor.name]):
                follow(self._view(unit, tensor, MASTER), parameter.detach())
                self._versions[tensor.name] = version_of(parameter)

    def leave(self) -> None:
        """Give what a program holds of it bytes apart: the home is about to be given back.

        Raises:
            ConfigError: there is no room for that.
        """
        self.handed_out.part()
        for name in self.names.values():
            self._let_go(name)

    def _show(self, unit: UnitSpec, tensor: TensorSpec) -> None:
        parameter = self.named[tensor.name]
        if self._half:
            parameter.grad = None
            parameter.grad_dtype = torch.float32
        if self._is_view(unit, GRADIENT):
            view = self._view(unit, tensor, GRADIENT)
            parameter.grad = made = alone(view)
            self._handed_gradients[tensor.name] = HandedGradient(made, view)
            return
        place = self._gradient_places[tensor.name] = self.place(unit, tensor, GRADIENT)
        parameter.grad = AtRest(place)

    def _let_go(self, name: str) -> None:
        """Give whoever still holds a former gradient bytes apart, as the next one comes to where it lies."""
        if name in self._gradient_places:
            self._gradient_places.pop(name).part()
        factor = self.factors.pop(name, None)
        if name in self._handed_gradients:
            self._handed_gradients.pop(name).part(name, factor)

    def _is_own(self, unit: UnitSpec, tensor: TensorSpec, gradient: Tensor) -> bool:
        """Whether a gradient is what `_show` has shown, or is linked."""
        linked = self.links.get((tensor.name, GRADIENT))
        if linked is not None:
            return linked.data_ptr() == gradient.data_ptr()
        if self._is_view(unit, GRADIENT):
            return gradient.data_ptr() == self._view(unit, tensor, GRADIENT).data_ptr()
        return isinstance(gradient, AtRest) and gradient.rests_at((id(self), tensor.name, GRADIENT))

    def _look(self, parameter: nn.Parameter, gradient: bool) -> None:
        """Somebody looks at a parameter, or at its gradient, that lies in memory."""
        self.settle()
        if gradient and self.factors and id(parameter) in self.names:
            self.multiply_gradients((self.names[id(parameter)],))

    def _assign(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Bring home what a parameter is assigned; what a program holds of the former value lies apart from now on."""
        name = self.names[id(parameter)]
        value_home = value_to_assign(parameter.detach(), value)
        assert value_home is not None
        self.unlink(name)
        if self.handed_out.part_one(f"{self._where[name][2]} of {name}"):
            self._show_weights(name)
        with torch.no_grad():
            parameter.detach().copy_(value_home)
        self.link(name, value)

    def link(self, name: str, value: Tensor, plane: str = WEIGHTS) -> None:
        """See `HomeTensors.link`; parameters in memory, and gradients, show the value itself."""
        super().link(name, value, plane)
        if (name, plane) in self.links:
            with plainly():
                self._show_link(name, plane)

    def unlink(self, name: str, plane: str = WEIGHTS) -> None:
        """See `HomeTensors.unlink`."""
        linked = (name, plane) in self.links
        super().unlink(name, plane)
        if linked and plane == WEIGHTS and name in self._pointers:
            self._show_weights(name)
        elif linked and plane == GRADIENT and self.named[name].grad is not None:
            self._show(*self._where[name][:2])

    def show_links(self, plane: str) -> None:
        """See `HomeTensors.show_links`."""
        with plainly(), torch.no_grad():
            super().show_links(plane)
            for name, among in self.links:
                if among == plane == GRADIENT and self.named[name].grad is not None:
                    self._show_link(name, plane)

    def _show_link(self, name: str, plane: str) -> None:
        parameter, value = self.named[name], self.links[name, plane]
        if plane == GRADIENT:
            show_gradient(parameter, value)
        elif plane == WEIGHTS and name in self._pointers:
            parameter.data = value
            self._pointers[name] = value.data_ptr()

    def _show_weights(self, name: str) -> None:
        with plainly():
            self.named[name].data = view = self._shown_view(name)
            self._pointers[name] = view.data_ptr()

    def _shown_view(self, name: str) -> Tensor:
        unit, tensor, plane = self._where[name]
        return self.handed_out.tensor(f"{plane} of {name}", self._view(unit, tensor, plane), num_usual=1)

    def _bring(self, unit: UnitSpec, fill: Fill) -> None:
        """Copy the weights of ``unit`` home."""
        for plane, tensors in self._members(unit, WEIGHTS):
            with Arena() as arena:
                flat = self._plane(arena, unit, plane)
                with_master = plane == WEIGHTS and self._half and unit.trainable
                master = self._plane(arena, unit, MASTER) if with_master else None
                for t in tensors:
                    stretch = slice(t.offset, t.offset + t.numel)
                    if master is None:
                        fill(t, flat[stretch])
                    else:
                        fill(t, master[stretch])
                        flat[stretch].copy_(master[stretch])
                self._write(unit, plane, flat, arena)
                if master is not None:
                    self._home.write(unit.index, MASTER, 0, master)
                if codec_part(unit, plane) is not None:
                    self._note_errors(unit, plane, flat, arena)

    def _adopt(self, unit: UnitSpec, split: Split) -> None:
        """Show the weights of ``unit`` as they lie at home, and let go of where they were."""
        for plane, tensors in self._members(unit, WEIGHTS):
            for tensor in tensors:
                places = split.owners[tensor.name]
                module, attribute = places[0]
                former = parameters_of(module)[attribute]
                assert former is not None
                parameter = self._parameter(unit, tensor, plane, former)
                for module, attribute in places:
                    parameters_of(module)[attribute] = parameter
                self.named[tensor.name] = parameter
                self.names[id(parameter)] = tensor.name
                if isinstance(parameter, HomeParameter):
                    with plainly():
                        self._pointers[tensor.name] = parameter.data_ptr()
                self._versions[tensor.name] = version_of(parameter)

    def _parameter(
        self, unit: UnitSpec, tensor: TensorSpec, plane: str, former: nn.Parameter
    ) -> nn.Parameter:
        """The parameter of a tensor at home: the same object, if its bytes can be exchanged under it."""
        with plainly():
            former.grad = None
        self._where[tensor.name] = unit, tensor, plane
        place = self.place(unit, tensor, plane)
        if isinstance(former, AtRest):  # also where it could be seen by now: others know this object
            former.moved(place)
            return former
        if self._is_view(unit, plane):
            view = self._shown_view(tensor.name)
            return show_at_home(former, view, weakly(self._look), weakly(self._assign))
        made = AtRest(place, parameter=True).requires_grad_(former.requires_grad)
        vars(made).update(vars(former))
        share_gradient_hooks(former, made)
        return stands_in(former, cast(nn.Parameter, made))
