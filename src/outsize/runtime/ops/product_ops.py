"""Muon's products on the devices: a matrix goes up in bf16, is made orthogonal there, and comes back in bf16.

All else of a STEP stays on the host. The story of a matrix, on the thread of the STEP:

1. It is rounded to bf16 into the scratch in host memory, which is pinned where the device copies from it.
2. Copies and products are enqueued on a stream of their own, so that the units that compute meanwhile do not wait for
   them, and they not for units: the device shares itself among both.
3. The thread waits for the mark behind the copy down. Then the scratch is the host's again, and the room on the device
   that of the next matrix.

Units are dealt out among several devices, one after the other, so a unit is always with the same one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outsize.optim.muon import newton_schulz
from outsize.runtime.device.device import Device
from outsize.runtime.device.driver import Moved

LANE = "products"


class DeviceProducts:
    """Makes matrices orthogonal on devices, see `outsize.optim.muon.Products`.

    Args:
        devices: of all workers.
        room_bytes: of each of the two rooms that it takes on each of them, as `StateLayout.products_room` says.

    Attributes:
        moved: what has gone up, and come down again as much.
    """

    def __init__(self, devices: Sequence[Device], room_bytes: int) -> None:
        self.moved = Moved()
        self._devices = tuple(devices)
        self._rooms = [
            [device.allocate(room_bytes, "products of Muon").view(torch.bfloat16) for _ in range(2)]
            for device in devices
        ]

    def __call__(self, update: Tensor, scratch: Tensor, iterations: int, unit: int) -> Tensor:
        """See `outsize.optim.muon.orthogonal`; what is returned lies in the memory of ``scratch``."""
        number = unit % len(self._devices)
        device, rooms, numel = self._devices[number], self._rooms[number], update.numel()
        staged = scratch.view(-1).view(torch.bfloat16)[:numel].view(update.shape).copy_(update)
        with device.behind(LANE):
            device.copy(rooms[0][:numel].view(update.shape), staged)
            found = newton_schulz(rooms, update.shape, iterations)
            # A transposed copy would be made of pieces, or by way of more memory: what comes down lies as it is there.
            tall = not found.is_contiguous()
            found = found.T if tall else found
            back = staged.view(found.shape)
            device.copy(back, found)
            mark = device.record(LANE)
        if mark is not None:
            device.wait("", mark)
        self.moved = self.moved.and_then(back.nbytes, back.nbytes)
        return back.T if tall else back
