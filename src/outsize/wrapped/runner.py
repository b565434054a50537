"""What stands behind a wrapped model: the passes that the caller's loop asks for.

The story of a step in the caller's loop:

1. ``model(**batch)`` cuts the batch into microbatches and has the engine walk the forward program. The caller gets the
   outputs, with a node of ours for their history. Where there is no room for what all of them keep, the first round
   keeps it, and the others nothing.
2. ``loss.backward()`` reaches that node, and the engine walks the backward program, in which later rounds go forward
   once more. Gradients come home, on top of those that are there, and parameters show them as ``.grad``.
3. ``optimizer.step()`` of `outsize.AdamW` submits the STEPs and returns; each unit's next load waits for its own.

Between passes the modules hold the parameters that rest at home; while a pass runs, views of slots.
"""

import contextvars
import gc
import logging
import weakref
from collections.abc import Mapping, Set
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outsize.compat.torch_private import attention_kernels, has_gradient_hooks
from outsize.errors import ConfigError, ModelError
from outsize.inference.loader import Caller
from outsize.model.shared_memory import check_apart
from outsize.model.walk import Modes
from outsize.optim.optimizer_spec import GRADIENT
from outsize.planner.passes import step_parts
from outsize.planner.program.program import Program
from outsize.planner.search.step_plan import Plan
from outsize.runtime.engine.engine import Engine
from outsize.runtime.forward.unit_state import (
    LayerSettings,
    LeftState,
    UnitState,
    random_states,
    set_random_states,
    untouched,
    watching,
)
from outsize.runtime.ops.context import Drawing, Microbatch, StepContext
from outsize.wrapped import batching, loop_records, wrap_planning
from outsize.wrapped.arguments import WrapSettings
from outsize.wrapped.batching import InputGradients, check_call, check_returns, inputs_that_train
from outsize.wrapped.inferring import Inferring, without_cache
from outsize.wrapped.model_at_home import flags_of
from outsize.wrapped.outputs import AutogradBridge, Joined, Roots, is_pending
from outsize.wrapped.parameters import Fill
from outsize.wrapped.planned import Programs

_log = logging.getLogger(__name__)


class Runner(Inferring):
    """Streams one model; arguments as of `Planned`."""

    def __init__(self, model: nn.Module, settings: WrapSettings, fill: Fill) -> None:
        super().__init__(model, settings, fill)
        self._caller = Caller(*(each.torch_device for each in self.session.machine.devices.each))
        self._num_steps = 0
        self._uncut: set[frozenset[str]] = set()  # names of inputs that cannot be cut into microbatches
        self._set_by_passes: set[tuple[Any, str]] = set()  # of layers, see `LayerSettings`
        self._leaves_nothing: int | None = None  # hooks and mode in which layers left none, see `watching`
        self._saving: weakref.ref[AutogradBridge] | None = None  # the last one whose inputs left the device
        self._keeping: weakref.ref[AutogradBridge] | None = None  # the last one that kept more than inputs

    def forward(self, inputs: Mapping[str, Any]) -> Any:
        """Run the model forward; the output carries a history where a backward may follow.

        Raises:
            OutsizeError: an op failed, or the plan does not fit; the next call finds everything as before this one.
        """
        model = self._check()
        with without_cache(model, inputs):
            alone = self.microbatches == 1 or self._leaves_state
            return self._forward(model, inputs) if alone else self._forward_alike(model, inputs)

    def _forward_alike(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """Run the model forward in microbatches; where these leave state on it, undo that, and have the batch go whole.

        What is made once, in the first call or with the longest sequence, is there in the second attempt. Layers are
        looked at once for the hooks and the mode of now; the code around them always.
        """
        sign, moves = watching(model), self.session.machine.num_workers > 1

        def state_of_now() -> LeftState:
            inside = {id(each) for unit in self.split.modules for each in unit.modules()}
            known = self._leaves_nothing == sign
            modules = [each for each in model.modules() if not known or id(each) not in inside]
            return LeftState(modules, self._device, moves=moves, first=self._leaves_nothing is None)

        before = state = state_of_now()
        for _ in range(2):
            try:
                output, error = self._forward(model, inputs), None
            except ModelError as raised:
                output, error = None, raised
            left = None if self._leaves_state else state.changed()  # the batch went whole already
            if left is None and error is not None:
                raise error
            if left is None:
                self._leaves_nothing = sign
                return output
            del output
            if is_pending(self._saving):
                gc.collect()  # there is no room for two forwards, and an output may hold itself
            before.undo_tensors()
            state = state_of_now()
        before.undo()
        self._leave_state(str(left))
        return self._forward(model, inputs)

    def _forward(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        main = batching.main_input(inputs, getattr(model, "main_input_name", None))
        rows = len(main)
        cached = inputs.get("past_key_values") is not None or bool(inputs.get("use_cache"))
        into_inputs = torch.is_grad_enabled() and bool(inputs_that_train(inputs))
        trains = any(p.requires_grad for p in model.parameters())
        keeps = into_inputs or (torch.is_grad_enabled() and trains)
        check_call(model, inputs, cached=cached, keeps=keeps)
        if self.session.machine.num_workers > 1:
            check_returns(model, inputs, into_inputs=into_inputs)
        modes = replace(Modes.of_now(), grad=True)
        sizes, engine, plan = self._ready_for(inputs, main, modes, keeps=keeps, whole=cached)
        assert self._measured is not None
        saves = keeps and (bool(plan.layout.offload) or plan.layout.stages is not None)
        lean = is_pending(self._keeping)  # what is kept has room for one forward
        leaves = saves or (keeps and not lean and plan.layout.any_leaves)
        if saves and is_pending(self._saving):
            raise ConfigError(
                "inputs that are saved off the device have room for one forward at a time: run the backward of the one "
                "before, or wrap the model for one device, with more device_memory or offload=False"
            )
        arriving = InputGradients(inputs if into_inputs else {}, batching.cut(inputs, rows, sizes))
        parts = arriving.parts
        programs = self._programs_for(plan, len(sizes))
        joined = Joined(sizes, batching.divisors(parts, sizes, self._measured.shifted))
        context = StepContext(
            number=self._number(model, seeded=len(sizes) > 1),
            learning_rate=0.0,
            microbatches=tuple(Microbatch(part, 1.0, 0) for part in parts),
            ambient=replace(modes, variables=tuple(contextvars.copy_context().items())).around,
            drawing=Drawing(self._device) if len(sizes) == 1 else None,
            keeps=keeps,
            slots=programs.warm_slots if keeps else programs.inference_slots,
            times_home=programs.times_home,
            deliver=joined.add,
        )
        runs_again = [model] if programs.passes.following.ops else self.split.modules
        layers = [each for unit in runs_again if keeps for each in unit.modules()]
        settings = LayerSettings(layers, self._set_by_passes)
        self._walk_forward(programs, context, joined, lean=lean)
        settings.end_pass()
        joined.end(self._caller.take)
        if not keeps or not joined.differentiable:
            if leaves:
                self._abandoned.append(context.number)
            return joined.build({})
        abandoned = self._abandoned if leaves else []
        tokens = batching.num_targets(parts, sizes, self._measured.shifted)
        passage = self._passage(
            engine, context, joined, abandoned, arriving, settings, lean=lean, tokens=tokens
        )
        if saves:
            self._saving = weakref.ref(passage)
        if not lean and plan.layout.keeps_any:
            self._keeping = weakref.ref(passage)
        return passage.output()

    def _ready_for(
        self, inputs: Mapping[str, Any], main: Tensor, modes: Modes, *, keeps: bool, whole: bool
    ) -> tuple[tuple[int, ...], Engine, Plan]:
        """Return the rows of each microbatch, an engine and a plan for them; a batch that cannot be cut goes whole."""
        model = self._check()

        def ready(count: int) -> tuple[tuple[int, ...], Engine, Plan]:
            sizes = batching.sizes_of(len(main), count)
            training = keeps and model.training
            shape = wrap_planning.shape_of(main, sizes[0], inputs, modes, training=training)
            return sizes, *self._ready(inputs, len(main), shape, keeps=keeps)

        form = frozenset(name for name, value in inputs.items() if isinstance(value, Tensor))
        if whole or form in self._uncut or self.microbatches == 1 or self._leaves_state:
            return ready(1)
        try:
            found = ready(self.microbatches)
            crossing = "" if self._measured is None else self._measured.effects.crosses
            if not crossing or len(main) == 1:
                return found
            self._leave_state(f"{crossing}, with which its code goes on behind a layer")
            return ready(1)
        except ModelError:
            found = ready(1)  # images of several rows lie in one tensor, say
        _log.info("a batch of %s goes whole: it does not run cut into microbatches", ", ".join(sorted(form)))
        self._uncut.add(form)
        return found

    def _walk_forward(self, programs: Programs, context: StepContext, joined: Joined, *, lean: bool) -> None:
        """Have the model run forward on all microbatches, all rounds but the first to be run again."""
        passes = programs.passes
        if not context.keeps:
            self._walk(passes.inference, context, drawing=context.drawing)
            return
        self._walk(passes.lean_forward if lean else passes.forward, context, drawing=context.drawing)
        if passes.following.ops:
            again = partial(joined.add, again=True)
            slots = programs.following_slots
            self._walk(
                passes.following, replace(context, again=True, slots=slots, deliver=again, runs={}, moved={})
            )

    def _passage(
        self,
        engine: Engine,
        context: StepContext,
        joined: Joined,
        abandoned: list[int],
        inputs: InputGradients,
        settings: LayerSettings,
        *,
        lean: bool,
        tokens: int,
    ) -> AutogradBridge:
        """Return what the caller's backward will come to; without one, its number goes to ``abandoned``."""
        mark, weights_then = engine.num_submitted, self._weights_now()
        kernels = attention_kernels()

        def backward(roots: Roots, loss: Tensor | None) -> None:
            self.parameters.bring_links()  # what was changed in tensors that were assigned
            if self._weights_now() != weights_then:
                raise ConfigError("weights have changed between this forward and its backward; run it again")
            context.around_backward = replace(Modes.of_now(), grad=True).around
            with self.parameters.hooks_run(), kernels:
                self._backward(engine, context, roots, settings, warm=engine.num_submitted == mark, lean=lean)
            settings.end_pass()
            self.parameters.show_links(GRADIENT)
            if self.records is not None and tokens:
                self.records.scored(loss, tokens)

        number = context.number
        # Autograd would run hooks on gradients that it does not see.
        trained = [p for p in self.parameters.named.values() if p.requires_grad and not has_gradient_hooks(p)]
        return AutogradBridge(joined, backward, lambda: abandoned.append(number), trained, inputs)

    def _backward(
        self,
        engine: Engine,
        context: StepContext,
        roots: Roots,
        settings: LayerSettings,
        *,
        warm: bool,
        lean: bool,
    ) -> None:
        model = self._check()
        if engine is not self._engine or flags_of(model) != self._flags or self._plan is None:
            raise ConfigError(
                "between this forward and its backward the model was planned anew (a larger batch, other trainable "
                "parameters, another optimizer); run the forward again"
            )
        held = self._held()
        if any(held.values()) and self.split.spec.dtype != "fp32":
            batching.say_once("gradients of several backwards are summed in fp32, not in the weights' dtype")
        self.parameters.multiply_gradients(list(self.parameters.factors))
        programs = self._programs_for(self._plan, len(context.microbatches))
        warm = warm and not programs.passes.following.ops
        program = programs.passes.backward if warm else programs.passes.cold_backward
        program = step_parts.lean(program) if lean else program
        context.slots = programs.warm_slots if warm else programs.cold_slots
        gradients = context.output_gradients = roots.waiting()

        def deliver(microbatch: int, output: Any) -> None:
            found = roots.again(microbatch, output)
            if found[0]:
                gradients[microbatch] = found

        context.deliver = deliver
        context.touched = dict(held)
        try:
            going_on = {unit for unit, positions in held.items() if positions}
            with ExitStack() as stack:
                stack.enter_context(without_cache(model, context.microbatches[0].inputs))
                context.stale = settings.changed()
                if programs.passes.following.ops:  # later rounds go forward once more, and count nothing
                    context.check_settings()
                    stack.enter_context(untouched(UnitState(model.modules())))
                self._walk(step_parts.summing(program, going_on), context)
        finally:
            for index, positions in context.touched.items():
                self.parameters.show_gradients(self.split.spec.units[index], positions)

    def step(self, lr: float, names: frozenset[str]) -> tuple[str, ...]:
        """Begin the optimizer's step of the parameters ``names``; returns at once, unless a program holds what changes.

        Returns:
            Those of them that train and have no gradient.
        """
        model = self._check()
        self._follow_gradients(model)
        held, units = self._held(), self.split.spec.units
        stepped = {
            index: frozenset(p for p in positions if units[index].tensors[p].name in names)
            for index, positions in held.items()
        }
        without = tuple(
            tensor.name
            for index, positions in held.items()
            for position, tensor in enumerate(units[index].tensors)
            if tensor.trainable and tensor.name in names and position not in positions
        )
        due = {index for index, positions in stepped.items() if positions}
        if not due:
            return without
        if self._engine is None and self._measured is not None:  # the optimizer came after the backward, say
            self._split_anew(model, self._flags_now(model))
            self._plan_anew()
        if self._engine is None or self._plan is None:
            raise ConfigError(
                "optimizer.step() before the first forward, or before the first since parameters were added or thawed "
                "between backward and step: call the model once more, under torch.no_grad() if you like, then step"
            )
        for index in due:
            self.parameters.refresh_masters(units[index])
        context = StepContext(number=0, learning_rate=lr, microbatches=(), touched=stepped)
        due_names = {units[index].tensors[p].name for index, positions in stepped.items() for p in positions}
        context.coefficient = self._take_coefficient(due_names)
        self._num_steps += 1
        if self.records is not None:
            self.records.counts(context)
        self._caller.finish()  # gradients of what is resident may be on their way
        self._engine.submit(step_parts.step_units(self._plan.layout, due), context)
        if self.parameters.handed_out.is_held() or self.parameters.links:
            self.settle()
            for plane in self.state.planes.keys() - {GRADIENT}:
                self.parameters.show_links(plane)
        return without

    def held(self) -> dict[int, frozenset[int]]:
        """Positions of the tensors that have a gradient at home, by unit that trains."""
        self._follow_gradients(self._check())
        self.settle()
        return self._held()

    def _walk(self, program: Program, context: StepContext, *, drawing: Drawing | None = None) -> None:
        """Have the engine walk ``program``; the modules' parameters are as before, and generators but for ``drawing``.

        Lanes read what the caller's stream may still be making: inputs on their way, gradients of outputs.
        """
        engine = self._engine
        assert engine is not None
        self._caller.finish()
        devices = [each.torch_device for each in self.session.machine.devices.each]
        states = {device: random_states(device) for device in devices}
        self._walking = True
        try:
            with nullcontext() if self.records is None else self.records.passing(engine, context):
                engine.follow()
                engine.submit(program, context)
                engine.settle()
            if engine.num_noted > loop_records.MOST_EVENTS:  # nobody has asked for long
                engine.take_timeline()
            if drawing is not None:
                states[self._device] = drawing.states()
        except BaseException:  # Ctrl-C as well
            engine.recover()
            context.runs.clear()
            if context.keeps:  # what waits below the device for a backward that will not end
                engine.forget_saved(context.number)
            if self.session.machine.num_workers > 1:
                self._close_engine()  # with it alone ends what their threads have begun
            raise
        finally:
            self._walking = False
            engine.let_go()
            for device in reversed(states):  # the first is the caller's, and has the CPU's of the call
                set_random_states(device, states[device])

    def _held(self) -> dict[int, frozenset[int]]:
        units = self.split.spec.units
        held = {unit.index: self.parameters.positions_with_gradient(unit) for unit in units if unit.trainable}
        check_apart(self.parameters.gradients() if self.parameters.links else {}, "gradients")
        return held

    def _take_coefficient(self, names: Set[str]) -> Tensor | None:
        """Return what all gradients of ``names`` are yet to be multiplied by; where that differs, multiply them."""
        first, *others = [self.parameters.factors.get(name) for name in names] or [None]
        if first is not None and all(f is not None and torch.equal(f, first) for f in others):
            return first
        self.parameters.multiply_gradients(names)
        return None

    def _weights_now(self) -> tuple[int, int]:
        """What tells weights of now from others: steps of ours, and changes in place by anybody else."""
        return self._num_steps, self.parameters.version_of_all
