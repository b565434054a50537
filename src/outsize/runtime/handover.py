"""SAVE, FETCH, SEND and RECV between workers: inputs and their gradients, by way of host memory.

A copy of an input stays there until its last FETCH of the step, which may be the one for its backward. What arrives
lies in fresh memory of the worker; what has left is empty, whoever still refers to it.
"""

from collections import Counter
from collections.abc import Iterable
from typing import cast

import torch

from outsize.planner.ops import Kind, Op
from outsize.planner.program import Program
from outsize.runtime.context import StepContext
from outsize.runtime.device import Device
from outsize.runtime.moved import Moved
from outsize.runtime.staged_run import StagedRun, bytes_of
from outsize.storage.scratch import HostScratch

Storage = torch.UntypedStorage
FetchCounts = Counter[tuple[int | None, int | None]]


class HandoverOps:
    """Moves what a microbatch brings to a stage, and what leaves it, for one worker.

    Args:
        device: of the worker.
        scratch: host memory for what is under way; shared by all workers.
        fetches: how often each input (unit, microbatch) is fetched in a step.
    """

    def __init__(self, device: Device, scratch: HostScratch, fetches: FetchCounts) -> None:
        self._device = device
        self._scratch = scratch
        self._fetches = fetches
        self.bytes_up = 0
        self.bytes_down = 0

    @property
    def up(self) -> Moved:
        """What has come up so far; it goes as it is."""
        return Moved(self.bytes_up, self.bytes_up)

    @property
    def down(self) -> Moved:
        """The same on the way down."""
        return Moved(self.bytes_down, self.bytes_down)

    def save(self, op: Op, context: StepContext) -> None:
        """SAVE: the input goes below; the device memory is free afterwards."""
        unit, run = _find(op, context)
        storages = run.input_storages(unit)
        self._put(op, "input", storages, context)
        run.below.add(unit)
        for storage in storages:
            storage.resize_(0)

    def fetch(self, op: Op, context: StepContext) -> None:
        """FETCH: a copy of the input comes up."""
        unit, run = _find(op, context)
        key = (op.unit, op.microbatch)
        context.fetched[key] += 1
        last = context.fetched[key] == self._fetches[key]
        run.replace_input(unit, self._take(op, "input", context, keep=not last))
        if last:
            run.below.discard(unit)

    def send(self, op: Op, context: StepContext) -> None:
        """SEND: the gradient of the input goes below."""
        unit, run = _find(op, context)
        self._put(op, "gradient", run.take_gradient(unit), context)

    def receive(self, op: Op, context: StepContext) -> None:
        """RECV: the gradient of the input comes up."""
        unit, run = _find(op, context)
        run.put_gradient(unit, self._take(op, "gradient", context, keep=False))

    def _put(self, op: Op, what: str, storages: list[Storage], context: StepContext) -> None:
        context.below[op.unit, op.microbatch, what] = [storage.nbytes() for storage in storages]
        for index, storage in enumerate(storages):
            content = bytes_of(storage)
            with self._device.link(content.nbytes):
                self._scratch.put((op.unit, op.microbatch, what, index), content)
            self.bytes_down += content.nbytes
            self._device.hold(content, f"down:w{op.worker}")

    def _take(self, op: Op, what: str, context: StepContext, *, keep: bool) -> list[Storage]:
        found = []
        move = self._scratch.read if keep else self._scratch.take
        for index, num_bytes in enumerate(context.below[op.unit, op.microbatch, what]):
            content = torch.empty(num_bytes, dtype=torch.uint8, device=self._device.torch_device)
            with self._device.link(num_bytes):
                move((op.unit, op.microbatch, what, index), content)
            self.bytes_up += num_bytes
            self._device.hold(content, f"compute:w{op.worker}")
            found.append(content.untyped_storage())
        return found


def count_fetches(program: Iterable[Op] | Program) -> FetchCounts:
    """How often each input (unit, microbatch) is fetched in ``program``."""
    return Counter((op.unit, op.microbatch) for op in program if op.kind is Kind.FETCH)


def _find(op: Op, context: StepContext) -> tuple[int, StagedRun]:
    assert op.unit is not None
    assert op.microbatch is not None
    return op.unit, cast("StagedRun", context.runs[op.microbatch])
