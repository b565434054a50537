"""OFFLOAD and ONLOAD: what the forward of a unit kept leaves the device, and comes back for its backward.

It comes back to the worker that runs the op, which need not be the one it left.
"""

from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType

import torch

from outsize.planner.program.activation_policy import Extent, Kept
from outsize.planner.program.lanes import Lane
from outsize.planner.program.ops import Kind, Op
from outsize.runtime.device.device import Device
from outsize.runtime.device.moved_bytes import Moved
from outsize.runtime.forward.microbatch import MicrobatchRun
from outsize.runtime.forward.saved_tensors import bytes_of
from outsize.runtime.ops.context import StepContext
from outsize.runtime.ops.handlers import handles
from outsize.storage.scratch import Scratch

Key = tuple[int, int, int]
"""Number of a step, unit, microbatch."""
Away = dict[Key, tuple[Scratch, list[int]]]
"""What is below the device: where, and the bytes of each part."""


class OffloadOps:
    """Moves what forwards kept, for one worker.

    Args:
        device: of the worker.
        rooms: where it goes, by its extent.
        choices: what becomes of it, by unit and microbatch of a round.
        away: what is below the workers, shared by all of them; None for a single one.

    Attributes:
        num_let_go: how often what a forward had kept had no room, so that it is recomputed.
        up: what has come up so far.
        down: what has gone down.
        across: what has gone to each other worker.
    """

    def __init__(
        self,
        device: Device,
        rooms: Mapping[Extent, Scratch] = MappingProxyType({}),
        choices: Kept = (),
        away: Away | None = None,
    ) -> None:
        self._device = device
        self._rooms = rooms
        self._choices = choices
        self._away: Away = {} if away is None else away
        self.num_let_go = 0
        self.up = self.down = Moved()
        self.across: defaultdict[int, Moved] = defaultdict(Moved)

    @property
    def bytes_up(self) -> int:
        """That came up over the link."""
        return self.up.wire

    @property
    def bytes_down(self) -> int:
        """Bytes sent down the link."""
        return self.down.wire

    @handles(Kind.OFFLOAD)
    def offload(self, op: Op, context: StepContext) -> None:
        """OFFLOAD: what the forward kept, device → its room; the device memory is free afterwards."""
        key, run = key_of(op, context)
        held = run.held(key[1])
        if held is None:
            return
        choices = self._choices[key[1]]
        extent = choices[key[2] % len(choices)].extent
        assert extent is not None
        room = self._rooms[extent]
        contents = [bytes_of(storage) for storage in held.storages()]
        if not room.holds(*contents):  # it is measured on shorter sequences, and on other experts
            run.let_go(key[1])
            self.num_let_go += 1
            return
        sizes = [content.nbytes for content in contents]
        with self._device.link(sum(sizes)):
            room.put(key, *contents)
        self._away[key] = room, sizes
        self.down = self.down.and_then(sum(sizes), sum(sizes))
        held.take()

    @handles(Kind.ONLOAD)
    def onload(self, op: Op, context: StepContext) -> None:
        """ONLOAD: its room → device."""
        key, run = key_of(op, context)
        held = run.held(key[1])
        if held is None or key not in self._away:
            return
        room, sizes = self._away[key]
        device = self._device.torch_device
        contents = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        with self._device.link(sum(sizes)):
            room.take(key, *contents)
        del self._away[key]  # what fails before this can be forgotten
        self.up = self.up.and_then(sum(sizes), sum(sizes))
        for content in contents:
            self._device.hold(content, Lane("compute", op.worker))
        held.put(content.untyped_storage() for content in contents)

    def forget(self, number: int) -> None:
        """Free what left for the step of that number and will not come back."""
        for key in [key for key in self._away if key[0] == number]:
            self._away.pop(key)[0].forget(key)


def key_of(op: Op, context: StepContext) -> tuple[Key, MicrobatchRun]:
    """Return the step, unit and microbatch of ``op``, and the passage of that microbatch."""
    assert op.unit is not None
    assert op.microbatch is not None
    return (context.number, op.unit, op.microbatch), context.runs[op.microbatch]
