"""SAVE and FETCH: the input of a unit leaves the device between its forward and its backward."""

from collections.abc import Mapping
from types import MappingProxyType

from outsize.codecs.codec import Codec
from outsize.planner.program.activation_policy import Extent, Kept
from outsize.planner.program.lanes import Lane
from outsize.planner.program.ops import Kind, Op
from outsize.runtime.device.device import Device
from outsize.runtime.forward.saved_tensors import bytes_of
from outsize.runtime.ops.context import StepContext
from outsize.runtime.ops.encoded_storage import EncodedTensor, pack, room_for, unpack
from outsize.runtime.ops.handlers import handles
from outsize.runtime.ops.offload_ops import Key, OffloadOps, key_of
from outsize.storage.scratch import Scratch


class ActivationOps(OffloadOps):
    """Moves the storages of saved inputs; the tensors that show them stay where they are, empty meanwhile.

    Other parts of the autograd graph may refer to the same storage. Emptying it and filling it again keeps all of them
    valid, and frees the memory whoever refers to it.

    Args:
        device: where activations live.
        scratch: where they go; None where the program saves nothing.
        codec: writes inputs that are floating point, where that is shorter; None writes them as they are.
        rooms: where what forwards kept goes, by its extent.
        choices: what becomes of it, by unit and microbatch of a round.
    """

    def __init__(
        self,
        device: Device,
        scratch: Scratch | None,
        codec: Codec | None = None,
        rooms: Mapping[Extent, Scratch] = MappingProxyType({}),
        choices: Kept = (),
    ) -> None:
        super().__init__(device, rooms, choices)
        self._scratch = scratch
        self._codec = codec
        self._sizes: dict[Key, list[EncodedTensor]] = {}

    @handles(Kind.SAVE)
    def save(self, op: Op, context: StepContext) -> None:
        """SAVE: device → scratch; the device memory is free afterwards."""
        key, run = key_of(op, context)
        assert self._scratch is not None
        self._sizes[key] = []
        for index, (storage, dtype) in enumerate(run.stored(key[1])):
            content = bytes_of(storage)
            sent, parcel = pack(self._codec, content, dtype)
            self._sizes[key].append(parcel)
            with self._device.link(sent.nbytes):
                self._scratch.put((*key, index), sent)
            self.down = self.down.and_then(sent.nbytes, content.nbytes)
            del content
            storage.resize_(0)

    @handles(Kind.FETCH)
    def fetch(self, op: Op, context: StepContext) -> None:
        """FETCH: scratch → device, into the storages that were emptied."""
        key, run = key_of(op, context)
        assert self._scratch is not None
        for index, ((storage, _), parcel) in enumerate(
            zip(run.stored(key[1]), self._sizes[key], strict=True)
        ):
            storage.resize_(parcel.num_bytes)
            content = bytes_of(storage)
            arrived = room_for(parcel, content)
            with self._device.link(parcel.sent_bytes):
                self._scratch.take((*key, index), arrived)
            unpack(self._codec, parcel, arrived, content)
            self.up = self.up.and_then(parcel.sent_bytes, parcel.num_bytes)
            self._device.hold(content, Lane("compute", op.worker))
        del self._sizes[key]  # what fails before this can be forgotten

    def forget(self, number: int) -> None:
        """Free what was saved for the step of that number and will not be fetched."""
        for key in [key for key in self._sizes if key[0] == number]:
            for index in range(len(self._sizes.pop(key))):
                assert self._scratch is not None
                self._scratch.forget((*key, index))
        super().forget(number)
