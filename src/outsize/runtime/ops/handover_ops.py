"""SAVE, FETCH, SEND and RECV between workers: inputs and their gradients, by way of host memory, and PASS and RETURN.

A copy of an input stays there until its last FETCH of the step, which may be the one for its backward. What arrives
lies in fresh memory of the worker; what has left is empty, whoever still refers to it. Inputs may go encoded; a stage's
forward and backward then see the same decoded copy. Their gradients go as they are.

PASS and RETURN copy from one device's memory to another's, as it is. Whoever makes the plan has counted a place there
for each; what has left is empty here, too.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from types import MappingProxyType
from typing import cast

import torch

from outsize.codecs.codec import Codec
from outsize.planner.program.activation_policy import Extent, Kept
from outsize.planner.program.lanes import Lane, lane_of
from outsize.planner.program.ops import Kind, Op
from outsize.planner.program.program import Program
from outsize.runtime.device.device import Device
from outsize.runtime.forward.saved_tensors import bytes_of
from outsize.runtime.forward.staged_run import StagedRun
from outsize.runtime.ops.context import StepContext
from outsize.runtime.ops.encoded_storage import pack, room_for, unpack
from outsize.runtime.ops.handlers import handles
from outsize.runtime.ops.offload_ops import Away, OffloadOps
from outsize.storage.scratch import HostScratch, Scratch

Storage = torch.UntypedStorage
FetchCounts = Counter[tuple[int | None, int | None]]


class HandoverOps(OffloadOps):
    """Moves what a microbatch brings to a stage, and what leaves it, for one worker.

    Args:
        device: of the worker.
        scratch: host memory for what is under way; shared by all workers.
        fetches: how often each input (unit, microbatch) is fetched in a step, for each of the programs that take turns.
        codec: writes inputs that are floating point, where that is shorter; None writes them as they are.
        rooms: as of `OffloadOps`.
        choices: likewise.
        away: likewise.
        devices: of all workers, for what goes there by itself.
        under_way: keys of what is in ``scratch``, shared by all workers.
    """

    def __init__(
        self,
        device: Device,
        scratch: HostScratch,
        fetches: Sequence[FetchCounts],
        codec: Codec | None = None,
        rooms: Mapping[Extent, Scratch] = MappingProxyType({}),
        choices: Kept = (),
        away: Away | None = None,
        devices: Sequence[Device] = (),
        under_way: set[tuple[object, ...]] | None = None,
    ) -> None:
        super().__init__(device, rooms, choices, away)
        self._devices = devices
        self._scratch = scratch
        self._fetches = fetches
        self._codec = codec
        self._under_way: set[tuple[object, ...]] = set() if under_way is None else under_way

    @handles(Kind.SAVE)
    def save(self, op: Op, context: StepContext) -> None:
        """SAVE: the input goes below; the device memory is free afterwards."""
        unit, run = _find(op, context)
        storages = run.input_storages(unit)
        self._put(op, "input", storages, context, run.input_dtypes(unit))
        run.below.add(unit)
        for storage in storages:
            storage.resize_(0)

    @handles(Kind.FETCH)
    def fetch(self, op: Op, context: StepContext) -> None:
        """FETCH: a copy of the input comes up."""
        unit, run = _find(op, context)
        key = (op.unit, op.microbatch)
        context.fetched[key] += not context.alone
        last = context.alone or context.fetched[key] == self._fetches[context.program][key]
        run.replace_input(unit, self._take(op, "input", context, keep=not last))
        if last:
            run.below.discard(unit)

    @handles(Kind.SEND)
    def send(self, op: Op, context: StepContext) -> None:
        """SEND: the gradient of the input goes below."""
        unit, run = _find(op, context)
        self._put(op, "gradient", run.take_gradient(unit), context)

    @handles(Kind.RECV)
    def receive(self, op: Op, context: StepContext) -> None:
        """RECV: the gradient of the input comes up."""
        unit, run = _find(op, context)
        run.put_gradient(unit, self._take(op, "gradient", context, keep=False))

    @handles(Kind.PASS)
    def pass_on(self, op: Op, context: StepContext) -> None:
        """PASS: the input goes to another worker; the device memory is free afterwards."""
        unit, run = _find(op, context)
        storages = run.input_storages(unit)
        arrived = self._cross(op, storages)
        run.replace_input(unit, arrived)
        for storage, copy in zip(storages, arrived, strict=True):
            if copy is not storage:
                storage.resize_(0)

    @handles(Kind.RETURN)
    def give_back(self, op: Op, context: StepContext) -> None:
        """RETURN: the gradient of the input goes to another worker."""
        unit, run = _find(op, context)
        run.put_gradient(unit, self._cross(op, run.take_gradient(unit)))

    def forget(self, number: int) -> None:
        """See `OffloadOps.forget`; what was handed over in that step goes as well."""
        super().forget(number)
        for key in [key for key in self._under_way if key[0] == number]:
            self._under_way.discard(key)
            self._scratch.forget(key)

    def _cross(self, op: Op, storages: list[Storage]) -> list[Storage]:
        """Return copies on the device of the other worker; of what lies there already, that itself.

        So does the gradient of an input, where the backward of the model's own code has put it there.
        """
        assert op.target is not None
        other, lane = self._devices[op.target], lane_of(op)
        found = []
        for storage in storages:
            content = bytes_of(storage)
            if content.device == other.torch_device != self._device.torch_device:
                found.append(storage)
                continue
            arrived = torch.empty(content.nbytes, dtype=torch.uint8, device=other.torch_device)
            with self._device.crossing(content.nbytes):
                arrived.copy_(content, non_blocking=True)
            self.across[op.target] = self.across[op.target].and_then(content.nbytes, content.nbytes)
            self._device.hold(content, lane)
            other.hold(arrived, Lane("compute", op.target))
            found.append(arrived.untyped_storage())
        return found

    def _put(
        self,
        op: Op,
        what: str,
        storages: list[Storage],
        context: StepContext,
        dtypes: Iterable[torch.dtype] | None = None,
    ) -> None:
        """Send storages below; those whose ``dtypes`` are given may go encoded."""
        parcels = context.below[op.unit, op.microbatch, what] = []
        place = context.number, op.unit, op.microbatch, what
        codec = self._codec if dtypes is not None else None
        for index, (storage, dtype) in enumerate(zip(storages, dtypes or repeat(torch.uint8), strict=False)):
            content = bytes_of(storage)
            sent, parcel = pack(codec, content, dtype)
            self._under_way.add((*place, index))
            with self._device.link(sent.nbytes):
                self._scratch.put((*place, index), sent)
            parcels.append(parcel)
            self.down = self.down.and_then(sent.nbytes, content.nbytes)

    def _take(self, op: Op, what: str, context: StepContext, *, keep: bool) -> list[Storage]:
        found = []
        move = self._scratch.read if keep else self._scratch.take
        place = context.number, op.unit, op.microbatch, what
        for index, parcel in enumerate(context.below[op.unit, op.microbatch, what]):
            content = torch.empty(parcel.num_bytes, dtype=torch.uint8, device=self._device.torch_device)
            arrived = room_for(parcel, content)
            with self._device.link(parcel.sent_bytes):
                move((*place, index), arrived)
            if not keep:
                self._under_way.discard((*place, index))
            unpack(self._codec, parcel, arrived, content)
            self.up = self.up.and_then(parcel.sent_bytes, parcel.num_bytes)
            self._device.hold(content, Lane("compute", op.worker))
            found.append(content.untyped_storage())
        return found


def count_fetches(program: Iterable[Op] | Program) -> FetchCounts:
    """How often each input (unit, microbatch) is fetched in ``program``."""
    return Counter((op.unit, op.microbatch) for op in program if op.kind is Kind.FETCH)


def _find(op: Op, context: StepContext) -> tuple[int, StagedRun]:
    assert op.unit is not None
    assert op.microbatch is not None
    return op.unit, cast("StagedRun", context.runs[op.microbatch])
