"""The engine: a model, a plan, the memory the plan asks for, and lanes that walk its program step after step.

`begin` submits one step; `forward_backward_done` returns when its loss and gradient norm are known. The next step may
begin then: its forward enters while the optimizer still steps the later units of this one, and the hazards of the
program keep every weight exact.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from outsize.model.split import Split
from outsize.model.walk import Boundaries
from outsize.optim.adamw import AdamW
from outsize.planner.hazards import Hazards
from outsize.planner.lanes import lane_of
from outsize.planner.ops import Kind, Op
from outsize.planner.plan import Plan
from outsize.planner.schedule import build_store
from outsize.planner.timeline import Timeline
from outsize.runtime.activations import ActivationOps
from outsize.runtime.binding import Binder, GradientSums
from outsize.runtime.commits import CommitOps, Describe
from outsize.runtime.compute import ComputeOps, LossSettings
from outsize.runtime.context import StepContext
from outsize.runtime.device import Device
from outsize.runtime.executor import Executor, Task
from outsize.runtime.gradients import GradientObserver, GradientOps
from outsize.runtime.stepping import OptimizerOps
from outsize.runtime.storing import Sink, StoreOps
from outsize.runtime.weights import WeightOps
from outsize.storage.arena import Arena
from outsize.storage.home import DiskHome, HostHome
from outsize.storage.scratch import Scratch

# What a checkpoint computes (checksums, copies into the page cache) takes what the other lanes leave.
STORE_LANE, STORE_NICENESS = "store", 10
# Ops before and after the first unfinished one, in a report.
SHOWN_OPS = 8
# A handler by the kind of an op, and whether it concerns a tile.
HandlerTable = dict[tuple[Kind, bool], Callable[[Op, Any], None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What does not follow from the model, the plan or the machine.

    Attributes:
        optimizer: settings of AdamW.
        max_grad_norm: global norm to clip to; infinity only takes the norm.
        skip_nonfinite: skip steps that are not finite instead of raising.
        chunk_tokens: tokens per chunk of the loss; None for the model's own loss.
        seed: of dropout and other randomness.
        graph_in_forward: whether a forward makes a graph, see `Measured.graph_matters`.
        num_threads: compute threads of each lane that computes.
        observe_gradient: sees each gradient before it leaves the device.
        describe: what a home that commits is told of each step.
    """

    optimizer: AdamW
    max_grad_norm: float
    skip_nonfinite: bool = False
    chunk_tokens: int | None = None
    seed: int = 0
    graph_in_forward: bool = False
    num_threads: int | None = None
    observe_gradient: GradientObserver | None = None
    describe: Describe = lambda _: {}


@dataclass(slots=True)
class StepHandle:
    """A step under way: what it shares and the tasks of its ops."""

    context: StepContext
    tasks: list[Task]
    decisive: list[Task]


class Engine:
    """Walks the program of a plan.

    Args:
        split: the model and its units; its boundaries are in place in ``boundaries``.
        boundaries: the units' own forwards.
        plan: memory sizes and the program.
        device: computes.
        home: weights and optimizer state at rest.
        host: arena of the tier below the device, for buffers between tiers.
        scratch: room for saved activations; None where none are saved.
        settings: the rest.
    """

    def __init__(
        self,
        split: Split,
        boundaries: Boundaries,
        plan: Plan,
        device: Device,
        home: HostHome | DiskHome,
        host: Arena,
        scratch: Scratch | None,
        settings: EngineSettings,
    ) -> None:
        self.plan = plan
        self._split = split
        self._settings = settings
        layout = plan.layout
        slots = [device.allocate(size, "slot") for size in (*layout.slot_bytes, *plan.resident_slot_bytes)]
        sizes = (*layout.accumulator_bytes, *plan.resident_accumulator_bytes)
        self.accumulators = [device.allocate(size, "accumulator") for size in sizes]
        host_buffers = host.take_all([plan.host_buffer_bytes] * layout.num_host_buffers, "host buffers")
        # Between steps, all of this memory is free for others: whole units are read and written through it.
        self.buffers = (*slots, *self.accumulators, *host_buffers)
        tiles = host.take_all([plan.tile_buffer_bytes] * layout.num_tile_buffers, "tile buffers")
        spec = split.spec
        sums = GradientSums()
        self._binder = Binder(split, sums)
        self.weights = WeightOps(spec, device, home, slots, host_buffers)
        self.gradients = GradientOps(
            spec,
            device,
            home,
            sums,
            self.accumulators,
            host_buffers,
            parameter_order={name: i for i, (name, _) in enumerate(split.model.named_parameters())},
            max_grad_norm=settings.max_grad_norm,
            clips=layout.clip,
            skip_nonfinite=settings.skip_nonfinite,
            observe=settings.observe_gradient,
        )
        self.optimizer = OptimizerOps(spec, home, settings.optimizer, tiles, plan.tile_elements)
        store_buffer = (
            host.take(plan.store_buffer_bytes, "checkpoint buffer") if plan.store_buffer_bytes else None
        )
        self._storing = StoreOps(spec, home, self.optimizer, store_buffer)
        self._commits = CommitOps(home, settings.describe)
        self.activations = ActivationOps(device, scratch)
        self._compute = ComputeOps(
            split,
            boundaries.forwards,
            self._binder,
            device,
            LossSettings(settings.chunk_tokens),
            settings.seed,
            plan.program,
            layout.first_backward,
            self.weights,
            settings.graph_in_forward,
        )
        self._last: StepHandle | None = None
        hazards = Hazards(layout.num_streamed, layout.rest)
        # Not bound methods: engine and executor would hold each other, and the slots, until the collector comes by.
        around = partial(_lane_thread, self._compute, settings.num_threads)
        self._executor = Executor(device, lane_of, partial(run_op, self._table()), hazards, around)

    def begin(self, context: StepContext) -> StepHandle:
        """Submit one step; returns at once."""
        tasks = self._executor.submit(self.plan.program.ops, context)
        kinds = {Kind.CLIP} if self.plan.layout.clip else _COMPUTE_KINDS | {Kind.GRAD}
        self._last = StepHandle(context, tasks, [task for task in tasks if task.op.kind in kinds])
        return self._last

    def forward_backward_done(self, handle: StepHandle) -> None:
        """Return when loss and gradient norm of the step are known and the next step may begin.

        Raises:
            OutsizeError: an op failed; no later op has run.
        """
        self._executor.wait(handle.decisive)

    def finish(self, handle: StepHandle) -> None:
        """Return when every op of the step is done.

        Raises:
            OutsizeError: an op failed.
        """
        self._executor.wait(handle.tasks)

    def store(self, sink: Sink) -> list[Task]:
        """Submit a checkpoint of the state after the steps begun so far; returns at once, `wait` for its tasks."""
        return self._executor.submit(build_store(self.plan.layout), sink)

    def wait(self, tasks: Iterable[Task]) -> None:
        """Return when ``tasks`` are done.

        Raises:
            OutsizeError: an op failed.
        """
        self._executor.wait(tasks)

    def take_timeline(self) -> Timeline:
        """Return what the lanes did since the last call, and forget it."""
        events = self._executor.take_events()
        return Timeline(tuple(sorted(events, key=lambda event: event.start_s)))

    def waiting(self) -> dict[str, str]:
        """For each lane with unfinished work: its first unfinished op and what it waits for."""
        return self._executor.waiting()

    def position(self) -> str:
        """The program under way, with an arrow at its first unfinished op; empty between steps."""
        tasks = self._last.tasks if self._last is not None else []
        first = next((index for index, task in enumerate(tasks) if not task.passed()), None)
        if first is None or self._last is None:
            return ""
        done = sum(task.passed() for task in tasks)
        shown = [
            f"{'-->' if index == first else '   '} {index:5d}  {task.op}{'' if not task.passed() else '  done'}"
            for index, task in enumerate(tasks[: first + SHOWN_OPS])
            if index >= first - SHOWN_OPS
        ]
        step = self._last.context.number + 1
        return "\n".join([f"step {step}, {done} of {len(tasks)} ops done", *shown])

    @property
    def num_ended(self) -> int:
        """Ops that have ended, more or less: it is there to be compared with what it was."""
        return self._executor.num_ended

    def give_up(self, error: BaseException) -> None:
        """Begin no more ops; whoever waits gets ``error`` as soon as the ops under way are done."""
        self._executor.fail(error)

    def close(self) -> None:
        """End the lanes and take the parameters out of the model; idempotent."""
        self._executor.close()
        self._binder.close()
        self._last = None

    def _table(self) -> HandlerTable:
        """Which handler runs an op, by its kind and whether it concerns a tile."""
        return {
            (Kind.LOAD, False): self.weights.load,
            (Kind.READ, False): self.weights.read,
            (Kind.FREE, False): _nothing,
            (Kind.ACC, False): self.gradients.accumulate,
            (Kind.FORWARD, False): self._compute.forward,
            (Kind.FORWARD_BACKWARD, False): self._compute.forward_backward,
            (Kind.BACKWARD, False): self._compute.backward,
            (Kind.SAVE, False): self.activations.save,
            (Kind.FETCH, False): self.activations.fetch,
            (Kind.NORM, False): self.gradients.norm,
            (Kind.GRAD, False): self.gradients.bring_home,
            (Kind.WRITE, False): self.gradients.write,
            (Kind.CLIP, False): self.gradients.clip,
            (Kind.STEP, False): self.optimizer.step,
            (Kind.STEP, True): self.optimizer.step,
            (Kind.READ, True): self.optimizer.read,
            (Kind.WRITE, True): self.optimizer.write,
            (Kind.COMMIT, False): self._commits.commit,
            (Kind.STORE, False): self._storing.store,
        }


def run_op(table: HandlerTable, op: Op, context: Any) -> None:
    """Have the handler of an op's kind run it."""
    table[op.kind, op.tile is not None](op, context)


@contextlib.contextmanager
def _lane_thread(compute: ComputeOps, num_threads: int | None, lane: str) -> Iterator[None]:
    """Set a lane's thread up: its share of cores, and for the compute lane the end of its coroutines."""
    if num_threads is not None and lane.startswith(("compute", "host")):
        torch.set_num_threads(num_threads)
    if lane == STORE_LANE:
        with contextlib.suppress(OSError):  # on Linux a thread has a niceness of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), STORE_NICENESS)
    try:
        yield
    finally:
        if lane.startswith("compute"):
            compute.close()


_COMPUTE_KINDS = {Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.BACKWARD}


def _nothing(op: Op, context: StepContext) -> None:
    """FREE concerns the plan of memory only: the slot is a fixed allocation."""
