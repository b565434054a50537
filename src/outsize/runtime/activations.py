"""SAVE and FETCH: the input of a unit leaves the device between forward and backward."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.codecs.codec import DTYPE_NAME, Codec
from outsize.planner.ops import Op
from outsize.runtime.context import StepContext
from outsize.runtime.device import Device
from outsize.runtime.microbatch import MicrobatchRun
from outsize.runtime.moved import Moved
from outsize.storage.scratch import Scratch


@dataclass(frozen=True, slots=True)
class _Saved:
    """A storage that is away: its size, what was sent for it, and if that is an encoding, of which dtype."""

    num_bytes: int
    sent_bytes: int
    dtype: torch.dtype | None


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
        self._sizes: dict[tuple[int, int, int], list[_Saved]] = {}
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
            sent, is_encoded = self._encode(content, dtype)
            assert self._scratch is not None
            with self._device.link(sent.nbytes):
                self._scratch.put((*key, index), sent)
            self._sizes[key].append(_Saved(content.nbytes, sent.nbytes, dtype if is_encoded else None))
            self.down = self.down.and_then(sent.nbytes, content.nbytes)
            self._device.hold(content, f"down:w{op.worker}")
            del content
            storage.resize_(0)

    def fetch(self, op: Op, context: StepContext) -> None:
        """FETCH: scratch → device, into the storages that were emptied."""
        key, _, storages = self._storages(op, context)
        for index, (storage, saved) in enumerate(zip(storages, self._sizes.pop(key), strict=True)):
            storage.resize_(saved.num_bytes)
            content = _bytes_of(storage, self._device.torch_device)
            arrived = content if saved.dtype is None else content.new_empty(saved.sent_bytes)
            assert self._scratch is not None
            with self._device.link(saved.sent_bytes):
                self._scratch.take((*key, index), arrived)
            if saved.dtype is not None:
                assert self._codec is not None
                self._codec.decode(arrived, content.view(saved.dtype))
            self.up = self.up.and_then(saved.sent_bytes, saved.num_bytes)
            self._device.hold(content, f"compute:w{op.worker}")

    def _encode(self, content: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """Return what is sent for the bytes of a storage, and whether that is an encoding."""
        name = DTYPE_NAME.get(dtype)
        if self._codec is None or name not in self._codec.spec.dtypes or content.nbytes % dtype.itemsize:
            return content, False
        elements = content.view(dtype)
        most = self._codec.spec.max_bytes(elements.numel(), name)
        encoded = content.new_empty(most)
        size = self._codec.encode(elements, encoded)
        return (encoded[:size], True) if size < content.nbytes else (content, False)

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
