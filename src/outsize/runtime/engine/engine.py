"""The engine: a model, a plan, the memory the plan asks for, and lanes that walk its program step after step.

`begin` submits one step; `forward_backward_done` returns when its loss and gradient norm are known. The next step may
begin then: its forward enters while the optimizer still steps the later units of this one, and the hazards of the
program keep every weight exact.
"""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from outsize.model.split import Split
from outsize.model.walk import Boundaries
from outsize.planner.passes.step_parts import build_store, forward_alone
from outsize.planner.program.hazards import Hazards
from outsize.planner.program.program import COMPUTE_KINDS, Kind, Program, lane_of
from outsize.planner.search.step_plan import Plan
from outsize.planner.simulate.simulator import Timeline
from outsize.runtime.engine.executor import Executor, LaneTask, Waiting, release_team
from outsize.runtime.engine.op_handlers import (
    EngineSettings,
    MovedByOp,
    OpRanges,
    handlers_of,
    lane_thread,
    links_of,
    run_on_worker,
    run_op,
)
from outsize.runtime.engine.workers import Resources, make_crew, rule_on, take_step_memory
from outsize.runtime.forward.unit_facts import Needed
from outsize.runtime.ops.activation_ops import ActivationOps
from outsize.runtime.ops.checkpoint_ops import CommitOps, Sink, StoreOps, collector_of
from outsize.runtime.ops.context import Microbatch, Moved, StepContext, arrivals_behind, slots_used
from outsize.runtime.ops.exchange_ops import ExchangeOps, Shared
from outsize.runtime.ops.gradient_ops import GradientOps
from outsize.runtime.ops.link_codecs import encode_weights
from outsize.runtime.ops.load_ops import WeightOps
from outsize.runtime.ops.optimizer_ops import OptimizerOps

# Ops before and after the first unfinished one, in a report.
SHOWN_OPS = 8


@dataclass(slots=True)
class StepHandle:
    """A step under way: what it shares and the tasks of its ops."""

    context: StepContext
    tasks: list[LaneTask]
    decisive: list[LaneTask]


@dataclass(slots=True)
class StoreHandle:
    """A checkpoint under way: who takes the units, the tasks of its STOREs, and those of the step before them."""

    sink: Sink
    tasks: list[LaneTask]
    behind: list[LaneTask]


class Engine:
    """Walks the program of a plan.

    Args:
        split: the model and its units; its boundaries are in place in ``boundaries``.
        boundaries: the units' own forwards.
        plan: memory sizes and the program.
        resources: devices, home and room that the plan asks for.
        settings: the rest.
        shared: the ranks that share the steps; None for a single one.
    """

    def __init__(
        self,
        split: Split,
        boundaries: Boundaries,
        plan: Plan,
        resources: Resources,
        settings: EngineSettings,
        shared: Shared | None = None,
    ) -> None:
        self.plan, self._programs = plan, plan.programs
        self._split = split
        self._settings = settings
        self.num_submitted = 0
        spec, layout, home, host = split.spec, plan.layout, resources.home, resources.host
        host_buffers = host.take_all([plan.host_buffer_bytes] * layout.num_host_buffers, "host buffers")
        self._encoded = encoded = encode_weights(plan.transport, spec, home, host)
        self.exchange = None
        if shared is not None:
            self.exchange = ExchangeOps(spec, shared, home, host_buffers, host, encoded)
        self.optimizer = self._optimizer(resources)
        tiles = self.optimizer.gradient_tiles if layout.ring else ()
        self._crew = make_crew(split, boundaries, plan, resources, host_buffers, settings, encoded, tiles)
        self.accumulators = [plane for worker in self._crew.workers for plane in worker.accumulators]
        slots = [plane for worker in self._crew.workers for plane in worker.slots]
        # Between steps, all of this memory is free for others: whole units are read and written through it.
        self.buffers = (*slots, *self.accumulators, *host_buffers)
        self._storing = self._store_ops(resources, shared)
        self._commits = CommitOps(home, settings.describe)
        self._last: StepHandle | None = None
        self._num_begun = 0
        self.ranges = OpRanges(resources.device.torch_device)
        self._asynchronous = resources.device.asynchronous
        self._arrivals = {}
        if self._asynchronous:
            self._arrivals = {id(program): arrivals_behind(program.ops) for program in self._programs}
        self._links = links_of(self._crew, layout.peers, self.exchange, self.optimizer)
        self._executor = self._open_lanes(resources)

    def _optimizer(self, resources: Resources) -> OptimizerOps:
        spec, plan = self._split.spec, self.plan
        return OptimizerOps(
            spec,
            resources.home,
            rule_on(self._settings.optimizer, plan, resources.device),
            take_step_memory(plan, resources.host),
            # Of several ranks, weights are whole, and encoded, once they are gathered.
            self._encoded if self.exchange is None else None,
            shares=None if self.exchange is None else self.exchange.own,
            state=plan.state,
            seed=self._settings.seed,
        )

    def _store_ops(self, resources: Resources, shared: Shared | None) -> StoreOps:
        spec, plan, home, host = self._split.spec, self.plan, resources.home, resources.host
        num_bytes = plan.store_buffer_bytes
        buffer = host.take(num_bytes, "checkpoint buffer") if num_bytes else None
        collector, beside = None, None
        if shared is not None:
            collector, beside = collector_of(spec, shared, home, plan.state, host)
        return StoreOps(spec, home, self.optimizer, buffer, collector, beside)

    def _open_lanes(self, resources: Resources) -> Executor:
        """Start what runs the ops of a program."""
        layout = self.plan.layout
        hazards = Hazards(layout.num_streamed, layout.rest, at_once=layout.microbatches_at_once)
        # Not bound methods: engine and executor would hold each other, and the slots, until the collector comes by.
        # Weakly: a lane that waits must not keep the model.
        computes = [weakref.ref(worker.compute) for worker in self._crew.workers]
        around = partial(lane_thread, computes, self._settings.num_threads)
        tables = tuple(
            handlers_of(worker, self.optimizer, self._commits, self._storing, self.exchange)
            for worker in self._crew.workers
        )
        turns = [worker.turn for worker in self._crew.workers]
        files = [
            place.tally
            for place in (resources.home, resources.scratch, *resources.rooms.values())
            if place is not None and place.tally is not None
        ]
        rooms = [worker.activations.make_room for worker in self._crew.workers]
        run = partial(run_on_worker, run_op, tables, turns, rooms, self.ranges, MovedByOp(self._links, files))
        return Executor(resources.device, lane_of, run, hazards, around)

    def begin(self, context: StepContext) -> StepHandle:
        """Submit one step, after the decision of the one before; returns at once."""
        programs = self._programs
        release_team()
        context.program = self._num_begun % len(programs)
        self._num_begun += 1
        tasks = self._submit(programs[context.program], context)
        kinds = {Kind.CLIP} if self.plan.layout.clip else COMPUTE_KINDS | {Kind.GRAD, Kind.UPDATE}
        self._last = StepHandle(context, tasks, [task for task in tasks if task.op.kind in kinds])
        return self._last

    def submit(self, program: Program, context: StepContext) -> StepHandle:
        """Submit another program than the plan's, made for the same layout; returns at once."""
        release_team()
        self.num_submitted += 1
        tasks = self._submit(program, context)
        self._last = StepHandle(context, tasks, tasks)
        return self._last

    def _submit(self, program: Program, context: StepContext) -> list[LaneTask]:
        if self._asynchronous:  # other programs than the plan's are made for one call
            context.arrivals = self._arrivals.get(id(program)) or arrivals_behind(program.ops)
        return self._executor.submit(program.ops, context)

    def measure(self, microbatches: tuple[Microbatch, ...]) -> float:
        """Return the loss of ``microbatches``, at most as many as a step has; between steps, of one worker.

        Nothing is kept, and nothing that the steps go by is changed.

        Raises:
            OutsizeError: an op failed.
        """
        count, layout = len(microbatches), self.plan.layout
        choices_by_unit = tuple(choices[:count] for choices in layout.kept)
        program = forward_alone(replace(layout, num_microbatches=count, kept=choices_by_unit))
        context = StepContext(
            number=0, learning_rate=0.0, microbatches=microbatches, keeps=False, slots=slots_used(program)
        )
        last = self._last
        self.submit(program, context)
        self.settle()
        self._last = last
        return context.loss()

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
        for worker in self._crew.workers:
            worker.compute.shorten(needed, num_products)

    def follow(self) -> None:
        """Have units train or evaluate as the model says now; between programs only."""
        for worker in self._crew.workers:
            worker.compute.follow()

    def weights_changed(self, unit: int, *, frozen: bool = True) -> None:
        """Take notice that somebody else has changed the weights of ``unit`` at home; between programs only.

        Args:
            unit: its index.
            frozen: whether those that never train may be among them.
        """
        if self._encoded is not None:
            self._encoded.forget(unit)
        for worker in self._crew.workers if frozen else ():
            worker.weights.forget(unit)

    def let_go(self) -> None:
        """Give the modules their own parameters back until the next op computes; between programs only."""
        self._crew.let_go()

    def recover(self) -> None:
        """After an op has failed: end the lanes, let go of all that was under way, and be ready for another program."""
        self._last = None
        self._executor.close()
        for worker in self._crew.workers:
            worker.weights.forget()
        self._crew.let_go()

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

    def wait(self, tasks: Iterable[LaneTask]) -> None:
        """Return when ``tasks`` are done.

        Raises:
            OutsizeError: an op failed.
        """
        self._executor.wait(tasks)

    def take_timeline(self) -> Timeline:
        """Return what the lanes did since the last call, and forget it."""
        events = self._executor.take_events()
        return Timeline(tuple(sorted(events, key=lambda event: event.start_s)))

    @property
    def num_noted(self) -> int:
        """Ops that have ended since the last `take_timeline`."""
        return self._executor.num_noted

    def waiting(self) -> dict[str, Waiting]:
        """Return for each lane with unfinished work its first unfinished op."""
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
        return {lane: moved() for lane, moved in self._links.items()}

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
    def activations(self) -> ActivationOps:
        """What worker 0 has moved of activations."""
        return self._crew.workers[0].activations
