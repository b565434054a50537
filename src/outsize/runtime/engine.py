"""The engine: a model, a plan, the memory the plan asks for, and lanes that walk its program step after step.

`begin` submits one step; `forward_backward_done` returns when its loss and gradient norm are known. The next step may
begin then: its forward enters while the optimizer still steps the later units of this one, and the hazards of the
program keep every weight exact.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from outsize.model.spec import ITEMSIZE, ModelSpec
from outsize.model.split import Split
from outsize.model.walk import Boundaries
from outsize.optim.adafactor import Adafactor
from outsize.optim.spec import StateLayout
from outsize.optim.update import Rule
from outsize.planner.choice import Extent
from outsize.planner.hazards import Hazards
from outsize.planner.lanes import lane_of
from outsize.planner.ops import COMPUTE_KINDS, Kind, Op
from outsize.planner.plan import Plan
from outsize.planner.program import Program
from outsize.planner.schedule import build_store
from outsize.planner.timeline import Timeline
from outsize.runtime.activations import ActivationOps
from outsize.runtime.binding import TORCH_DTYPE
from outsize.runtime.carriers import encode_weights
from outsize.runtime.collecting import Collector
from outsize.runtime.commits import CommitOps, Describe
from outsize.runtime.compute import ComputeOps
from outsize.runtime.context import StepContext
from outsize.runtime.crew import Worker, make_crew, make_single
from outsize.runtime.device import Device
from outsize.runtime.exchange import ExchangeOps, Shared
from outsize.runtime.executor import Executor, Task
from outsize.runtime.gradients import GradientObserver, GradientOps
from outsize.runtime.handover import HandoverOps
from outsize.runtime.moved import Moved
from outsize.runtime.net_codec import Residuals
from outsize.runtime.ranges import OpRanges
from outsize.runtime.shortcut import Needed
from outsize.runtime.staged_compute import StagedComputeOps
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
RunOp = Callable[[HandlerTable, Op, Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What does not follow from the model, the plan or the machine.

    Attributes:
        optimizer: how a parameter steps.
        max_grad_norm: global norm to clip to; infinity only takes the norm.
        skip_nonfinite: skip steps that are not finite instead of raising.
        chunk_tokens: tokens per chunk of the loss; None for the model's own loss.
        seed: of dropout and other randomness.
        graph_in_forward: whether a forward makes a graph, see `Measured.graph_matters`.
        needed: how far recomputes have to go, see `Measured.needed`.
        num_products: how many products backwards need, see `Measured.num_products`.
        num_threads: compute threads of each lane that computes.
        draws_random: whether units draw random numbers; workers that share a generator then compute one at a time.
        observe_gradient: sees each gradient before it leaves the device.
        describe: what a home that commits is told of each step.
    """

    optimizer: Rule | Adafactor
    max_grad_norm: float
    skip_nonfinite: bool = False
    chunk_tokens: int | None = None
    seed: int = 0
    graph_in_forward: bool = False
    needed: Mapping[int, Needed] = field(default_factory=dict)
    num_products: Mapping[int, int] = field(default_factory=dict)
    num_threads: int | None = None
    draws_random: bool = True
    observe_gradient: GradientObserver | None = None
    describe: Describe = lambda _: {}


@dataclass(slots=True)
class StepHandle:
    """A step under way: what it shares and the tasks of its ops."""

    context: StepContext
    tasks: list[Task]
    decisive: list[Task]


@dataclass(slots=True)
class StoreHandle:
    """A checkpoint under way: who takes the units, the tasks of its STOREs, and those of the step before them."""

    sink: Sink
    tasks: list[Task]
    behind: list[Task]


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
        rooms: for what forwards keep that leaves the device, by its extent.
        shared: the ranks that share the steps; None for a single one.
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
        rooms: Mapping[Extent, Scratch] = MappingProxyType({}),
        shared: Shared | None = None,
    ) -> None:
        self.plan = plan
        self._split = split
        self._settings = settings
        self.num_submitted = 0
        layout = plan.layout
        host_buffers = host.take_all([plan.host_buffer_bytes] * layout.num_host_buffers, "host buffers")
        scratch_bytes = 4 * plan.state.scratch_elements(split.spec)
        scratches = host.take_all([scratch_bytes] * plan.state.num_scratches, "optimizer scratch")
        tiles = host.take_all([plan.tile_buffer_bytes] * layout.num_tile_buffers, "tile buffers")
        store_buffer = (
            host.take(plan.store_buffer_bytes, "checkpoint buffer") if plan.store_buffer_bytes else None
        )
        spec = split.spec
        encoded = encode_weights(plan.transport, split.spec, home, host)
        self.exchange = None
        if shared is not None:
            self.exchange = ExchangeOps(spec, shared, home, host_buffers, host, encoded)
        self.optimizer = OptimizerOps(
            spec,
            home,
            settings.optimizer,
            tiles,
            plan.tile_elements,
            encoded if shared is None else None,  # weights are whole, and encoded, once they are gathered
            own=None if self.exchange is None else self.exchange.own,
            former=None if self.exchange is None else self.exchange.former,
            state=plan.state,
            seed=settings.seed,
            scratches=[scratch.view(torch.float32) for scratch in scratches],
        )
        crew = make_crew if layout.stages is not None else make_single
        self._crew = crew(
            split,
            boundaries,
            plan,
            device,
            home,
            host_buffers,
            scratch,
            rooms,
            settings,
            encoded,
            self.optimizer.gradient_tiles if layout.ring else (),
        )
        self.accumulators = [plane for worker in self._crew.workers for plane in worker.accumulators]
        slots = [plane for worker in self._crew.workers for plane in worker.slots]
        # Between steps, all of this memory is free for others: whole units are read and written through it.
        self.buffers = (*slots, *self.accumulators, *host_buffers)
        collector, beside = None, None
        if shared is not None:
            residuals = None if self.exchange is None else self.exchange.residuals
            collector, beside = _collector(spec, shared, home, plan.state, host, residuals)
        self._storing = StoreOps(spec, home, self.optimizer, store_buffer, collector, beside)
        self._commits = CommitOps(home, settings.describe)
        self._last: StepHandle | None = None
        self._num_begun = 0
        self._skipped: set[int] = set()
        hazards = Hazards(layout.num_streamed, layout.rest, feedback=plan.wire.feedback)
        # Not bound methods: engine and executor would hold each other, and the slots, until the collector comes by.
        computes = [worker.compute for worker in self._crew.workers]
        around = partial(_lane_thread, computes, settings.num_threads)
        tables = tuple(self._table(worker) for worker in self._crew.workers)
        self.ranges = OpRanges(nvtx=device.torch_device.type == "cuda")
        self._executor = Executor(
            device, lane_of, partial(_on_worker, run_op, tables, self.ranges), hazards, around
        )

    def begin(self, context: StepContext) -> StepHandle:
        """Submit one step, after the decision of the one before; returns at once."""
        programs = self.plan.programs
        if self._last is not None and self._last.context.skipped:
            self._skipped.add(self._last.context.number)
        context.skipped_before = self._skipped
        context.program = self._num_begun % len(programs)
        self._num_begun += 1
        tasks = self._executor.submit(programs[context.program].ops, context)
        kinds = {Kind.CLIP} if self.plan.layout.clip else COMPUTE_KINDS | {Kind.GRAD}
        self._last = StepHandle(context, tasks, [task for task in tasks if task.op.kind in kinds])
        return self._last

    def submit(self, program: Program, context: StepContext) -> StepHandle:
        """Submit another program than the plan's, made for the same layout; returns at once."""
        self.num_submitted += 1
        tasks = self._executor.submit(program.ops, context)
        self._last = StepHandle(context, tasks, tasks)
        return self._last

    def settle(self) -> None:
        """Return when the program submitted last is done.

        Raises:
            OutsizeError: an op failed.
        """
        if self._last is not None:
            self._executor.wait(self._last.tasks)
            self._last = None

    def forget_saved(self, number: int) -> None:
        """Free what was saved of activations for the step of that number, and will not be fetched."""
        for worker in self._crew.workers:
            worker.activations.forget(number)

    def shorten(self, needed: Mapping[int, Needed], num_products: Mapping[int, int]) -> None:
        """Have recomputes of what begins from now on go as far as ``needed`` says; between programs only.

        See `EngineSettings` for both.
        """
        self._crew.workers[0].compute.shorten(needed, num_products)

    def let_go(self) -> None:
        """Give the modules their own parameters back until the next op computes; between programs only."""
        self._crew.workers[0].compute.let_go()

    def recover(self) -> None:
        """After an op has failed: end the lanes, let go of all that was under way, and be ready for another program."""
        self._last = None
        self._executor.close()
        self._crew.workers[0].compute.let_go()

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

    def store(self, sink: Sink) -> StoreHandle:
        """Submit a checkpoint of the state after the steps begun so far; returns at once, `wait` for its tasks."""
        behind = self._last.tasks if self._last is not None else []
        return StoreHandle(sink, self._executor.submit(build_store(self.plan.layout), sink), behind)

    def store_rest(self, handle: StoreHandle) -> None:
        """After an op has failed: run the STOREs that were skipped, if the state that they store is there.

        It is where all ops of the step before had ended well. A later step has not changed it: its STEP of a unit waits
        for the unit's STORE, and once an op has failed none begins.

        Raises:
            OutsizeError: another op failed.
        """
        self.recover()
        if all(task.done for task in handle.behind):
            skipped = [task.op for task in handle.tasks if not task.done]
            self._executor.wait(self._executor.submit(skipped, handle.sink))

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
        """Ops that have ended, and progress within ops; it is there to be compared with what it was."""
        return self._executor.num_ended

    def note_progress(self) -> None:
        """Say that an op which takes long is getting on; for whoever watches `num_ended`."""
        self._executor.num_ended += 1

    def give_up(self, error: BaseException) -> None:
        """Begin no more ops; whoever waits gets ``error`` as soon as the ops under way are done."""
        self._executor.fail(error)

    def close(self) -> None:
        """End the lanes and take the parameters out of the model; idempotent."""
        self._executor.close()
        self._crew.close()
        self._last = None

    def moved(self) -> dict[str, Moved]:
        """What went up to workers, down from them, and out to other ranks so far, by lane."""
        found: dict[str, Moved] = {}
        for index, worker in enumerate(self._crew.workers):
            summed_on = worker.gradients.bytes_up
            ups = (worker.weights.up, worker.activations.up, Moved(summed_on, summed_on))
            found[f"up:w{index}"] = Moved(*(sum(each) for each in zip(*ups, strict=True)))
            downs = (worker.gradients.down, worker.activations.down)
            found[f"down:w{index}"] = Moved(*(sum(each) for each in zip(*downs, strict=True)))
        for source, target in sorted(self.plan.layout.peers):
            found[f"peer:w{source}-w{target}"] = self._crew.workers[source].activations.across
        if self.exchange is not None:
            found |= {"net:reduce": self.exchange.reduced, "net:gather": self.exchange.gathered}
        return found

    def link_bytes(self) -> dict[str, int]:
        """Bytes that went over links so far, by lane."""
        return {lane: moved.wire for lane, moved in self.moved().items()}

    @property
    def weights(self) -> WeightOps:
        """LOADs of worker 0."""
        return self._crew.workers[0].weights

    @property
    def gradients(self) -> GradientOps:
        """Gradients of worker 0."""
        return self._crew.workers[0].gradients

    @property
    def num_let_go(self) -> int:
        """How often what a forward had kept had no room below its device, so that it is recomputed."""
        return sum(worker.activations.num_let_go for worker in self._crew.workers)

    @property
    def activations(self) -> ActivationOps | HandoverOps:
        """What worker 0 has moved of activations."""
        return self._crew.workers[0].activations

    def _table(self, worker: Worker) -> HandlerTable:
        """Which handler runs an op, by its kind and whether it concerns a tile."""
        table: HandlerTable = {
            (Kind.LOAD, False): worker.weights.load,
            (Kind.READ, False): worker.weights.read,
            (Kind.FREE, False): _nothing,
            (Kind.ACC, False): worker.gradients.accumulate,
            (Kind.SUM, False): worker.gradients.sum_on,
            (Kind.FORWARD, False): worker.compute.forward,
            (Kind.FORWARD_ATTENTION, False): worker.compute.forward_attention,
            (Kind.FORWARD_PRODUCTS, False): worker.compute.forward_products,
            (Kind.FORWARD_KEEP, False): worker.compute.forward_keep,
            (Kind.FORWARD_BACKWARD, False): worker.compute.forward_backward,
            (Kind.BACKWARD, False): worker.compute.backward,
            (Kind.SAVE, False): worker.activations.save,
            (Kind.FETCH, False): worker.activations.fetch,
            (Kind.OFFLOAD, False): worker.activations.offload,
            (Kind.ONLOAD, False): worker.activations.onload,
            (Kind.NORM, False): worker.gradients.norm,
            (Kind.GRAD, False): worker.gradients.bring_home,
            (Kind.GRAD, True): worker.gradients.to_ring,
            (Kind.WRITE, False): worker.gradients.write,
            (Kind.CLIP, False): worker.gradients.clip,
            (Kind.STEP, False): self.optimizer.step,
            (Kind.STEP, True): self.optimizer.step,
            (Kind.READ, True): self.optimizer.read,
            (Kind.WRITE, True): self.optimizer.write,
            (Kind.COMMIT, False): self._commits.commit,
            (Kind.STORE, False): self._storing.store,
        }
        if self.exchange is not None:
            table[Kind.REDUCE, False] = self.exchange.reduce
            table[Kind.AGREE, False] = self.exchange.agree
            table[Kind.GATHER, False] = self.exchange.gather
        if isinstance(worker.compute, StagedComputeOps) and isinstance(worker.activations, HandoverOps):
            table[Kind.RECOMPUTE, False] = worker.compute.recompute
            table[Kind.SEND, False] = worker.activations.send
            table[Kind.RECV, False] = worker.activations.receive
            table[Kind.PASS, False] = worker.activations.pass_on
            table[Kind.RETURN, False] = worker.activations.give_back
        return table


def _collector(
    spec: ModelSpec,
    shared: Shared,
    home: HostHome | DiskHome,
    state: StateLayout,
    host: Arena,
    residuals: Residuals | None,
) -> tuple[Collector, torch.Tensor]:
    """Return what brings shares of all ranks to a checkpoint, and room for the weights beside a piece."""
    numel = shared.staging.stored_elements
    beside = host.take(numel * ITEMSIZE[spec.dtype], "network").view(TORCH_DTYPE[spec.dtype])
    piece = host.take(numel * 4, "network").view(torch.float32)
    halves = host.take(shared.staging.halves, "network") if shared.staging.halves else None
    return Collector(spec, shared.group, home, state, piece, halves, residuals), beside


def run_op(table: HandlerTable, op: Op, context: Any) -> None:
    """Have the handler of an op's kind run it."""
    table[op.kind, op.tile is not None](op, context)


def _on_worker(run: RunOp, tables: Sequence[HandlerTable], ranges: OpRanges, op: Op, context: Any) -> None:
    with ranges.around(op) if ranges.on else contextlib.nullcontext():
        run(tables[op.worker or 0], op, context)


@contextlib.contextmanager
def _lane_thread(computes: list[ComputeOps], num_threads: int | None, lane: str) -> Iterator[None]:
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
            computes[int(lane.rpartition(":w")[2])].close()


def _nothing(op: Op, context: StepContext) -> None:
    """FREE concerns the plan of memory only: the slot is a fixed allocation."""
