"""What runs the ops of a worker, and what surrounds the thread of a lane."""

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from outsize.planner.program.lanes import lane_named
from outsize.runtime.ops.activation_ops import ActivationOps
from outsize.runtime.ops.checkpoint_ops import StoreOps
from outsize.runtime.ops.commit_ops import CommitOps
from outsize.runtime.ops.compute_ops import ComputeOps
from outsize.runtime.ops.exchange_ops import ExchangeOps
from outsize.runtime.ops.gradient_ops import GradientOps
from outsize.runtime.ops.handlers import HandlerTable, check_complete, handlers_in
from outsize.runtime.ops.load_ops import WeightOps
from outsize.runtime.ops.optimizer_ops import OptimizerOps

if TYPE_CHECKING:
    from outsize.runtime.engine.workers import Worker

# What a checkpoint computes (checksums, copies into the page cache) takes what the other lanes leave.
STORE_LANE, STORE_NICENESS = "store", 10
check_complete(
    (WeightOps, GradientOps, ComputeOps, ActivationOps, OptimizerOps, CommitOps, StoreOps, ExchangeOps)
)


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
