"""SAVE and FETCH: the input of a unit leaves the device between forward and backward."""

import torch
from torch import Tensor

from outsize.planner.ops import Op
from outsize.runtime.context import StepContext
from outsize.runtime.device import Device
from outsize.storage.scratch import Scratch


class ActivationOps:
    """Moves the storages of saved inputs; the tensors that show them stay where they are, empty meanwhile.

    Other parts of the autograd graph may refer to the same storage. Emptying it and filling it again keeps all of them
    valid, and frees the memory whoever refers to it.

    Args:
        device: where activations live.
        scratch: where they go; None where the program saves nothing.
    """

    def __init__(self, device: Device, scratch: Scratch | None) -> None:
        self._device = device
        self._scratch = scratch
        self._sizes: dict[tuple[int, int, int], list[int]] = {}
        self.bytes_up = 0
        self.bytes_down = 0

    def save(self, op: Op, context: StepContext) -> None:
        """SAVE: device → scratch; the device memory is free afterwards."""
        key, storages = self._storages(op, context)
        self._sizes[key] = [storage.nbytes() for storage in storages]
        for index, storage in enumerate(storages):
            content = _bytes_of(storage, self._device.torch_device)
            assert self._scratch is not None
            self._scratch.put((*key, index), content)
            self.bytes_down += content.nbytes
            self._device.hold(content, f"down:w{op.worker}")
            del content
            storage.resize_(0)

    def fetch(self, op: Op, context: StepContext) -> None:
        """FETCH: scratch → device, into the storages that were emptied."""
        key, storages = self._storages(op, context)
        for index, (storage, num_bytes) in enumerate(zip(storages, self._sizes.pop(key), strict=True)):
            storage.resize_(num_bytes)
            content = _bytes_of(storage, self._device.torch_device)
            assert self._scratch is not None
            self._scratch.take((*key, index), content)
            self.bytes_up += num_bytes
            self._device.hold(content, f"compute:w{op.worker}")

    def forget(self, number: int) -> None:
        """Free what was saved for the step of that number and will not be fetched."""
        for key in [key for key in self._sizes if key[0] == number]:
            for index in range(len(self._sizes.pop(key))):
                assert self._scratch is not None
                self._scratch.forget((*key, index))

    def _storages(
        self, op: Op, context: StepContext
    ) -> tuple[tuple[int, int, int], list[torch.UntypedStorage]]:
        assert op.unit is not None
        assert op.microbatch is not None
        return (context.number, op.unit, op.microbatch), context.runs[op.microbatch].stored(op.unit)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
