"""F, FA, FP, FK, FB, R and B: a unit runs on one microbatch, with its weights in a slot."""

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outsize.compat import torch_private
from outsize.errors import ModelError
from outsize.model.sizes.model_spec import ModelSpec
from outsize.model.split import Split
from outsize.model.tiled import chunked_head_loss, chunked_loss_alone, loss_of, shift_labels
from outsize.planner.program.program import Kind, Lane, Op, Program
from outsize.runtime.device.device import Device
from outsize.runtime.forward.binding import Binder, Originals
from outsize.runtime.forward.microbatch import MicrobatchRun
from outsize.runtime.forward.outer_code import OuterForward
from outsize.runtime.forward.saved_tensors import Keeping, Selected
from outsize.runtime.forward.short_recompute import Shortcuts
from outsize.runtime.forward.staged_run import StagedRun
from outsize.runtime.forward.unit_facts import NO_EFFECTS, Needed, SideEffects
from outsize.runtime.forward.unit_state import UnitState, is_watched, seed_generators
from outsize.runtime.ops.context import Microbatch, Naming, StepContext, handles, slots_used
from outsize.runtime.ops.load_ops import WeightOps


@dataclass(frozen=True, slots=True)
class ComputeSettings:
    """What a run asks of its units.

    Attributes:
        programs: of the steps, by turns; they tell which slot each op finds its unit in.
        first_backward: the lowest unit that runs backward; below it nothing trains.
        seed: of the run.
        chunk_tokens: tokens per chunk of head and cross-entropy; None for the model's own loss.
        graph_in_forward: whether F makes a graph, see `Measured.graph_matters`.
        effects: what units do besides returning tensors.
        needed: how far recomputes have to go, see `runtime.forward.short_recompute`.
        num_products: by unit, how many of its products a backward needs; a unit that is not there has all kept by FP.
    """

    programs: tuple[Program, ...]
    first_backward: int
    seed: int
    chunk_tokens: int | None = None
    graph_in_forward: bool = False
    effects: SideEffects = NO_EFFECTS
    needed: Mapping[int, Needed] = field(default_factory=dict)
    num_products: Mapping[int, int] = field(default_factory=dict)


def seed_of(seed: int, step: int, unit: int, microbatch: int, glue: bool) -> int:
    """Seed of the random numbers that one piece of code draws: a hash, so that no schedule can change it."""
    text = f"{seed}/{step}/{unit}/{microbatch}/{int(glue)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


def tracked_units(spec: ModelSpec) -> tuple[bool, ...]:
    """For each streamed unit, whether its outputs can carry a gradient: something trains at or before it."""
    units = spec.units
    rest_trains = units[-1].kind == "rest" and units[-1].trainable
    first = min((unit.index for unit in units[: spec.num_streamed] if unit.trainable), default=len(units))
    return tuple(rest_trains or index >= first for index in range(spec.num_streamed))


@dataclass(frozen=True, slots=True)
class Stage:
    """What a worker of several has of the others: replicas of the units are its own, the model's own code is not.

    Attributes:
        worker: which one it is.
        outer: runs the model's own code between units, for all workers.
        originals: the model's own units, of which this worker runs replicas.
        ends: units behind which the input of the next one is made before it leaves; the head's is made beside the loss.
    """

    worker: int
    outer: OuterForward
    originals: Originals
    ends: frozenset[int]


class ComputeOps:
    """Runs units on microbatches. All its methods are called by one thread, the compute lane's.

    Args:
        split: the units that it runs, of the model or a replica of them.
        forwards: their own forwards.
        binder: puts planes into them.
        device: of the worker.
        weights: owner of the worker's slots.
        settings: see there.
        stage: of several workers; None of a single one.

    Raises:
        ModelError: several workers would have to share what a unit changes.
    """

    def __init__(
        self,
        split: Split,
        forwards: tuple[Callable[..., Any], ...],
        binder: Binder,
        device: Device,
        weights: WeightOps,
        settings: ComputeSettings,
        stage: Stage | None = None,
    ) -> None:
        if stage is not None and settings.effects.state:
            name = split.spec.units[min(settings.effects.state)].name
            raise ModelError(
                f"unit {name} changes state of its own in a forward (buffers, attributes, or what a hook writes), of "
                "which each of several devices would have another: use one device"
            )
        self._stage, self._ends = stage, frozenset[int]() if stage is None else stage.ends
        self._device = device
        self._split = split
        self.shorten(settings.needed, settings.num_products)
        self._settings = settings
        self._slots_used = tuple(slots_used(program) for program in settings.programs)
        kinds = {op.kind for program in settings.programs for op in program}
        self._cut = Kind.FORWARD_BACKWARD not in kinds
        self._weights = weights
        # By unit: the slot that its modules show, and its weights there.
        self._bound: dict[int, tuple[int, tuple[Tensor, ...]]] = {}
        self._forwards = forwards
        self._replicas = [one for unit in split.modules for one in unit.modules()]
        self._version = 0 if stage is None else stage.originals.version
        self._binder = binder
        every = settings.first_backward == 0
        self._tracked = (True,) * len(forwards) if every else tracked_units(split.spec)
        self._runs: set[MicrobatchRun] = set() if stage is None else stage.outer.runs

    @handles(Kind.FORWARD)
    def forward(self, op: Op, context: StepContext) -> None:
        """F: the unit's outputs wait for the next unit."""
        unit, run = self._find(op, context)
        with self._naming(op), self._device.computing():
            run.forward(unit, self._forwards[unit], graph=self._settings.graph_in_forward and context.keeps)
            self._finish_if_cut(op, context, run)
        if unit < self._settings.first_backward or context.alone:
            run.drop(unit)
        self._hand_on(op, unit, run)

    @handles(Kind.FORWARD_KEEP)
    def forward_keep(self, op: Op, context: StepContext) -> None:
        """FK: the same, and the unit's graph waits for its backward, unless it reads weights where they lie now."""
        if op.unit in self._settings.effects.stashes:
            self.forward(op, context)
            return
        unit, run = self._find(op, context)
        planes = {u: self._planes(u) for u in (unit, len(self._forwards)) if u in self._bound}
        keeping = Keeping(planes, self._planes, self._device.look)
        with self._naming(op), self._device.computing():
            run.forward_keep(unit, self._forwards[unit], keeping)
            self._finish_if_cut(op, context, run)

    @handles(Kind.FORWARD_ATTENTION)
    def forward_attention(self, op: Op, context: StepContext) -> None:
        """FA: the unit's outputs wait for the next unit, and what its attention returned for the recompute."""
        self._forward_select(op, context, 0)

    @handles(Kind.FORWARD_PRODUCTS)
    def forward_products(self, op: Op, context: StepContext) -> None:
        """FP: the same, and what its products returned, as far as a backward needs it."""
        self._forward_select(op, context, self._num_products.get(op.unit or 0))

    def _forward_select(self, op: Op, context: StepContext, most_products: int | None) -> None:
        unit, run = self._find(op, context)
        with self._naming(op), self._device.computing():
            run.forward_select(unit, self._forwards[unit], Selected(most_products))
            self._finish_if_cut(op, context, run)
        self._hand_on(op, unit, run)

    def _hand_on(self, op: Op, unit: int, run: MicrobatchRun) -> None:
        """Free the input that has a copy below, and make what a stage hands on."""
        run.leave_below(unit)
        if unit in self._ends:
            with self._naming(op), self._device.computing():
                run.arrive(unit + 1)

    def _finish_if_cut(self, op: Op, context: StepContext, run: MicrobatchRun) -> None:
        """In a step that is cut the model ends behind its last unit, and the caller gets what it returns."""
        if self._cut and op.unit == len(self._forwards) - 1:
            assert op.microbatch is not None
            context.deliver(op.microbatch, run.finish(op.unit))
            self._runs.discard(run)  # from here on it is the context's
            if context.alone:
                run.close()

    @handles(Kind.FORWARD_BACKWARD)
    def forward_backward(self, op: Op, context: StepContext) -> None:
        """FB: the last unit, the loss, and the backward of both; where nothing is kept, the loss alone."""
        unit, run = self._find(op, context)
        assert op.microbatch is not None
        microbatch = context.microbatches[op.microbatch]
        if not context.keeps:
            with self._naming(op), self._device.computing():
                self._tell(op, context, self._loss_alone(run, unit, microbatch))
            self._end(op.microbatch, context)
            return
        with self._naming(op), self._device.computing():
            if self._settings.chunk_tokens is None:
                divisor = microbatch.divisor / context.loss_scale
                loss = run.forward_backward(unit, self._forwards[unit], divisor)
            else:
                loss = self._chunked(run, unit, microbatch, context)
        self._tell(op, context, loss / context.loss_scale)
        if unit == self._settings.first_backward:
            self._end(op.microbatch, context)

    def _tell(self, op: Op, context: StepContext, loss: Tensor) -> None:
        """Others read the loss behind a mark: lanes of another device have waited for no stream of this one."""
        assert op.microbatch is not None
        # A tensor of four bytes that outlives its round would part the heap, which then grows from round to round.
        context.losses[op.microbatch] = loss if self._device.asynchronous else loss.item()
        context.loss_marks[op.microbatch] = self._device.record(Lane("compute", op.worker or 0))

    @handles(Kind.RECOMPUTE)
    def recompute(self, op: Op, context: StepContext) -> None:
        """R: the unit's graph is made and kept for its backward."""
        unit, run = self._find(op, context)
        with self._naming(op), self._device.computing():
            run.recompute(unit, self._forwards[unit])

    @handles(Kind.BACKWARD)
    def backward(self, op: Op, context: StepContext) -> None:
        """B: recompute unless kept, and backward; the passage ends with the lowest unit that runs one."""
        unit, run = self._find(op, context)
        assert op.microbatch is not None
        given = context.output_gradients.pop(op.microbatch, None) if unit == len(self._forwards) - 1 else None
        with self._naming(op), self._device.computing(), self._apart(), context.around_backward():
            if given is not None:
                run.backward_from(*given)
            run.backward(unit, self._forwards[unit])
        if unit == self._settings.first_backward:
            self._end(op.microbatch, context)

    def shorten(self, needed: Mapping[int, Needed], num_products: Mapping[int, int]) -> None:
        """Have recomputes of what begins from now on go as far as ``needed`` says; between programs only.

        ``num_products`` are those of which an FP keeps what they return.
        """
        self._num_products = num_products
        modules = self._split.modules
        self._shortcuts: Shortcuts | None = None
        if needed:
            self._shortcuts = Shortcuts(needed, self._device.look, lambda unit: is_watched(modules[unit]))

    def follow(self) -> None:
        """Be as the model's own units are now, where these are replicas; between programs only.

        Raises:
            ModelError: these were changed in a way that replicas cannot follow.
        """
        if self._stage is None:
            return
        originals = self._stage.originals
        version = originals.version if self._stage.worker else originals.look()
        if version != self._version:
            originals.refresh(self._replicas, self._device.torch_device)
            self._version = version
        for module, replica in zip(originals.modules, self._replicas, strict=True):
            replica.training = module.training

    def begin(self) -> None:
        """Set up the thread that calls all other methods but `follow`."""
        if self._stage is not None:
            self._stage.outer.worker = self._stage.worker

    def close(self) -> None:
        """Unwind every forward that is under way; called by the compute lane's thread when it ends.

        Those of several workers are unwound together, when all lanes have ended, see `OuterForward.close`.
        """
        if self._stage is None:
            for run in self._runs:
                run.close()
            self._runs.clear()

    def _apart(self) -> AbstractContextManager[Any]:
        """Context of a backward.

        In a cut step the caller's own backward waits for it, and keeps autograd's thread of a GPU to itself. On a CPU
        there is no such thread, and a backward that is kept off threads takes a fifth longer.
        """
        if self._cut and self._device.asynchronous:
            return torch.autograd.set_multithreading_enabled(False)
        return nullcontext()

    def let_go(self) -> None:
        """Give the modules their own parameters back; for another thread, while this one has nothing to do."""
        for unit in self._bound:
            self._binder.unbind(self._split.spec.units[unit])
        self._bound.clear()

    def _find(self, op: Op, context: StepContext) -> tuple[int, MicrobatchRun]:
        assert op.unit is not None
        assert op.microbatch is not None
        self._bind(op, context)
        if op.microbatch not in context.runs:
            context.runs[op.microbatch] = self._begin(op.microbatch, context)
        return op.unit, context.runs[op.microbatch]

    def _bind(self, op: Op, context: StepContext) -> None:
        """Show the modules of the op's unit, and of the rest, the slots that the program has put them into."""
        slots = (self._slots_used[context.program] if context.slots is None else context.slots)[op]
        for unit in (op.unit, len(self._forwards)):
            slot = slots.get(unit) if unit is not None else None
            if unit is None or slot is None or (unit in self._bound and self._bound[unit][0] == slot):
                continue
            planes = self._weights.planes(unit, slot)
            self._binder.bind(self._split.spec.units[unit], *planes)
            self._bound[unit] = slot, planes

    def _planes(self, unit: int) -> tuple[Tensor, ...]:
        """The weights of a unit where they lie now."""
        return self._bound[unit][1]

    def _begin(self, microbatch: int, context: StepContext) -> MicrobatchRun:
        # Not `self` and `context`, which hold the run that will hold this.
        seed, step, among_all = self._settings.seed, context.number, context.first_microbatch + microbatch
        drawing, device = context.drawing, self._device.torch_device
        outer = None if self._stage is None else self._stage.outer

        def reseed(unit: int, glue: bool) -> None:
            where = device if outer is None else outer.device()
            if drawing is None:
                seed_generators(where, seed_of(seed, step, unit, among_all, glue))
            else:
                drawing(where, unit, glue)

        given = dict(context.microbatches[microbatch].inputs)
        inputs = torch_private.map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), given)
        if self._settings.chunk_tokens is not None:
            inputs.pop("labels", None)
        tracked = self._tracked if context.keeps else (False,) * len(self._tracked)
        common = self._split.model, inputs, tracked, reseed, context.keeps, context.ambient, self._shortcuts
        effects, state_of = self._settings.effects, self._state_of if context.keeps else None
        if outer is not None:
            run: MicrobatchRun = StagedRun(*common, effects, context.check_settings, outer=outer)
        else:
            run = MicrobatchRun(*common, effects, context.check_settings, state_of)
        self._runs.add(run)
        return run

    def _state_of(self, unit: int) -> tuple[UnitState | None, bool]:
        """The state of a unit that changes any, and whether it leaves tensors there that others go on from.

        Hooks that came after the trial may do both.
        """
        effects, module = self._settings.effects, self._split.modules[unit]
        if unit in effects.state:
            return UnitState(module.modules()), unit in effects.outlets
        return (UnitState(module.modules()), True) if is_watched(module) else (None, False)

    def _end(self, microbatch: int, context: StepContext) -> None:
        run = context.runs.pop(microbatch)
        run.close()
        self._runs.discard(run)

    def _chunked(self, run: MicrobatchRun, unit: int, microbatch: Microbatch, context: StepContext) -> Tensor:
        hidden = run.head_input(unit)
        if math.isinf(microbatch.divisor):  # no target, no gradient: not even zeros, which would be stepped
            run.drop(unit)
            return torch.zeros(())
        targets = shift_labels(microbatch.inputs["labels"].to(hidden.device, non_blocking=True))
        assert self._settings.chunk_tokens is not None
        loss, gradient = chunked_head_loss(
            self._forwards[unit],
            hidden,
            targets,
            microbatch.targets / context.loss_scale,
            self._settings.chunk_tokens,
        )
        run.backward_from_head_input(unit, gradient)
        return loss

    def _loss_alone(self, run: MicrobatchRun, unit: int, microbatch: Microbatch) -> Tensor:
        """Return the loss of a microbatch that no backward follows."""
        if self._settings.chunk_tokens is None:
            run.forward(unit, self._forwards[unit])
            loss = loss_of(run.finish(unit)).detach() / microbatch.divisor
        else:
            hidden = run.head_input(unit)
            targets = shift_labels(microbatch.inputs["labels"].to(hidden.device, non_blocking=True))
            loss = chunked_loss_alone(
                self._forwards[unit], hidden, targets, microbatch.targets, self._settings.chunk_tokens
            )
        return torch.zeros_like(loss) if math.isinf(microbatch.divisor) else loss

    def _naming(self, op: Op) -> Naming:
        assert op.unit is not None
        return Naming(f"{op}, unit {self._split.spec.units[op.unit].name}")
