"""The engine and the plan of a wrapped model as they stand, made anew when what they were made for changes.

A plan is made for the largest microbatch so far, for what trains, and for the settings of the optimizer. The home stays
through all of it.
"""

import contextlib
import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from outsize.compat.torch_private import parameters_of
from outsize.optim.adamw import PlaneAdamW
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
from outsize.wrapped import wrap_planning
from outsize.wrapped.arguments import WrapSettings
from outsize.wrapped.loop_records import Known, LoopRecords
from outsize.wrapped.model_at_home import ModelAtHome, flags_of
from outsize.wrapped.parameters import Fill

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
        draws_random: whether random numbers are drawn, for which several workers take turns.
    """

    layout: StepLayout
    leaving: Kept
    offload_rooms: Mapping[Extent, tuple[int, int]]
    extent_bytes: int
    draws_random: bool

    @classmethod
    def of(cls, plan: Plan, measured: Measured) -> Self:
        """Return what an engine for ``plan`` is made for."""
        leaving = plan.layout.kept if plan.layout.any_leaves else ()
        extent = extent_bytes(plan, measured.boundary_bytes)
        return cls(replace(plan.layout, kept=()), leaving, plan.offload_rooms, extent, measured.draws_random)


class Planned(ModelAtHome):
    """A model in its home, and the engine of now.

    Args:
        model: the model; on return its parameters are those of the home.
        settings: how it is streamed.
        fill: copies weights into the home.

    Attributes:
        microbatches: most parts that a batch is cut into.
        records: writes what the loop does; None where nobody asked.
    """

    def __init__(self, model: nn.Module, settings: WrapSettings, fill: Fill) -> None:
        super().__init__(model, settings)
        self.microbatches = settings.microbatches
        self.records: LoopRecords | None = None
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
        self._walking = False
        self._num_forwards = 0
        self._leaves_state = False  # whether batches go whole, since a forward leaves state on the model
        self._move_in(model, fill)
        if self._memory.home == "auto" and self.session.machine.home == "disk" and any(self._flags.values()):
            _log.warning(
                "the model rests on disk, as it does not fit host_memory: outsize.AdamW(model), and torch.optim.AdamW "
                'as that does, step there (the default of Trainer); others need home="host" and the memory for it'
            )
        self._device = self.session.torch_device
        # The end of a script finds lanes at work; whoever lets go of the model before has ended them by that.
        weakref.finalize(self, _close_if_alive, weakref.ref(self))

    def _leave_state(self, what: str) -> None:
        self._leaves_state = True
        _log.warning(
            "batches go whole, not in %d microbatches: a forward changes %s, which microbatches would take from one "
            "another; return such values instead, or wrap with microbatches=1",
            self.microbatches,
            what,
        )

    def _number(self, model: nn.Module, *, seeded: bool) -> int:
        """What tells a forward from others: what leaves the device goes by it, and perhaps the model's random numbers.

        Where these are not drawn as by the plain model, one number from the caller's generator seeds them, as long as
        the model draws any. So samples drawn between steps are those of the plain loop wherever they can be.
        """
        self._num_forwards += 1
        draws = model.training and (self._measured is None or self._measured.draws_random)
        return int(torch.randint(2**62, ())) if draws and seeded else self._num_forwards

    def _forget_trials(self) -> None:
        self._known, self._needed = [], {}
        self._measured = self._plan = self._set_aside = None

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

    def _ready(
        self, inputs: Mapping[str, Any], rows: int, shape: wrap_planning.BatchShape, *, keeps: bool
    ) -> tuple[Engine, Plan]:
        """Return an engine and a plan for microbatches of ``shape``, and for what trains now where ``keeps``."""
        model = self._model()
        assert model is not None
        if shape.in_place and self._choice.with_head is None:
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
            try:
                self._measured = wrap_planning.measure(
                    self.split, forwards, inputs, rows, shape, former, self.session.machine.devices
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
        layout = self._plan.layout
        if not self._transport.is_raw("weights") or layout.stays or layout.encoded:
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

    def _follow_gradients(self, model: nn.Module) -> None:
        """Have the units of now hold all that has a gradient, before that is clipped or stepped."""
        flags = self._flags_now(model)
        if any(trains and not self._flags[key] for key, trains in flags.items()):
            self._make_room(model)
            self._close_engine()
            self._known, self._needed = [], {}  # the next forward measures anew
            self._split_anew(model, self._flags_now(model))

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
            frozenset(u for u in self.session.home.on_device if self.split.spec.units[u].trainable),
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
            draws_random=self._measured.draws_random,
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


def _close_if_alive(planned: "weakref.ref[Planned]") -> None:
    found = planned()
    if found is not None:
        found.close()
