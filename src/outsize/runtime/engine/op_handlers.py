"""What runs the ops of a worker, and the settings that follow from neither model nor plan."""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function

from outsize.accelerators import vendor_of
from outsize.optim.planes import UpdateRule, WholeRule
from outsize.planner.program.program import COMPUTE_KINDS, Lane, Op, lane_named, lane_of
from outsize.runtime.engine.executor import release_team
from outsize.runtime.forward.unit_facts import Needed, SideEffects
from outsize.runtime.ops.activation_ops import ActivationOps
from outsize.runtime.ops.checkpoint_ops import CommitOps, Describe, StoreOps
from outsize.runtime.ops.compute_ops import ComputeOps
from outsize.runtime.ops.context import HandlerTable, Moved, StepContext, check_complete, handlers_in
from outsize.runtime.ops.exchange_ops import ExchangeOps
from outsize.runtime.ops.gradient_ops import GradientObserver, GradientOps
from outsize.runtime.ops.load_ops import WeightOps
from outsize.runtime.ops.optimizer_ops import OptimizerOps, ResidentOps
from outsize.storage.disk_file import Tally

if TYPE_CHECKING:
    from outsize.runtime.engine.workers import Crew, Worker


# What crosses links in STEPs.
PRODUCTS_WAYS = ("up:products", "down:products")
RunOp = Callable[[HandlerTable, Op, Any], None]
# What a checkpoint computes (checksums, copies into the page cache) takes what the other lanes leave.
STORE_LANE, STORE_NICENESS = "store", 10
check_complete(
    (
        WeightOps,
        GradientOps,
        ComputeOps,
        ActivationOps,
        OptimizerOps,
        ResidentOps,
        CommitOps,
        StoreOps,
        ExchangeOps,
    )
)


class OpRanges:
    """Names of ops in profilers: while it is on, each op of all lanes runs within a range that carries its text.

    The ranges are those of `torch.profiler`, and those of the driver's own profiler, on CUDA NVTX, which Nsight shows.
    Off, an op costs one look at a flag.

    Attributes:
        on: may be switched at any time; ops that are running stay as they began.
    """

    def __init__(self, device: torch.device) -> None:
        self.on = False
        self._driver = vendor_of(device).ranges

    def around(self, op: object) -> contextlib.AbstractContextManager[None]:
        """Return the context that an op runs in; its text is the name of the range."""
        return self._range(str(op)) if self.on else contextlib.nullcontext()

    @contextlib.contextmanager
    def _range(self, name: str) -> Iterator[None]:
        with self._driver(name), record_function(name):
            yield


def handlers_of(
    worker: "Worker",
    optimizer: OptimizerOps,
    commits: CommitOps,
    storing: StoreOps,
    exchange: ExchangeOps | None,
) -> HandlerTable:
    """Return which handler runs an op of ``worker``; of several ranks, ``exchange`` runs those between them."""
    parts = (
        worker.weights,
        worker.gradients,
        worker.compute,
        worker.activations,
        optimizer,
        ResidentOps(worker.gradients, optimizer),
        commits,
        storing,
    )
    return handlers_in(parts if exchange is None else (*parts, exchange))


@contextlib.contextmanager
def lane_thread(
    computes: Sequence[weakref.ref[ComputeOps]], num_threads: int | None, lane: str
) -> Iterator[None]:
    """Set a lane's thread up: its share of cores, and for the compute lane its worker and the end of its coroutines."""
    kind, worker = lane_named(lane).kind, lane_named(lane).worker
    if kind == "compute" and (begun := computes[worker or 0]()) is not None:
        begun.begin()
        del begun
    if num_threads is not None and kind in ("compute", "host"):
        torch.set_num_threads(num_threads)
    if lane == STORE_LANE:
        with contextlib.suppress(OSError):  # on Linux a thread has a niceness of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), STORE_NICENESS)
    try:
        yield
    finally:
        if kind == "compute":
            compute = computes[worker or 0]()
            if compute is not None:
                compute.close()


def run_op(table: HandlerTable, op: Op, context: Any) -> None:
    """Have the handler of an op's kind run it."""
    table[op.kind, op.tile is not None](op, context)


def run_on_worker(
    run: RunOp,
    tables: Sequence[HandlerTable],
    turns: Sequence[contextlib.AbstractContextManager[Any]],
    make_room: Sequence[Callable[[Op, Any], None]],
    ranges: OpRanges,
    counting: "MovedByOp",
    op: Op,
    context: Any,
) -> None:
    """Have an op run by the handlers of its worker, counted and in its turn; then make room for what comes next."""
    worker, computes = op.worker or 0, op.kind in COMPUTE_KINDS
    with ranges.around(op), turns[worker] if computes else contextlib.nullcontext(), counting.of(op, context):
        run(tables[worker], op, context)
    if computes:
        for arrival in context.arrivals.get(op, ()):
            make_room[worker](arrival, context)
    else:
        release_team()


class MovedByOp:
    """Books the bytes that an op has moved on the step that the op belongs to.

    A link's counters change on the lane of the link alone, and a tally holds the bytes of one thread alone, so what
    changed while an op ran is the op's.

    Args:
        links: what has moved over each link, by lane.
        tallies: of the files of the run.
    """

    def __init__(self, links: Mapping[str, Callable[[], Moved]], tallies: Sequence[Tally]) -> None:
        self._links = links
        self._tallies = tallies

    @contextlib.contextmanager
    def of(self, op: Op, context: Any) -> Iterator[None]:
        """Count what moves in the block; a checkpoint, which is no step, is not counted."""
        if not isinstance(context, StepContext):
            yield
            return
        lane = lane_of(op)
        before = self._moved(lane)
        yield
        for crossed, moved in self._moved(lane).items():
            wire, logical = moved.wire - before[crossed].wire, moved.logical - before[crossed].logical
            if wire or logical:
                moved_before = context.moved.get((lane, crossed), Moved())
                context.moved[lane, crossed] = moved_before.and_then(wire, logical)

    def _moved(self, lane: str) -> dict[str, Moved]:
        crossed = PRODUCTS_WAYS if lane == "host" else (lane,)
        moved = {name: self._links[name]() for name in crossed if name in self._links}
        if self._tallies:
            read = sum(tally.read_bytes for tally in self._tallies)
            written = sum(tally.written_bytes for tally in self._tallies)
            moved |= {"disk:read": Moved(read, read), "disk:write": Moved(written, written)}
        return moved


def links_of(
    crew: "Crew", peers: Iterable[tuple[int, int]], exchange: ExchangeOps | None, optimizer: OptimizerOps
) -> dict[str, Callable[[], Moved]]:
    """Return how to ask what has moved over each link, by lane; what STEPs move by its way and ``products``."""

    def up(worker: "Worker") -> Moved:
        summed_on = worker.gradients.bytes_up
        return worker.weights.up.and_then(*worker.activations.up).and_then(summed_on, summed_on)

    def down(worker: "Worker") -> Moved:
        return worker.gradients.down.and_then(*worker.activations.down)

    def across(source: int, target: int) -> Moved:
        return crew.workers[source].activations.across[target]

    counters: dict[str, Callable[[], Moved]] = {}
    for index, worker in enumerate(crew.workers):
        counters |= {Lane("up", index): partial(up, worker), Lane("down", index): partial(down, worker)}
    for source, target in sorted(peers):
        counters[Lane("peer", source, target)] = partial(across, source, target)
    if optimizer.state.products_on_device:
        counters |= dict.fromkeys(PRODUCTS_WAYS, optimizer.products_moved)
    if exchange is not None:
        counters |= {"net:reduce": lambda: exchange.reduced, "net:gather": lambda: exchange.gathered}
    return counters


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of `runtime.engine.engine.Engine`.

    Attributes:
        optimizer: how a parameter steps.
        max_grad_norm: global norm to clip to; infinity only takes the norm.
        skip_nonfinite: skip steps that are not finite instead of raising.
        chunk_tokens: tokens per chunk of the loss; None for the model's own loss.
        seed: of dropout and other randomness.
        graph_in_forward: whether a forward makes a graph, see `Measured.graph_matters`.
        effects: what units do besides returning tensors, see `Measured.effects`.
        needed: how far recomputes have to go, see `Measured.needed`.
        num_products: how many products backwards need, see `Measured.num_products`.
        num_threads: compute threads of each lane that computes.
        draws_random: whether units draw random numbers; several workers then compute one at a time.
        observe_gradient: sees each gradient before it leaves the device.
        describe: what a home that commits is told of each step.
    """

    optimizer: UpdateRule | WholeRule
    max_grad_norm: float
    skip_nonfinite: bool = False
    chunk_tokens: int | None = None
    seed: int = 0
    graph_in_forward: bool = False
    effects: SideEffects = field(default_factory=SideEffects)
    needed: Mapping[int, Needed] = field(default_factory=dict)
    num_products: Mapping[int, int] = field(default_factory=dict)
    num_threads: int | None = None
    draws_random: bool = True
    observe_gradient: GradientObserver | None = None
    describe: Describe = lambda _: {}
