"""SAVE and FETCH: the input of a unit leaves the device between its forward and its backward.

OFFLOAD and ONLOAD: so does what its forward kept.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from outsize.codecs.codec import Codec
from outsize.planner.choice import Extent, Kept
from outsize.planner.ops import Op
from outsize.runtime.context import StepContext
from outsize.runtime.device import Device
from outsize.runtime.microbatch import MicrobatchRun
from outsize.runtime.moved import Moved
from outsize.runtime.parcels import Parcel, pack, room_for, unpack
from outsize.storage.scratch import Scratch

_Key = tuple[int, int, int]


class ActivationOps:
    """Moves the storages of saved inputs; the tensors that show them stay where they are, empty meanwhile.

    Other parts of the autograd graph may refer to the same storage. Emptying it and filling it again keeps all of them
    valid, and frees the memory whoever refers to it.

    Args:
        device: where activations live.
        scratch: where they go; None where the program saves nothing.
        codec: writes inputs that are floating point, where that is shorter; None writes them as they are.
        rooms: where what forwards kept goes, by its extent.
        choices: what becomes of it, by unit and microbatch.

    Attributes:
        num_let_go: how often what a forward had kept had no room, so that it is recomputed.
        up: what has come up so far.
        down: what has gone down.
    """

    def __init__(
        self,
        device: Device,
        scratch: Scratch | None,
        codec: Codec | None = None,
        rooms: Mapping[Extent, Scratch] = MappingProxyType({}),
        choices: Kept = (),
    ) -> None:
        self._rooms = rooms
        self._choices = choices
        self._away: dict[_Key, tuple[Scratch, list[int]]] = {}
        self.num_let_go = 0
        self._device = device
        self._scratch = scratch
        self._codec = codec
        self._sizes: dict[_Key, list[Parcel]] = {}
        self.up = self.down = Moved()

    @property
    def bytes_up(self) -> int:
        """That came up over the link."""
        return self.up.wire

    @property
    def bytes_down(self) -> int:
        """That went down over it."""
        return self.down.wire

    def save(self, op: Op, context: StepContext) -> None:
        """SAVE: device → scratch; the device memory is free afterwards."""
        key, run, storages = self._storages(op, context)
        dtypes = run.stored_dtypes(key[1]) if self._codec is not None else [torch.uint8] * len(storages)
        self._sizes[key] = []
        for index, (storage, dtype) in enumerate(zip(storages, dtypes, strict=True)):
            content = _bytes_of(storage, self._device.torch_device)
            sent, parcel = pack(self._codec, content, dtype)
            assert self._scratch is not None
            with self._device.link(sent.nbytes):
                self._scratch.put((*key, index), sent)
            self._sizes[key].append(parcel)
            self.down = self.down.and_then(sent.nbytes, content.nbytes)
            self._device.hold(content, f"down:w{op.worker}")
            del content
            storage.resize_(0)

    def fetch(self, op: Op, context: StepContext) -> None:
        """FETCH: scratch → device, into the storages that were emptied."""
        key, _, storages = self._storages(op, context)
        for index, (storage, parcel) in enumerate(zip(storages, self._sizes.pop(key), strict=True)):
            storage.resize_(parcel.num_bytes)
            content = _bytes_of(storage, self._device.torch_device)
            arrived = room_for(parcel, content)
            assert self._scratch is not None
            with self._device.link(parcel.sent_bytes):
                self._scratch.take((*key, index), arrived)
            unpack(self._codec, parcel, arrived, content)
            self.up = self.up.and_then(parcel.sent_bytes, parcel.num_bytes)
            self._device.hold(content, f"compute:w{op.worker}")

    def offload(self, op: Op, context: StepContext) -> None:
        """OFFLOAD: what the forward kept, device → its room; the device memory is free afterwards."""
        key, run = self._key(op, context)
        held = run.held(key[1])
        if held is None:
            return
        extent = self._choices[key[1]][key[2]].extent
        assert extent is not None
        room = self._rooms[extent]
        contents = [_bytes_of(storage, self._device.torch_device) for storage in held.storages()]
        if not room.holds_all(contents):  # it is measured on shorter sequences, and on other experts
            run.let_go(key[1])
            self.num_let_go += 1
            return
        sizes = [content.nbytes for content in contents]
        with self._device.link(sum(sizes)):
            room.put_all(key, contents)
        self._away[key] = room, sizes
        self.down = self.down.and_then(sum(sizes), sum(sizes))
        for content in contents:
            self._device.hold(content, f"down:w{op.worker}")
        held.take()

    def onload(self, op: Op, context: StepContext) -> None:
        """ONLOAD: its room → device."""
        key, run = self._key(op, context)
        held = run.held(key[1])
        if held is None or key not in self._away:
            return
        room, sizes = self._away.pop(key)
        device = self._device.torch_device
        contents = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        with self._device.link(sum(sizes)):
            room.take_all(key, contents)
        self.up = self.up.and_then(sum(sizes), sum(sizes))
        for content in contents:
            self._device.hold(content, f"compute:w{op.worker}")
        held.put(content.untyped_storage() for content in contents)

    def forget(self, number: int) -> None:
        """Free what was saved for the step of that number and will not be fetched."""
        for key in [key for key in self._sizes if key[0] == number]:
            for index in range(len(self._sizes.pop(key))):
                assert self._scratch is not None
                self._scratch.forget((*key, index))
        for away in [key for key in self._away if key[0] == number]:
            self._away.pop(away)[0].forget(away)

    def _storages(
        self, op: Op, context: StepContext
    ) -> tuple[_Key, MicrobatchRun, list[torch.UntypedStorage]]:
        key, run = self._key(op, context)
        return key, run, run.stored(key[1])

    def _key(self, op: Op, context: StepContext) -> tuple[_Key, MicrobatchRun]:
        assert op.unit is not None
        assert op.microbatch is not None
        return (context.number, op.unit, op.microbatch), context.runs[op.microbatch]


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
