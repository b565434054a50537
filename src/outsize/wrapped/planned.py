"""The engine and the plan of a wrapped model as they stand, made anew when what they were made for changes.

A plan is made for the largest microbatch so far, for what trains, and for the settings of the optimizer. The home stays
through all of it.
"""

import contextlib
import logging
import weakref
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from outsize.compat.torch_private import parameters_of
from outsize.errors import ConfigError, ModelError
from outsize.inference.kv_cache import ordinary
from outsize.model.compiled import dtype_and_parts
from outsize.model.split import ALL_LISTS, Split, split
from outsize.optim.adamw import PlaneAdamW
from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.memory.memory_table import home_bytes
from outsize.planner.passes.step_parts import Passes, cut_step, lean
from outsize.planner.program.program import Program
from outsize.planner.program.stages import Extent, Kept
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.step_plan import Plan
from outsize.runtime.engine.engine import Engine
from outsize.runtime.engine.op_handlers import EngineSettings
from outsize.runtime.engine.workers import extent_bytes
from outsize.runtime.forward.unit_facts import Needed
from outsize.runtime.ops.context import slots_used
from outsize.runtime.ops.gradient_ops import count_times_home
from outsize.runtime.trial.measured import Measured
from outsize.runtime.trial.trial_pass import UnitOrderError
from outsize.session.fill import summary
from outsize.session.job.machine import check_transport, describe_machine
from outsize.session.session import Session, Store
from outsize.storage.directory import directory_of_process
from outsize.wrapped import wrap_planning
from outsize.wrapped.arguments import WrapSettings
from outsize.wrapped.at_home.home_parameter import plainly, weakly
from outsize.wrapped.loop_records import Known, LoopRecords
from outsize.wrapped.moving import Moving
from outsize.wrapped.parameters import Fill, HomeParameters

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Programs:
    """The passes for a number of microbatches, where each op finds its units, and how often what moves.

    Attributes:
        passes: of a step.
        warm_slots: of a forward, and the backward behind it.
        cold_slots: of a backward that comes later.
        following_slots: of the forward of later rounds.
        inference_slots: of a forward that no backward follows.
        times_home: gradients that a backward brings home.
    """

    passes: Passes
    warm_slots: Mapping[Any, Mapping[int, int]]
    cold_slots: Mapping[Any, Mapping[int, int]]
    following_slots: Mapping[Any, Mapping[int, int]]
    inference_slots: Mapping[Any, Mapping[int, int]]
    times_home: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class _SetAside:
    """What an engine is made for.

    Attributes:
        layout: of the step, without what a forward keeps on the device, which lies in no memory that is set aside.
        leaving: what a forward keeps and leaves the device, by unit and microbatch.
        offload_rooms: the room for that.
        extent_bytes: of the largest input that is saved below the device.
    """

    layout: StepLayout
    leaving: Kept
    offload_rooms: Mapping[Extent, tuple[int, int]]
    extent_bytes: int

    @classmethod
    def of(cls, plan: Plan, measured: Measured) -> Self:
        """Return what an engine for ``plan`` is made for."""
        leaving = plan.layout.kept if plan.layout.any_leaves else ()
        extent = extent_bytes(plan, measured.boundary_bytes)
        return cls(replace(plan.layout, kept=()), leaving, plan.offload_rooms, extent)


class Planned:
    """A model in its home, and the engine of now.

    Args:
        model: the model; on return its parameters are those of the home.
        settings: how it is streamed.
        fill: copies weights into the home.

    Attributes:
        state: how a trained unit lies at home.
        records: writes what the loop does; None where nobody asked.
        owners: whose the optimizer's state of a parameter is, by name.
    """

    def __init__(self, model: nn.Module, settings: WrapSettings, fill: Fill) -> None:
        self._model = weakref.ref(model)
        self.records: LoopRecords | None = None
        self._memory, self.microbatches = settings.memory, settings.microbatches
        self._devices = settings.devices
        # One for each model: a model that was dropped takes its own away at any time.
        self._store_dir = Path(settings.store_dir or directory_of_process() / f"{id(model):x}")
        self._codecs, self._moments = settings.codecs, settings.moments
        self._with_head, self._transport = settings.with_head, settings.transport
        self._resident: frozenset[str] = frozenset()
        self._choice = ALL_LISTS
        self.optimizer: PlaneAdamW | None = None
        self._decays: frozenset[str] | None = None
        self._updates: dict[str, int] = {}
        self.owners: dict[str, object] = {}
        self._plan: Plan | None = None
        self._set_aside: _SetAside | None = None
        self._measured: Measured | None = None
        self._known: list[wrap_planning.BatchShape] = []
        self._needed: dict[wrap_planning.Saving, tuple[Mapping[int, Needed], Mapping[int, int]]] = {}
        self._shortened_for: wrap_planning.Saving | None = None  # what the engine has been told of that
        # Of the weights that the engine has encoded or keeps on the device, by unit: of all, and of those frozen.
        self._versions: dict[int, tuple[int, int]] = {}
        self._programs: dict[int, Programs] = {}
        self._abandoned: list[int] = []
        self._closed = self._walking = False
        self._move_in(model, fill)
        if self._memory.home == "auto" and self.session.machine.home == "disk" and any(self._flags.values()):
            _log.warning(
                "the model rests on disk, as it does not fit host_memory: outsize.AdamW(model), and torch.optim.AdamW "
                'as that does, step there (the default of Trainer); others need home="host" and the memory for it'
            )
        self._device = self.session.torch_device
        # The end of a script finds lanes at work; whoever lets go of the model before has ended them by that.
        weakref.finalize(self, _close_if_alive, weakref.ref(self))

    @property
    def _engine(self) -> Engine | None:
        return self.session.engine

    def record(self, run_dir: Path, known: Known | None = None) -> None:
        """Write a run directory from now on, see `LoopRecords`."""
        model = self._check()
        self.records = LoopRecords(run_dir, self.session, model, self.split.spec.compute_dtype, known)
        # Not at exit: `close` ends the lanes first, and what they move until then belongs to the last line.
        weakref.finalize(self, self.records.close).atexit = False

    @property
    def plan(self) -> Plan | None:
        """The plan of now; None before the first call."""
        return self._plan

    def settle(self) -> None:
        """Return when no step is under way, so that weights and state at home are those after the last one.

        While the engine walks for this very caller, whatever runs inside does not wait for it.
        """
        if self._engine is not None and not self._walking:
            try:
                self._engine.settle()
            except BaseException:
                self._engine.recover()
                raise

    def use(self, settings: PlaneAdamW, decays: frozenset[str]) -> None:
        """Step with these settings from now on; weight decay applies to the parameters ``decays``."""
        if (settings, decays) != (self.optimizer, self._decays):
            self.optimizer, self._decays = settings, decays
            self._close_engine()

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

    def stop(self) -> None:
        """End the lanes and take slots out of the modules; the next forward begins anew."""
        self._close_engine()

    def stop_with(self, model: nn.Module) -> None:
        """Stop, and leave every parameter where it stands in ``model`` now.

        Lanes give modules back what these had before, and not what was put in since.
        """
        shown = [(parameters_of(module), dict(parameters_of(module))) for module in model.modules()]
        self.stop()
        for owned, parameters in shown:
            owned.update(parameters)

    def close(self) -> None:
        """End the lanes and give the memory back; the model is left without weights. Idempotent."""
        self._closed = True
        with contextlib.ExitStack() as stack:
            stack.callback(self.session.close)
            if self.records is not None:
                stack.callback(self.records.close)
            self._close_engine()

    def _open_session(self, parts: Split, state: StateLayout) -> Session:
        """Return a session of the model, without an engine."""
        memory, store_dir = self._memory, self._store_dir
        state_bytes = sum(home_bytes(unit, state) for unit in parts.spec.units)
        machine = describe_machine(memory, self._devices, state_bytes, store_dir)
        check_transport(self._transport, machine.devices, machine.home)
        prefix = f"{id(self):x}-"  # other models may be wrapped over the same directory
        store = Store(
            state=state,
            directory=store_dir,
            prefix=prefix,
            transport=self._transport,
            setting="store_dir",
        )
        return Session(parts, machine, memory, store)

    def _move_in(self, model: nn.Module, fill: Fill, moving: Moving | None = None) -> None:
        """Make a home for the parameters that ``model`` has now, and move them there, see `HomeParameters`."""
        dtype, apart = dtype_and_parts(model, *self._codecs)
        with_head = self._with_head is not False
        parts = split(
            model,
            dtype,
            apart=apart,
            with_head=with_head,
            resident=self._resident,
            choice=self._choice,
        )
        state = StateLayout(dtype=parts.spec.dtype, moments=self._moments)
        with contextlib.ExitStack() as stack:
            session = stack.enter_context(self._open_session(parts, state))
            settle = weakly(self.settle)
            carry = None if moving is None else partial(moving.carry, parts)
            parameters = HomeParameters(parts, session.home, fill, state, carry=carry, settle=settle)
            stack.pop_all()
        if parameters.errors:
            _log.info("frozen weights are encoded: %s", summary(parameters.errors))
        self.split, self.state, self.session, self.parameters = parts, state, session, parameters
        self._apart = apart
        self._flags = flags_of(model)
        self._known, self._needed = [], {}
        self._measured = self._plan = self._set_aside = None

    def _move(self, model: nn.Module) -> None:
        """Move to a home for what ``model`` is by now; until the old one is copied both are there.

        Gradients and optimizer state go along.

        Raises:
            BudgetExceededError: the new home does not fit its tier; the old one stays as it was, as after any error.
        """
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
        present = {
            id(p) for p in model.parameters()
        }  # in any order: PEFT's experts change it in their forward
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
        strayed = self.parameters.strayed()
        if strayed is not None:
            raise ModelError(
                f"{strayed} was given other memory than its home's (set_, resize_, swap_tensors): put values in with "
                "copy_, or by parameter.data ="
            )
        return model

    def _is_in_use(self, gone: Set[int]) -> bool:
        """Whether any of the parameters that the model has no longer, by `id`, has a gradient or optimizer state."""
        with plainly():
            gradients = {id(one) for one in self.parameters.named.values() if one.grad is not None}
        stepped = {id(self.parameters.named[name]) for name, count in self.updates.items() if count}
        return bool(gone) and (self.optimizer is not None or bool(gone & (gradients | stepped)))

    def _ready(
        self, inputs: Mapping[str, Any], rows: int, shape: wrap_planning.BatchShape, *, keeps: bool
    ) -> tuple[Engine, Plan]:
        """Return an engine and a plan for microbatches of ``shape``, and for what trains now where ``keeps``."""
        model = self._model()
        assert model is not None
        if shape.in_place and self._with_head is None:
            self._keep_head(model)
        # Without a backward to come it is all the same what trains: adapters that are off do not plan anew.
        if keeps:
            self._make_room(model)
        flags = flags_of(model) if keeps else self._flags
        if flags != self._flags:
            self._close_engine()
            self._known, self._measured, self._needed = [], None, {}
        if self._engine is None:
            self._split_anew(model, flags)
        if not any(known.covers(shape) for known in self._known):
            self.settle()
            forwards = self.session.boundaries.forwards
            former = self._measured
            kind = self._device.type
            try:
                self._measured = wrap_planning.measure(
                    self.split, forwards, inputs, rows, shape, former, kind
                )
            except UnitOrderError as error:
                self._take_turns(model, error)
                return self._ready(inputs, rows, shape, keeps=keeps)
            if self._measured.outside:
                self._keep_resident(model, self._measured.outside)
                return self._ready(inputs, rows, shape, keeps=keeps)
            if shape.training or shape.saving not in self._needed:
                self._needed[shape.saving] = self._measured.needed, self._measured.num_products
                self._shortened_for = None
            self._known.append(shape)
            try:
                self._plan_anew()
            except BaseException:  # what was known to fit still does
                self._measured = former
                self._known.pop()
                raise
        elif self._engine is None:
            self._plan_anew()
        assert self._engine is not None
        assert self._plan is not None
        if not self._transport.is_raw("weights") or self._plan.layout.stays:
            self._note_changes()
        while self._abandoned:  # the collector may add to it meanwhile
            self._engine.forget_saved(self._abandoned.pop())
        if self._shortened_for != shape.saving:
            self._engine.shorten(*self._needed.get(shape.saving, ({}, {})))
            self._shortened_for = shape.saving
        return self._engine, self._plan

    def _note_changes(self) -> None:
        """Have weights encoded anew, and loaded anew where they stay on the device, that somebody else has changed.

        Kernels of torch's fused optimizers leave no mark on what they change: where `outsize.AdamW` does not step,
        anything that trains may be another since the last pass.
        """
        assert self._engine is not None
        for unit in self.split.spec.units:
            versions = self.parameters.version(unit), self.parameters.version(unit, frozen=True)
            former = self._versions.setdefault(unit.index, versions)
            unseen = self.optimizer is None and unit.trainable
            if former != versions or unseen:
                self._versions[unit.index] = versions
                self._engine.weights_changed(unit.index, frozen=former[1] != versions[1])

    def _keep_head(self, model: nn.Module) -> None:
        """From now on the forward takes the weight of the head itself: the head is part of the rest."""
        self._with_head = False
        if not any(unit.kind == "head" for unit in self.split.spec.units):
            return
        _log.info("the forward takes the weight of the head itself: the head stays on the device from now on")
        try:
            self._move(model)
        except BaseException:
            self._with_head = None
            raise

    def _keep_resident(self, model: nn.Module, names: frozenset[str]) -> None:
        """From now on parameters of units that the model's own code computes with are part of the rest."""
        if self.session.machine.num_workers > 1:
            raise ModelError(
                f"{type(model).__name__} computes with {min(names)} outside of its unit, as AdaLoRA does with its "
                "adapters, and each worker has parameters of units apart; use one device"
            )
        heads = {t.name for unit in self.split.spec.units if unit.kind == "head" for t in unit.all_tensors}
        if self._with_head and heads & names:
            raise ModelError(
                f"this forward of {type(model).__name__} takes the weight of the head itself (TRL), which is streamed: "
                'outsize.wrap(..., head="resident")'
            )
        _log.info("%d parameters stay on the device from now on, such as %s", len(names), min(names))
        former, self._resident = self._resident, self._resident | names
        try:
            self._move(model)
        except BaseException:
            self._resident = former
            raise

    def _take_turns(self, model: nn.Module, error: UnitOrderError) -> None:
        """From now on units are in the order in which this forward calls them; what it calls again is no unit.

        Raises:
            ModelError: nothing is left to stream.
        """
        former = self._choice
        if error.calls in former.calls:
            raise error
        self._choice = former.after(error.calls)
        before = {unit.name for unit in self.split.spec.units}
        try:
            self._move(model)
        except BaseException:
            self._choice = former
            raise
        if gone := sorted(before - {unit.name for unit in self.split.spec.units} - {"rest"}):
            _log.warning(
                "%s: %d of its layers stay on the device, such as %s, as forwards call them several times or by turns",
                type(model).__name__,
                len(gone),
                gone[0],
            )
        _log.info("%s", self.split.said())

    def _make_room(self, model: nn.Module) -> None:
        """Move where something trains by now for whose gradient and state the home has no place."""
        names, flags = self.parameters.names, self._flags_now(model)
        if not self.parameters.can_train([names[key] for key, trains in flags.items() if trains]):
            self._move(model)

    def _flags_now(self, model: nn.Module) -> dict[int, bool]:
        """What trains, and what has a gradient though it was frozen since: optimizers of torch step that as well."""
        with plainly():
            waiting = {
                key
                for key, name in self.parameters.names.items()
                if self.parameters.named[name].grad is not None
            }
        return {key: trains or key in waiting for key, trains in flags_of(model).items()}

    def _follow_gradients(self, model: nn.Module) -> None:
        """Have the units of now hold all that has a gradient, before that is clipped or stepped."""
        flags = self._flags_now(model)
        if any(trains and not self._flags[key] for key, trains in flags.items()):
            self._make_room(model)
            self._close_engine()
            self._known, self._needed = [], {}  # the next forward measures anew
            self._split_anew(model, self._flags_now(model))

    def _split_anew(self, model: nn.Module, flags: dict[int, bool]) -> None:
        decays = self._decays
        with _training(model, flags):
            parts = split(
                model,
                self.split.spec.dtype,
                decays=(lambda _: True) if decays is None else decays.__contains__,
                apart=self._apart,
                with_head=self._with_head is not False,
                resident=self._resident,
                choice=self._choice,
            )
        self.session.extend(parts.spec)
        self.parameters.extend(parts.spec)
        self.split, self._flags = parts, flags

    def _plan_anew(self) -> None:
        assert self._measured is not None
        plan = wrap_planning.make_plan(
            self.split,
            self.session.machine,
            self._memory,
            self._measured,
            self.microbatches,
            self._transport,
            self._known,
            self.state,
        )
        set_aside = _SetAside.of(plan, self._measured)
        same, self._set_aside = set_aside == self._set_aside, set_aside
        if self._engine is not None and same:
            self._plan = plan
            self._programs.clear()
            return
        self._close_engine()
        self._plan = plan
        settings = EngineSettings(
            optimizer=self.optimizer or PlaneAdamW(),
            max_grad_norm=float("inf"),
            graph_in_forward=self._measured.graph_matters,
            effects=self._measured.effects,
            num_threads=torch.get_num_threads(),
        )
        engine = self.session.open_engine(self.split, plan, self._measured.boundary_bytes, settings)
        if self.records is not None:
            self.records.planned(plan, self.split.spec, self.session)
        known = {name: n for name, n in self._updates.items() if name in engine.optimizer.updates}
        engine.optimizer.updates.update(known)
        self._shortened_for = None
        self._versions.clear()

    def _close_engine(self) -> None:
        self._programs.clear()
        if self._engine is None:
            return
        try:
            self.settle()
        finally:
            self._remember_updates()
            if self.records is not None:
                self.records.leaving(self._engine)
            self.session.close_engine()

    def _remember_updates(self) -> None:
        if self._engine is not None:
            self._updates.update(self._engine.optimizer.updates)

    def _programs_for(self, plan: Plan, count: int) -> Programs:
        if count not in self._programs:
            kept = tuple(choices[:count] for choices in plan.layout.kept)
            layout = replace(plan.layout, num_microbatches=count, kept=kept)
            passes = cut_step(layout)
            forwards = passes.forward.ops, passes.lean_forward.ops
            warm = [slots_used(Program(forward + passes.backward.ops)) for forward in forwards]
            cold = [slots_used(program) for program in (passes.cold_backward, lean(passes.cold_backward))]
            self._programs[count] = Programs(
                passes,
                warm[0] | warm[1],
                cold[0] | cold[1],
                slots_used(passes.following),
                slots_used(passes.inference),
                count_times_home(passes.backward),
            )
        return self._programs[count]


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


def _close_if_alive(planned: "weakref.ref[Planned]") -> None:
    found = planned()
    if found is not None:
        found.close()
