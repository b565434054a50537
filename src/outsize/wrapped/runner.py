"""What stands behind a wrapped model: its home, its engine, and the passes that the caller's loop asks for.

The story of a step in the caller's loop:

1. ``model(**batch)`` cuts the batch into microbatches and has the engine walk the forward program. The caller gets the
   outputs, with a node of ours for their history.
2. ``loss.backward()`` reaches that node, and the engine walks the backward program. Gradients come home, on top of
   those that are there, and parameters show them as ``.grad``.
3. ``optimizer.step()`` of `outsize.AdamW` submits the STEPs and returns; each unit's next load waits for its own.

Between passes the modules hold the parameters that rest at home; while a pass runs, views of slots.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outsize.config.schema import MemoryConfig
from outsize.errors import ConfigError, ModelError
from outsize.model.split import split
from outsize.model.walk import Boundaries
from outsize.optim.adamw import AdamW
from outsize.planner.cut import Passes, cut_step, step_units, summing
from outsize.planner.plan import Plan
from outsize.planner.program import Program
from outsize.runtime.binding import TORCH_DTYPE
from outsize.runtime.calibrate import Measured
from outsize.runtime.context import Microbatch, StepContext, slots_used
from outsize.runtime.engine import Engine, EngineSettings
from outsize.storage.home import HostHome
from outsize.wrapped import batching, planning
from outsize.wrapped.outputs import Joined, Roots
from outsize.wrapped.parameters import Fill, HomeParameters
from outsize.wrapped.passage import Passage
from outsize.wrapped.tiers import Tiers

DTYPE_NAME = {dtype: name for name, dtype in TORCH_DTYPE.items()}


@dataclass(frozen=True, slots=True)
class _Programs:
    """The passes for a number of microbatches, and where each op finds its units."""

    passes: Passes
    warm_slots: Mapping[Any, Mapping[int, int]]
    cold_slots: Mapping[Any, Mapping[int, int]]
    inference_slots: Mapping[Any, Mapping[int, int]]


class Runner:
    """Streams one model.

    Args:
        model: the model; on return its parameters are those of the home.
        memory: device, budgets and home.
        microbatches: most parts that a batch is cut into.
        store_dir: directory of the disk home.
        fill: copies weights into the home.
    """

    def __init__(
        self, model: nn.Module, memory: MemoryConfig, microbatches: int, store_dir: Path, fill: Fill
    ) -> None:
        self._model = weakref.ref(model)
        self._memory = memory
        self.microbatches = microbatches
        self.optimizer: AdamW | None = None
        self.coefficient: Tensor | None = None
        self._decays: frozenset[str] | None = None
        self._updates: dict[str, int] = {}
        self._engine: Engine | None = None
        self._plan: Plan | None = None
        self._measured: Measured | None = None
        self._known: list[planning.Shape] = []
        self._programs: dict[int, _Programs] = {}
        self._abandoned: list[int] = []
        self._closed = False
        self._num_steps = 0
        self._engine_stack = contextlib.ExitStack()
        self._flags = tuple(p.requires_grad for p in model.parameters())
        self.split = split(model, dtype_of(model))
        with contextlib.ExitStack() as stack:
            self.tiers = stack.enter_context(contextlib.closing(Tiers(self.split.spec, memory, store_dir)))
            self.boundaries = stack.enter_context(Boundaries(self.split.modules))
            self.parameters = HomeParameters(self.split, self.tiers.home, fill)
            stack.enter_context(self.tiers.buffers_of(model))
            stack.callback(self._close_engine)
            self._stack = stack.pop_all()
        self._device = torch.device(self.tiers.machine.device if self.tiers.on_cuda else "cpu")
        self._ids = tuple(id(p) for p in model.parameters())
        at_exit = getattr(threading, "_register_atexit", None)
        if at_exit is not None:  # a script that ends without `unwrap` would wait for the lanes for ever
            at_exit(_close_if_alive, weakref.ref(self))

    # --- passes ---------------------------------------------------------------------------------------------

    def forward(self, inputs: Mapping[str, Any]) -> Any:
        """Run the model forward; the output carries a history where a backward may follow.

        Raises:
            OutsizeError: an op failed, or the plan does not fit; the next call finds everything as before this one.
        """
        model = self._check()
        main = batching.main_input(inputs, getattr(model, "main_input_name", None))
        rows = len(main)
        cached = inputs.get("past_key_values") is not None or bool(inputs.get("use_cache"))
        keeps = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
        if cached and keeps:
            raise ConfigError(
                "a cache of keys and values would be filled again in the recompute of a backward: use torch.no_grad() "
                "with use_cache or past_key_values"
            )
        count = 1 if cached else self.microbatches
        sizes = batching.sizes_of(rows, count)
        engine, plan = self._ready(inputs, rows, planning.shape_of(main, sizes[0]))
        assert self._measured is not None
        parts = batching.cut(inputs, rows, sizes)
        weights = batching.divisors(parts, sizes, self._measured.shifted)
        programs = self._programs_for(plan, len(sizes))
        context = StepContext(
            number=int(torch.randint(2**62, ())) if model.training else 0,
            learning_rate=0.0,
            microbatches=tuple(Microbatch(part, 1.0, 0) for part in parts),
            ambient=_ambient({"cpu", self._device.type}),
            keeps=keeps,
            slots=programs.warm_slots if keeps else programs.inference_slots,
        )
        self._walk(programs.passes.forward if keeps else programs.passes.inference, context)
        joined = self._join([context.outputs.pop(m) for m in range(len(sizes))], sizes, weights)
        if not keeps or not joined.differentiable:
            return joined.build({})
        mark, weights_then = engine.num_submitted, self._weights_now()

        def backward(roots: Roots) -> None:
            if self._weights_now() != weights_then:
                raise ConfigError(
                    "weights have changed between this forward and its backward; run the forward again"
                )
            self._backward(engine, context, roots, warm=engine.num_submitted == mark)

        number = context.number
        abandoned = self._abandoned if plan.layout.offload else []
        return Passage(joined, backward, lambda: abandoned.append(number)).output()

    def _backward(self, engine: Engine, context: StepContext, roots: Roots, warm: bool) -> None:
        model = self._check()
        flags = tuple(p.requires_grad for p in model.parameters())
        if engine is not self._engine or flags != self._flags or self._plan is None:
            raise ConfigError(
                "between this forward and its backward the model was planned anew (a larger batch, other trainable "
                "parameters, another optimizer); run the forward again"
            )
        held = self._held()
        self._take_factors(held)
        if self.coefficient is not None:
            self.apply_coefficient(held)
        programs = self._programs_for(self._plan, len(context.microbatches))
        program = programs.passes.backward if warm else programs.passes.cold_backward
        context.slots = programs.warm_slots if warm else programs.cold_slots
        context.output_gradients = dict(roots)
        context.touched = dict(held)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        try:
            self._walk(summing(program, {unit for unit, positions in held.items() if positions}), context)
        finally:
            for index, positions in context.touched.items():
                self.parameters.show_gradients(self.split.spec.units[index], positions)

    def step(self, lr: float, names: frozenset[str]) -> tuple[str, ...]:
        """Begin the optimizer's step of the parameters ``names``; returns at once.

        Returns:
            Those of them that train and have no gradient.
        """
        model = self._check()
        held = self._held()
        units = self.split.spec.units
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
        if self._engine is None and self._measured is not None:  # the optimizer came after the backward
            self._split_anew(model, tuple(p.requires_grad for p in model.parameters()))
            self._plan_anew()
        if self._engine is None or self._plan is None:
            raise ConfigError(
                "optimizer.step() before the first forward; a step follows a forward and a backward"
            )
        for index in due:
            self.parameters.refresh_masters(units[index])
        self._take_factors(held)
        context = StepContext(number=0, learning_rate=lr, microbatches=(), touched=stepped)
        context.coefficient, self.coefficient = self.coefficient, None
        self._num_steps += 1
        self._engine.submit(step_units(self._plan.layout, due), context)
        return without

    def settle(self) -> None:
        """Return when no step is under way, so that weights and state at home are those after the last one."""
        if self._engine is not None:
            try:
                self._engine.settle()
            except BaseException:
                self._engine.recover()
                raise

    # --- what the optimizer and clipping ask --------------------------------------------------------------------

    def use(self, settings: AdamW, decays: frozenset[str]) -> None:
        """Step with these settings from now on; weight decay applies to the parameters ``decays``."""
        if (settings, decays) != (self.optimizer, self._decays):
            self.optimizer, self._decays = settings, decays
            self._close_engine()

    @property
    def updates(self) -> dict[str, int]:
        """How often each trainable parameter has been stepped."""
        self._remember_updates()
        return dict(self._updates)

    def set_updates(self, updates: Mapping[str, int]) -> None:
        """Go on counting from ``updates``."""
        self._updates.update(updates)
        if self._engine is not None:
            self._engine.optimizer.updates.update(updates)

    def held(self) -> dict[int, frozenset[int]]:
        """Positions of the tensors that have a gradient at home, by unit that trains."""
        self.settle()
        return self._held()

    def stop(self) -> None:
        """End the lanes and take slots out of the modules; the next forward begins anew."""
        self._close_engine()

    def close(self) -> None:
        """End the lanes and give the memory back; the model is left without weights. Idempotent."""
        self._closed = True
        self._stack.close()

    # --- how it is made ready -------------------------------------------------------------------------------------

    def _check(self) -> nn.Module:
        model = self._model()
        if model is None or self._closed:
            raise ConfigError("this model has been unwrapped; wrap it again to stream it")
        ids = tuple(id(p) for p in model.parameters())
        if ids != self._ids:
            raise ModelError(
                "parameters of this model were replaced or added after outsize.wrap; change the model first "
                "(adapters, resized embeddings, tied weights), then wrap it"
            )
        return model

    def _ready(self, inputs: Mapping[str, Any], rows: int, shape: planning.Shape) -> tuple[Engine, Plan]:
        """Return an engine and a plan that are made for microbatches of ``shape`` and for what trains now."""
        model = self._model()
        assert model is not None
        flags = tuple(p.requires_grad for p in model.parameters())
        if flags != self._flags:
            self._close_engine()
            self._known, self._measured = [], None
        if self._engine is None:
            self._split_anew(model, flags)
        if not any(known.covers(shape) for known in self._known):
            self.settle()
            forwards = self.boundaries.forwards
            self._measured = planning.measure(self.split, forwards, inputs, rows, shape, self._measured)
            self._known.append(shape)
            self._plan_anew()
        elif self._engine is None:
            self._plan_anew()
        for number in self._abandoned:
            assert self._engine is not None
            self._engine.forget_saved(number)
        self._abandoned.clear()
        assert self._engine is not None
        assert self._plan is not None
        return self._engine, self._plan

    def _split_anew(self, model: nn.Module, flags: tuple[bool, ...]) -> None:
        decays = self._decays
        parts = split(
            model, self.split.spec.dtype, decays=(lambda _: True) if decays is None else decays.__contains__
        )
        if isinstance(self.tiers.home, HostHome):
            self.tiers.extend(parts.spec)
        elif any(new and not old for new, old in zip(flags, self._flags, strict=True)):
            raise ConfigError(
                'requires_grad_(True) after wrap needs room for optimizer state, which a home="disk" lays out when it '
                'is made; set it before wrap, or use home="host"'
            )
        self.split, self._flags = parts, flags

    def _plan_anew(self) -> None:
        assert self._measured is not None
        plan = planning.make_plan(
            self.split, self.tiers.machine, self._memory, self._measured, self.microbatches
        )
        if self._engine is not None and self._plan is not None and plan.layout == self._plan.layout:
            return
        self._close_engine()
        self._plan = plan
        with contextlib.ExitStack() as stack:
            settings = EngineSettings(
                optimizer=self.optimizer or AdamW(),
                max_grad_norm=float("inf"),
                graph_in_forward=self._measured.graph_matters,
                num_threads=torch.get_num_threads(),
            )
            self._engine = self.tiers.open_engine(
                stack, self.split, self.boundaries, plan, self._measured, settings
            )
            self._engine.optimizer.updates.update(
                {name: n for name, n in self._updates.items() if name in self._engine.optimizer.updates}
            )
            self._engine_stack = stack.pop_all()

    def _close_engine(self) -> None:
        self._programs.clear()
        if self._engine is None:
            return
        with contextlib.suppress(Exception):
            self.settle()
        self._remember_updates()
        self._engine = None
        self._engine_stack.close()

    def _remember_updates(self) -> None:
        if self._engine is not None:
            self._updates.update(self._engine.optimizer.updates)

    def _programs_for(self, plan: Plan, count: int) -> _Programs:
        if count not in self._programs:
            passes = cut_step(replace(plan.layout, num_microbatches=count))
            self._programs[count] = _Programs(
                passes,
                slots_used(Program(passes.forward.ops + passes.backward.ops)),
                slots_used(passes.cold_backward),
                slots_used(passes.inference),
            )
        return self._programs[count]

    def _walk(self, program: Program, context: StepContext) -> None:
        """Have the engine walk ``program``; the caller's random state, and its modules' parameters, are as before."""
        engine = self._engine
        assert engine is not None
        state = torch.get_rng_state()
        cuda_state = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        try:
            engine.submit(program, context)
            engine.settle()
        except BaseException:  # Ctrl-C as well
            engine.recover()
            context.runs.clear()
            raise
        finally:
            engine.let_go()
            torch.set_rng_state(state)
            if cuda_state is not None:
                torch.cuda.set_rng_state(cuda_state, self._device)

    def _held(self) -> dict[int, frozenset[int]]:
        units = self.split.spec.units
        return {unit.index: self.parameters.positions_with_gradient(unit) for unit in units if unit.trainable}

    def _join(self, outputs: list[Any], sizes: tuple[int, ...], weights: tuple[float, ...]) -> Joined:
        joined = Joined(outputs, sizes, weights)
        for leaf in joined.leaves:
            if (
                isinstance(leaf, Tensor) and leaf.is_cuda
            ):  # made on the compute lane's stream, used on the caller's
                leaf.record_stream(torch.cuda.current_stream(self._device))
        return joined

    def _take_factors(self, held: Mapping[int, frozenset[int]]) -> None:
        """Make what torch's clipping has noted on gradients on disk the coefficient of the step."""
        factors = {id(factor): factor for factor in self.parameters.factors.values()}
        units = self.split.spec.units
        names = {units[index].tensors[p].name for index, positions in held.items() for p in positions}
        noted = names & self.parameters.factors.keys()
        self.parameters.factors.clear()
        if not noted:
            return
        if (
            noted != names
            or len({float(factor) for factor in factors.values()}) > 1
            or self.coefficient is not None
        ):
            raise ConfigError(
                "gradients on disk are multiplied by one factor in the step: clip all of them together, once"
            )
        self.coefficient = next(iter(factors.values()))

    def _weights_now(self) -> tuple[int, int]:
        """What tells weights of now from others: steps of ours, and changes in place by anybody else."""
        return self._num_steps, sum(parameter._version for parameter in self.parameters.named.values())

    def apply_coefficient(self, held: Mapping[int, frozenset[int]]) -> None:
        """Multiply the gradients that are held by the coefficient of a clipping that no step has used yet."""
        coefficient, self.coefficient = self.coefficient, None
        if coefficient is None or not any(held.values()):
            return
        if not isinstance(self.tiers.home, HostHome):
            raise ConfigError(
                "backward after clip_grad_norm_ and before step: gradients on disk are clipped in the step"
            )
        for index, positions in held.items():
            if positions:
                self.tiers.home.view(index, "gradient").mul_(coefficient)


def dtype_of(model: nn.Module) -> str:
    """Return the one dtype of the parameters: ``fp32``, ``bf16`` or ``fp16``.

    Raises:
        ModelError: there are several, or another one.
    """
    found = {parameter.dtype for parameter in model.parameters()}
    if len(found) != 1 or not found <= DTYPE_NAME.keys():
        raise ModelError(
            f"the parameters of the model are {', '.join(sorted(map(str, found)))}; outsize.wrap needs one of fp32, "
            "bf16 and fp16 for all of them: convert it first, e.g. with model.to(torch.bfloat16)"
        )
    return DTYPE_NAME[found.pop()]


def _ambient(kinds: set[str]) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes the caller's autocast, which belongs to its thread, for another thread."""
    active = [
        (kind, torch.get_autocast_dtype(kind)) for kind in sorted(kinds) if torch.is_autocast_enabled(kind)
    ]

    def enter() -> AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        for (
            kind,
            dtype,
        ) in active:  # without its cache, which would keep casts of weights that have left their slot
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
        return stack

    return enter if active else contextlib.nullcontext


def _close_if_alive(runner: "weakref.ref[Runner]") -> None:
    found = runner()
    if found is not None:
        found.close()
