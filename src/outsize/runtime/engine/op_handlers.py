"""Who runs an op: by its kind and whether it concerns a tile; and what surrounds the thread of a lane."""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from outsize.planner.program.ops import Kind, Op
from outsize.runtime.ops.checkpoint_ops import StoreOps
from outsize.runtime.ops.commit_ops import CommitOps
from outsize.runtime.ops.compute_ops import ComputeOps
from outsize.runtime.ops.context import StepContext
from outsize.runtime.ops.exchange_ops import ExchangeOps
from outsize.runtime.ops.handover_ops import HandoverOps
from outsize.runtime.ops.optimizer_ops import OptimizerOps
from outsize.runtime.ops.stage_compute_ops import StagedComputeOps

if TYPE_CHECKING:
    from outsize.runtime.engine.workers import Worker

# What a checkpoint computes (checksums, copies into the page cache) takes what the other lanes leave.
STORE_LANE, STORE_NICENESS = "store", 10
HandlerTable = dict[tuple[Kind, bool], Callable[[Op, Any], None]]


def handlers_of(
    worker: "Worker",
    optimizer: OptimizerOps,
    commits: CommitOps,
    storing: StoreOps,
    exchange: ExchangeOps | None,
) -> HandlerTable:
    """Return which handler runs an op of ``worker``; of several ranks, ``exchange`` runs those between them."""
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
        (Kind.STEP, False): optimizer.step,
        (Kind.STEP, True): optimizer.step,
        (Kind.READ, True): optimizer.read,
        (Kind.WRITE, True): optimizer.write,
        (Kind.COMMIT, False): commits.commit,
        (Kind.STORE, False): storing.store,
    }
    if exchange is not None:
        table[Kind.REDUCE, False] = exchange.reduce
        table[Kind.AGREE, False] = exchange.agree
        table[Kind.GATHER, False] = exchange.gather
    if isinstance(worker.compute, StagedComputeOps) and isinstance(worker.activations, HandoverOps):
        table[Kind.RECOMPUTE, False] = worker.compute.recompute
        table[Kind.SEND, False] = worker.activations.send
        table[Kind.RECV, False] = worker.activations.receive
        table[Kind.PASS, False] = worker.activations.pass_on
        table[Kind.RETURN, False] = worker.activations.give_back
    return table


@contextlib.contextmanager
def lane_thread(
    computes: Sequence[weakref.ref[ComputeOps]], num_threads: int | None, lane: str
) -> Iterator[None]:
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
            compute = computes[int(lane.rpartition(":w")[2])]()
            if compute is not None:
                compute.close()


def _nothing(op: Op, context: StepContext) -> None:
    """FREE concerns the plan of memory only: the slot is a fixed allocation."""
