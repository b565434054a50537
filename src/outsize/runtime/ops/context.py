"""State that the ops of a step share, and the method that runs each op."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from outsize.accelerators import catch_up
from outsize.errors import ModelError, OutsizeError, model_raised
from outsize.planner.program.program import COMPUTE_KINDS, Kind, Op, Program
from outsize.planner.program.table import ROWS
from outsize.runtime.forward.microbatch import Ambient, MicrobatchRun
from outsize.runtime.forward.unit_state import States, random_states, set_random_states


class Moved(NamedTuple):
    """Bytes so far.

    Attributes:
        wire: that went over the link.
        logical: of elements as they are used, before codecs.
    """

    wire: int = 0
    logical: int = 0

    def and_then(self, wire: int, logical: int) -> "Moved":
        """Return the sum with what moved since."""
        return Moved(self.wire + wire, self.logical + logical)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One microbatch and its share of the loss.

    Attributes:
        inputs: keyword arguments of the model's forward.
        divisor: what the model's own (mean) loss of this microbatch is divided by, so that microbatches add up to the
            token-weighted mean over the batch: targets in the batch / targets in this microbatch.
        targets: targets in the whole batch, the divisor of a summed loss.
    """

    inputs: Mapping[str, Any]
    divisor: float
    targets: int


class Drawing:
    """Lets pieces of a forward draw where the piece before stopped, and a piece that runs again what it drew at first.

    So do pieces on several devices, each of which has a generator of its own.

    Args:
        device: whose generators the first piece goes on from.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: dict[tuple[int, bool], States] = {}

    def __call__(self, device: torch.device, unit: int, glue: bool) -> None:
        """Have what runs next on ``device`` draw: a unit, or the code before it."""
        if (unit, glue) not in self._states:
            self._states[unit, glue] = self.states()
            moves, self._device = device != self._device, device
            if not moves:
                return
        set_random_states(device, self._states[unit, glue])

    def states(self) -> States:
        """Return where the piece that was first to run last has stopped."""
        return random_states(self._device)


@dataclass(slots=True)
class StepContext:
    """One step of training.

    Attributes:
        number: step of the run, from 0; seeds randomness.
        learning_rate: of this step.
        tokens: trained tokens of the step.
        loss_scale: what losses are multiplied by before the backward (fp16), 1.0 otherwise.
        microbatches: in order; none once all are computed and the loss is known.
        runs: passages under way, by microbatch.
        losses: loss of each microbatch, unscaled, in order of completion; they add up to the loss of the step. Of an
            accelerator they are tensors there, which wait for their marks, of a processor numbers.
        loss_marks: of the work that these losses come from; none where work is done when it returns.
        norms: gradient norms by unit, one for each tensor that received a gradient.
        squares: of several ranks, sums of squares of this one's share of the summed gradients by unit, fp64 [tensors].
        touched: positions of the tensors that received a gradient, by unit.
        gradient_norm: global norm before clipping, after CLIP; None where clipping is off.
        coefficient: what gradients are multiplied by before the update; None for nothing.
        agreed_loss: of all ranks together, as soon as they have agreed; None before, and of a single rank.
        first_microbatch: number of this rank's first microbatch among those of all ranks; seeds randomness.
        unit_clips: norm and coefficient of each unit that is clipped by its own norm, where they were taken.
        unit_coefficients: these coefficients on the host, once the gradient has left.
        skipped: whether CLIP decided that this step changes no weight.
        program: which of the programs that take turns this step follows.
        brought: how often the gradient of each unit has come home; in stages, once for every round.
        fetched: how often the input of each unit for each microbatch has been fetched.
        ambient: what code of the model runs in: the caller's autocast, say, which a thread has for itself.
        drawing: has code of the model draw random numbers where the generators are, as a plain forward does; None where
            each piece of it has a seed.
        keeps: whether a backward will follow; without one nothing is kept of a forward.
        again: whether that backward will run this forward again, so that nothing is kept of it either.
        arrivals: see `arrivals_behind`; none where nothing is enqueued.
        slots: see `slots_used`, where the program is not the plan's own.
        times_home: how often the gradient of each unit comes home, likewise.
        deliver: called with each microbatch's number and what the model returned for it, where the step is cut; by
            several workers in any order, and at a time.
        output_gradients: where the backward of a step that is cut starts from: roots and their gradients.
        moved: bytes that the step's ops have moved so far, by lane and what they crossed: the lane's link, or
            ``disk:read`` and ``disk:write``; each lane writes its own entries.
        stale: what the caller has set otherwise since the forward; empty for nothing.
        around_backward: makes what its backward runs in.
    """

    number: int
    learning_rate: float
    microbatches: tuple[Microbatch, ...]
    tokens: int = 0
    loss_scale: float = 1.0
    runs: dict[int, MicrobatchRun] = field(default_factory=dict)
    losses: dict[int, Tensor | float] = field(default_factory=dict)
    loss_marks: dict[int, Any] = field(default_factory=dict)
    norms: dict[int, Tensor] = field(default_factory=dict)
    squares: dict[int, Tensor] = field(default_factory=dict)
    touched: dict[int, frozenset[int]] = field(default_factory=dict)
    gradient_norm: float | None = None
    coefficient: Tensor | None = None
    agreed_loss: float | None = None
    first_microbatch: int = 0
    unit_clips: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    unit_coefficients: dict[int, Tensor] = field(default_factory=dict)
    skipped: bool = False
    program: int = 0
    brought: Counter[int] = field(default_factory=Counter)
    fetched: Counter[tuple[int | None, int | None]] = field(default_factory=Counter)
    ambient: Ambient = nullcontext
    drawing: Drawing | None = None
    keeps: bool = True
    again: bool = False
    arrivals: Mapping[Op, Sequence[Op]] = field(default_factory=dict)
    slots: Mapping[Op, Mapping[int, int]] | None = None
    times_home: Mapping[int, int] | None = None
    deliver: Callable[[int, Any], None] = lambda *_: None
    output_gradients: dict[int, tuple[list[Any], list[Tensor]]] = field(default_factory=dict)
    moved: dict[tuple[str, str], Moved] = field(default_factory=dict)
    stale: str = ""
    around_backward: Ambient = nullcontext

    @property
    def alone(self) -> bool:
        """Whether nothing that runs now is kept for a backward."""
        return self.again or not self.keeps

    def check_settings(self) -> None:
        """Raise a `ModelError` where the caller has set layers otherwise since the forward."""
        if self.stale:
            raise ModelError(
                f"{self.stale} was set otherwise between this forward and its backward, which recomputes layers: go "
                "backward first, or set activations=keep"
            )

    def bytes_moved(self) -> dict[str, Moved]:
        """Return what has moved so far, by what it crossed: ``up:w0``, ``net:reduce`` or ``disk:read``."""
        moved_by_lane: dict[str, Moved] = {}
        for (_, crossed), moved in dict(self.moved).items():
            moved_by_lane[crossed] = moved_by_lane.get(crossed, Moved()).and_then(*moved)
        return moved_by_lane

    def norm(self) -> float:
        """Global norm of the gradients before clipping, once all backwards have run; NaN where no norms are taken."""
        if self.gradient_norm is not None:
            return self.gradient_norm
        norms = [norm[at] for unit, norm in self.norms.items() for at in sorted(self.touched[unit])]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else float("nan")

    def coefficient_of(self, unit: int) -> Tensor | None:
        """What the gradient of ``unit`` is multiplied by before its update; None for nothing."""
        return self.unit_coefficients.get(unit, self.coefficient)

    def loss(self) -> float:
        """Loss of the step, once all is computed: of each microbatch by its targets; of all ranks once they agree."""
        if self.agreed_loss is not None:
            return self.agreed_loss
        for mark in filter(None, self.loss_marks.values()):
            mark.synchronize()
        for device in {loss.device for loss in self.losses.values() if isinstance(loss, Tensor)}:
            catch_up(device)
        losses = (self.losses[m] for m in sorted(self.losses))
        return sum(loss.item() if isinstance(loss, Tensor) else loss for loss in losses)


def slots_used(program: Program) -> dict[Op, dict[int, int]]:
    """For each F, FB, R and B of ``program``: the slot of each unit that lies with its worker at that point."""
    slots: defaultdict[int | None, dict[int, int]] = defaultdict(dict)
    distinct: dict[frozenset[tuple[int, int]], dict[int, int]] = {}  # few, for the many ops of a step
    slots_by_op: dict[Op, dict[int, int]] = {}
    for op in program.ops:
        if op.unit is None:
            continue
        if op.kind is Kind.LOAD and op.slot is not None:
            slots[op.worker][op.unit] = op.slot
        elif op.kind is Kind.FREE:
            slots[op.worker].pop(op.unit, None)
        elif op.kind in COMPUTE_KINDS:
            there = slots[op.worker]
            slots_by_op[op] = distinct.setdefault(frozenset(there.items()), dict(there))
    return slots_by_op


def arrivals_behind(ops: Iterable[Op]) -> dict[Op, list[Op]]:
    """For each F, FB, R and B of ``ops``: what comes up to its worker before the next one there.

    What stands behind something that leaves is not among it: its memory may be that, which is not free yet.
    """
    arrivals: defaultdict[Op, list[Op]] = defaultdict(list)
    computed: dict[int | None, Op] = {}
    for op in ops:
        if op.kind in COMPUTE_KINDS:
            computed[op.worker] = op
        elif op.kind in (Kind.SAVE, Kind.OFFLOAD, Kind.SEND):
            computed.pop(op.worker, None)
        elif op.kind in (Kind.FETCH, Kind.ONLOAD, Kind.RECV) and op.worker in computed:
            arrivals[computed[op.worker]].append(op)
    return dict(arrivals)


# By the verb, and whether the op is about a tile.
HandlerKey = tuple[Kind, bool]
HandlerTable = dict[HandlerKey, Callable[[Op, Any], None]]
_Method = TypeVar("_Method", bound=Callable[..., None])
# By class, as it is imported: its methods that run ops.
_HANDLERS: defaultdict[str, dict[HandlerKey, str]] = defaultdict(dict)


def handles(kind: Kind, *, tile: bool = False) -> Callable[[_Method], _Method]:
    """Register a method as the handler of ops of ``kind``; an override in a subclass replaces the handler.

    Args:
        kind: the verb.
        tile: whether it runs those of a tile, or those that are not.
    """

    def mark(method: _Method) -> _Method:
        owner, _, name = f"{method.__module__}.{method.__qualname__}".rpartition(".")
        _HANDLERS[owner][kind, tile] = name
        return method

    return mark


def handled_by(cls: type) -> dict[HandlerKey, str]:
    """Return the names of the methods of ``cls`` that run ops."""
    owners = (f"{parent.__module__}.{parent.__qualname__}" for parent in cls.__mro__)
    return {key: name for owner in owners for key, name in _HANDLERS.get(owner, {}).items()}


def handlers_in(parts: Iterable[object]) -> HandlerTable:
    """Return which method of ``parts`` runs an op."""
    return {key: getattr(part, name) for part in parts for key, name in handled_by(type(part)).items()}


def check_complete(classes: Iterable[type]) -> None:
    """Check that every op has a handler among the methods of ``classes``.

    Raises:
        TypeError: none says that it runs an op.
    """
    handled = {key for cls in classes for key in handled_by(cls)}
    missing = [row.text for row in ROWS if (row.kind, "tile" in row.fields) not in handled]
    if missing:
        raise TypeError(f"no method is marked as the one that runs {', '.join(missing)}")


# What a device raises under whatever code runs there: the machine's, not the model's.
_OF_DEVICES = (torch.AcceleratorError, torch.OutOfMemoryError)


class Naming:
    """Says in which op and unit the model's own code raised."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, (OutsizeError, *_OF_DEVICES)):
            advice = "; set train.deterministic=false" if "deterministic implementation" in str(error) else ""
            text = f"the model raised in {self._where}: {type(error).__name__}: {error}{advice}"
            raise model_raised(text, error) from error
