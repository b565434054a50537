"""A wrapped model whose parameters rest in a home, and move to another one where the model changes.

Which units it has follows from what forwards do with it: a head whose weight the forward takes itself, parameters that
the model's own code computes with, layers that are called by turns are part of what stays on the device.
"""

import contextlib
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from outsize.compat.torch_private import parameters_of
from outsize.errors import BudgetExceededError, ConfigError, ModelError
from outsize.inference.kv_cache import ordinary
from outsize.model.compiled import dtype_and_parts
from outsize.model.shared_memory import check_memory
from outsize.model.split import Split, UnitChoice, split
from outsize.optim.adamw import PlaneAdamW
from outsize.optim.optimizer_spec import WEIGHTS, StateLayout
from outsize.planner.memory.memory_table import home_bytes
from outsize.planner.search.forward_plan import resident_order, why_not_resident
from outsize.planner.search.sizing import PlanOptions
from outsize.runtime.engine.engine import Engine
from outsize.runtime.trial.trial_pass import UnitOrderError
from outsize.session.fill import summary
from outsize.session.job.machine import check_transport, describe_machine, say_in_memory
from outsize.session.session import Session, Store
from outsize.storage.directory import directory_of_process
from outsize.units import format_bytes
from outsize.wrapped.arguments import WrapSettings, check_one_process
from outsize.wrapped.at_home.home_parameter import StateOwner, plainly, weakly
from outsize.wrapped.moving import Moving
from outsize.wrapped.parameters import Fill, HomeParameters

_log = logging.getLogger(__name__)


class ModelAtHome(ABC):
    """A model in its home.

    Args:
        model: the model; `_move_in` makes its parameters those of the home.
        settings: how it is streamed.

    Attributes:
        split: its units.
        state: how a trained unit lies at home.
        session: the home, its budgets, and the engine of now.
        parameters: what is at home, as the user sees it.
        optimizer: settings that `outsize.AdamW` steps with; None where it does not step.
        owners: whose the optimizer's state of a parameter is, by name.
    """

    split: Split
    state: StateLayout
    session: Session
    parameters: HomeParameters

    def __init__(self, model: nn.Module, settings: WrapSettings) -> None:
        self._model = weakref.ref(model)
        self._memory = settings.memory
        self._devices = settings.devices
        # One for each model: a model that was dropped takes its own away at any time.
        self._store_dir = Path(settings.store_dir or directory_of_process() / f"{id(model):x}")
        self._codecs, self._moments = settings.codecs, settings.moments
        self._transport = settings.transport
        self._choice = UnitChoice(with_head=settings.with_head)
        # Frozen ones that lay in one memory, see `check_memory`.
        self._shared: tuple[tuple[str, str], ...] = ()
        self.optimizer: PlaneAdamW | None = None
        self._decays: frozenset[str] | None = None
        self._updates: dict[str, int] = {}
        self.owners: dict[str, StateOwner] = {}
        self._closed = False

    @abstractmethod
    def settle(self) -> None:
        """Return when no step is under way, so that weights and state at home are those after the last one."""

    @abstractmethod
    def stop_with(self, model: nn.Module) -> None:
        """End the lanes, and leave every parameter where it stands in ``model`` now."""

    @abstractmethod
    def _forget_trials(self) -> None:
        """Measure and plan anew in the next forward: units are others."""

    @property
    def _engine(self) -> Engine | None:
        return self.session.engine

    @property
    def updates(self) -> dict[str, int]:
        """How often each trainable parameter has been stepped."""
        self._remember_updates()
        return dict(self._updates)

    def num_updates(self, name: str) -> int:
        """How often the parameter of that name has been stepped."""
        counted = {} if self._engine is None else self._engine.optimizer.updates
        return counted.get(name, self._updates.get(name, 0))

    def set_updates(self, updates: Mapping[str, int]) -> None:
        """Go on counting from ``updates``."""
        self._updates.update(updates)
        if self._engine is not None:
            self._engine.optimizer.updates.update(updates)

    def _open_session(self, parts: Split, state: StateLayout) -> Session:
        """Return a session of the model, without an engine."""
        memory, store_dir = self._memory, self._store_dir
        number = memory.resident if isinstance(memory.resident, int) else 0
        resident = frozenset(resident_order(parts.spec)[:number])
        below = (unit for unit in parts.spec.units if unit.index not in resident)
        state_bytes = sum(home_bytes(unit, state) for unit in below)
        machine = describe_machine(memory, self._devices, state_bytes, store_dir)
        check_transport(self._transport, machine.devices, machine.home)
        options = PlanOptions(
            home=machine.home, below=machine.below, num_workers=machine.num_workers, cut=True
        )
        reason = why_not_resident(replace(options, state=state, transport=self._transport))
        if resident and reason:
            raise ConfigError(f"resident={number}: {reason}; leave it out")
        prefix = f"{id(self):x}-"  # other models may be wrapped over the same directory
        store = Store(
            state=state,
            directory=store_dir,
            prefix=prefix,
            transport=self._transport,
            resident=resident,
            keeps_gradients=True,
            setting="store_dir",
        )
        on_disk = machine.home == "disk"
        if on_disk and not hasattr(self, "session"):
            say_in_memory(store_dir, _log.warning)
        try:
            return Session(parts, machine, memory, store)
        except BudgetExceededError as error:
            instead = "a larger disk_memory" if on_disk else 'home="disk", or a larger host_memory'
            raise BudgetExceededError(
                f"{format_bytes(state_bytes)} rest at home: wrap with {instead}; {error}"
            ) from None  # the last line says it all

    def _move_in(self, model: nn.Module, fill: Fill, moving: Moving | None = None) -> None:
        """Make a home for the parameters that ``model`` has now, and move them there, see `HomeParameters`."""
        shared = check_memory(model)
        dtype, apart = dtype_and_parts(model, *self._codecs)
        parts = split(model, dtype, apart=apart, choice=self._choice)
        state = StateLayout(dtype=parts.spec.dtype, moments=self._moments)
        with contextlib.ExitStack() as stack:
            session = stack.enter_context(self._open_session(parts, state))
            settle = weakly(self.settle)
            carry = None if moving is None else partial(moving.carry, parts)
            parameters = HomeParameters(parts, session.home, fill, state, carry=carry, settle=settle)
            stack.pop_all()
        if parameters.errors:
            _log.info("frozen weights are encoded: %s", summary(parameters.errors))
        session.boundaries.on_unstreamed = partial(_say_unstreamed, parts)
        self.split, self.state, self.session, self.parameters = parts, state, session, parameters
        self._apart = apart
        self._flags = flags_of(model)
        self._shared = *self._shared, *shared
        self._shared_then = self._version_of_shared()
        self._forget_trials()

    def _move(self, model: nn.Module) -> None:
        """Move to a home for what ``model`` is by now; until the old one is copied both are there.

        Gradients and optimizer state go along.
        """
        check_one_process(model)
        self.stop_with(model)
        session = self.session
        moving = Moving(
            model, self.split, self.parameters, self.state, [n for n, k in self._updates.items() if k]
        )
        machine = session.machine
        budgets = {"host_memory": machine.host_bytes, "disk_memory": machine.disk_bytes}
        self._memory = self._memory.model_copy(
            update={"home": machine.home, "device_memory": machine.device_bytes, **budgets}
        )
        flags = moving.room_for(flags_of(model), self._flags)
        session.leave()
        try:
            with ordinary(), _training(model, flags):
                self._move_in(model, moving.fill, moving)
        except BaseException:
            session.enter()
            raise
        moving.show(self.split, self.parameters)
        names = moving.names
        self._updates = {names[name]: count for name, count in self._updates.items() if name in names}
        self.owners = {names[name]: owner for name, owner in self.owners.items() if name in names}
        if self._decays is not None:
            self._decays = frozenset(names[name] for name in self._decays)
        self._shared = tuple((names.get(one, one), names.get(other, other)) for one, other in self._shared)
        session.close()

    def parameters_now(self) -> HomeParameters:
        """Return what is at home, with room for all that trains by now; errors as of a forward."""
        self._make_room(self._check())
        return self.parameters

    @property
    def model(self) -> nn.Module:
        """The model, which must not have been unwrapped."""
        return self._check()

    def _check(self) -> nn.Module:
        model = self._model()
        if model is None or self._closed:
            raise ConfigError("this model has been unwrapped; wrap it again to stream it")
        self._follow_links(model)
        # In any order: PEFT's experts change it in their forward.
        present = {id(p) for p in model.parameters()}
        if present != self._flags.keys():
            if self._is_in_use(self._flags.keys() - present):
                raise ModelError(
                    "parameters of this model were replaced after they had a gradient, or an optimizer of outsize; "
                    "change the model first (resized embeddings, tied weights), then wrap it"
                )
            self._move(model)  # adapters were added, or a head was resized
        elif resized := self.parameters.resized():
            if stepped := [name for name in resized if self.num_updates(name)]:
                raise ModelError(
                    f"{stepped[0]} was given other sizes after it had been stepped, and its optimizer state has the "
                    "former ones: outsize.unwrap the model, resize it, and wrap it again"
                )
            self._move(model)
        for name, parameter in self.parameters.named.items():
            for module, attribute in self.split.owners[name]:
                if parameters_of(module).get(attribute) is not parameter:
                    raise ModelError(
                        f"{name} does not stand where it stood when the model was wrapped (pruned, parametrised, or "
                        "replaced): change the model first, then wrap it, or outsize.unwrap it before"
                    )
        if (strayed := self.parameters.strayed()) is not None:
            raise ModelError(
                f"{strayed} was given other memory than its home's (set_, resize_, swap_tensors): put values in with "
                "copy_, or by parameter.data ="
            )
        if self._shared and self._version_of_shared() != self._shared_then:
            raise ModelError(
                f"{' and '.join(self._shared[0])} lay in one memory when the model was wrapped, frozen, and are two by "
                "now; one of them was changed or thawed: give each memory of its own, or make them one parameter, "
                "before outsize.wrap"
            )
        return model

    def _follow_links(self, model: nn.Module) -> None:
        """Bring home what a program has changed in tensors that it assigned to parameters, and to their gradients."""
        if self.parameters.links:
            for state in {id(each): each for each in self.owners.values()}.values():
                state.let_go()  # or what was loaded is compared at each call until a step
            links = self.parameters.links.items()
            check_memory(model, {name: value for (name, plane), value in links if plane == WEIGHTS})
        for one, other in self.parameters.bring_links():
            raise ModelError(
                f"{one} was assigned the data of {other} (parameter.data =), and would lie in one memory with it: "
                "assign its clone(), or make them one parameter before outsize.wrap"
            )

    def _version_of_shared(self) -> tuple[int, ...]:
        """Return numbers that differ once weights that lay in one memory have changed, or train."""
        names = {name for pair in self._shared for name in pair if name in self.parameters.named}
        trains = [int(self.parameters.named[name].requires_grad) for name in names]
        units = [u for u in self.split.spec.units if names & {tensor.name for tensor in u.all_tensors}]
        return sum(trains), *(self.parameters.version(unit, frozen=True) for unit in units)

    def _is_in_use(self, gone: Set[int]) -> bool:
        """Whether any of the parameters that the model has no longer, by `id`, has a gradient or optimizer state."""
        with plainly():
            with_gradient = {id(self.parameters.named[name]) for name in self.parameters.gradients()}
        stepped = {id(self.parameters.named[name]) for name, count in self.updates.items() if count}
        owned = {key for key, name in self.parameters.names.items() if name in self.owners}
        return bool(gone & (with_gradient | stepped | owned))

    def _keep_head(self, model: nn.Module) -> None:
        """From now on the forward takes the weight of the head itself: the head is part of the rest."""
        choice = replace(self._choice, with_head=False)
        if not any(unit.kind == "head" for unit in self.split.spec.units):
            self._choice = choice
            return
        _log.info("the forward takes the weight of the head itself: the head stays on the device from now on")
        self._cut_by(choice, model)

    def _keep_resident(self, model: nn.Module, names: frozenset[str]) -> None:
        """From now on parameters of units that the model's own code computes with are part of the rest."""
        if self.session.machine.num_workers > 1:
            raise ModelError(
                f"{type(model).__name__} computes with {min(names)} outside of its unit, as AdaLoRA does with its "
                "adapters, and each worker has parameters of units apart; use one device"
            )
        heads = {t.name for unit in self.split.spec.units if unit.kind == "head" for t in unit.all_tensors}
        if self._choice.with_head and heads & names:
            raise ModelError(
                f"this forward of {type(model).__name__} takes the weight of the head itself (TRL), which is streamed: "
                'outsize.wrap(..., head="resident")'
            )
        _log.info("%d parameters stay on the device from now on, such as %s", len(names), min(names))
        self._cut_by(replace(self._choice, resident=self._choice.resident | names), model)

    def _take_turns(self, model: nn.Module, error: UnitOrderError) -> None:
        """From now on units are in the order in which this forward calls them; what it calls again is no unit."""
        if error.calls in self._choice.calls:
            raise error
        before = {unit.name for unit in self.split.spec.units}
        self._cut_by(self._choice.after(error.calls), model)
        if gone := sorted(before - {unit.name for unit in self.split.spec.units} - {"rest"}):
            _log.warning(
                "%s: %d of its layers stay on the device, such as %s, as forwards call them several times or by turns",
                type(model).__name__,
                len(gone),
                gone[0],
            )
        _log.info("%s", self.split.said())

    def _cut_by(self, choice: UnitChoice, model: nn.Module) -> None:
        """Move to a home for the units that ``choice`` makes; after an error they are those of before."""
        former, self._choice = self._choice, choice
        try:
            self._move(model)
        except BaseException:
            self._choice = former
            raise

    def _make_room(self, model: nn.Module) -> None:
        """Move where something trains by now for whose gradient and state the home has no place."""
        names, flags = self.parameters.names, self._flags_now(model)
        if not self.parameters.can_train([names[key] for key, trains in flags.items() if trains]):
            self._move(model)

    def _flags_now(self, model: nn.Module) -> dict[int, bool]:
        """What trains, and what has a gradient though it was frozen since: optimizers of torch step that as well."""
        names, waiting = self.parameters.names, self.parameters.gradients()
        return {key: trains or names.get(key) in waiting for key, trains in flags_of(model).items()}

    def _split_anew(self, model: nn.Module, flags: dict[int, bool]) -> None:
        check_one_process(model)
        decays = self._decays
        with _training(model, flags):
            parts = split(
                model,
                self.split.spec.dtype,
                decays=(lambda _: True) if decays is None else decays.__contains__,
                apart=self._apart,
                choice=self._choice,
            )
        self.session.extend(parts.spec)
        self.parameters.extend(parts.spec)
        self.split, self._flags = parts, flags

    def _remember_updates(self) -> None:
        if self._engine is not None:
            self._updates.update(self._engine.optimizer.updates)


@contextlib.contextmanager
def _training(model: nn.Module, flags: Mapping[int, bool]) -> Iterator[None]:
    """Have the parameters of ``model`` train as ``flags`` say, while the context lasts."""
    former = [p.requires_grad for p in model.parameters()]
    try:
        for parameter in model.parameters():
            parameter.requires_grad_(flags[id(parameter)])
        yield
    finally:
        for parameter, flag in zip(model.parameters(), former, strict=True):
            parameter.requires_grad_(flag)


def flags_of(model: nn.Module) -> dict[int, bool]:
    """Return whether each parameter of ``model`` trains, by its `id`: whoever reorders modules changes nothing."""
    return {id(parameter): parameter.requires_grad for parameter in model.parameters()}


def _say_unstreamed(parts: Split, index: int) -> None:
    _log.warning(
        "%s was called outside of the model's own forward (a part of it by itself, functional_call): that call is not "
        "streamed, and computes where the weights rest; call the wrapped model, or wrap the part that you call",
        parts.spec.units[index].name,
    )
