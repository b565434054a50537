"""SAVE and FETCH: the input of a unit leaves the device between forward and backward."""

import torch
from torch import Tensor

from outsize.codecs.codec import Codec
from outsize.planner.ops import Op
from outsize.runtime.context import StepContext
from outsize.runtime.device import Device
from outsize.runtime.microbatch import MicrobatchRun
from outsize.runtime.moved import Moved
from outsize.runtime.parcels import Parcel, pack, room_for, unpack
from outsize.storage.scratch import Scratch


class ActivationOps:
    """Moves the storages of saved inputs; the tensors that show them stay where they are, empty meanwhile.

    Other parts of the autograd graph may refer to the same storage. Emptying it and filling it again keeps all of them
    valid, and frees the memory whoever refers to it.

    Args:
        device: where activations live.
        scratch: where they go; None where the program saves nothing.
        codec: writes those that are floating point, where that is shorter; None writes them as they are.

    Attributes:
        up: what has come up so far.
        down: what has gone down.
    """

    def __init__(self, device: Device, scratch: Scratch | None, codec: Codec | None = None) -> None:
        self._device = device
        self._scratch = scratch
        self._codec = codec
        self._sizes: dict[tuple[int, int, int], list[Parcel]] = {}
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

    def forget(self, number: int) -> None:
        """Free what was saved for the step of that number and will not be fetched."""
        for key in [key for key in self._sizes if key[0] == number]:
            for index in range(len(self._sizes.pop(key))):
                assert self._scratch is not None
                self._scratch.forget((*key, index))

    def _storages(
        self, op: Op, context: StepContext
    ) -> tuple[tuple[int, int, int], MicrobatchRun, list[torch.UntypedStorage]]:
        assert op.unit is not None
        assert op.microbatch is not None
        run = context.runs[op.microbatch]
        return (context.number, op.unit, op.microbatch), run, run.stored(op.unit)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
