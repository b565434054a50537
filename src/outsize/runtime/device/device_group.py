"""Several devices as one, and which of them copy to each other without host memory between.

The lanes of worker 1 are called ``compute:w1``, ``up:w1`` and ``down:w1``; what leaves it for the memory of worker 2
has ``peer:w1-w2``. Lanes of the machine (``host``, ``read``) belong to no device; they wait for marks on their threads.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from outsize.accelerators import Devices, vendor_of
from outsize.planner.program.program import Lane, lane_named
from outsize.runtime.device.device import Device, open_device
from outsize.runtime.device.driver import Streams
from outsize.storage.ledger import Ledger, tier_of


class Workers(Device):
    """The devices of all workers, behind the contract of one.

    Memory is asked of the devices themselves; `allocate` gives that of worker 0.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self.name = ",".join(device.name for device in self.devices)
        self.torch_device = self.devices[0].torch_device
        self.asynchronous = self.devices[0].asynchronous

    def of(self, lane: str) -> Device:
        """The device that a lane works for, or starts from; that of worker 0 for lanes of the machine."""
        return self.devices[lane_named(lane).worker or 0]

    def explain(self, error: BaseException) -> str:
        """See `Device.explain`; all have the same budget."""
        return self.devices[0].explain(error)

    def allocate(self, num_bytes: int, what: str) -> Tensor:
        """See `Device.allocate`."""
        return self.devices[0].allocate(num_bytes, what)

    def lane(self, name: str) -> AbstractContextManager[Any]:
        """See `Device.lane`; what a worker's lane touches on other devices is in order with what computes there.

        So may be the gradient of an input that lay on the device of the worker before.
        """
        if lane_named(name).target is not None:
            return self._peer_lane(name)
        if not lane_named(name).of_device:
            return self.of(name).lane(name)
        with contextlib.ExitStack() as stack:
            for worker, device in enumerate(self.devices):
                if device is not self.of(name):
                    stack.enter_context(device.behind(Lane("compute", worker)))
            stack.enter_context(self.of(name).lane(name))
            return stack.pop_all()

    @contextlib.contextmanager
    def _peer_lane(self, name: str) -> Iterator[None]:
        """A lane between two devices, with a stream on both.

        1. What arrives is allocated on the target's stream, so its memory is used again in order with that.
        2. torch has the source's stream wait for the target's, copies on it, and has the target's wait for that.
        3. Marks are those of the source's stream, which comes last: a lane that waits for one finds the copy made.
        """
        target = lane_named(name).target or 0
        with self.devices[target].behind(name), self.of(name).lane(name):
            yield

    def record(self, lane: str) -> Any:
        """See `Device.record`."""
        return self.of(lane).record(lane)

    def wait(self, lane: str, mark: Any) -> None:
        """See `Device.wait`."""
        self.of(lane).wait(lane, mark)

    def seconds(self, mark: Any) -> float:
        """See `Device.seconds`; marks are read on the clock of the device that they were made on."""
        owner = next(device for device in self.devices if device.torch_device == mark.device)
        return owner.seconds(mark)

    def hold(self, tensor: Tensor, lane: str) -> None:
        """See `Device.hold`."""
        self.of(lane).hold(tensor, lane)

    def close(self) -> None:
        """See `Device.close`."""
        for device in self.devices:
            device.close()


def open_workers(
    devices: Devices,
    ledger: Ledger | None = None,
    link_bytes_per_s: float | None = None,
    peer_bytes_per_s: float | None = None,
) -> Workers:
    """Open a device for each worker, each with a tier of its own in ``ledger``.

    Workers on the same accelerator share its streams, see `Streams`.

    Rates are those of emulated devices, see `open_device`.

    Raises:
        ConfigError: one of them does not exist.
    """
    with contextlib.ExitStack() as stack:
        opened: list[Device] = []
        streams = {each: Streams(each) for each in devices.each if each.accelerated}
        for worker, each in enumerate(devices.each):
            tier = tier_of(worker, len(devices.each))
            opened.append(
                open_device(
                    each,
                    ledger,
                    link_bytes_per_s,
                    tier=tier,
                    peer_bytes_per_s=peer_bytes_per_s,
                    streams=streams.get(each),
                )
            )
            stack.callback(opened[-1].close)
        stack.pop_all()
    return Workers(opened)


# 1 MiB of numbers, enough to go over the wire that large copies take.
_NUMBERS = 2**18


def can_copy(source: Devices, target: Devices) -> bool:
    """Return whether copies go from one device's memory to the other's, and arrive as they were sent.

    The driver may promise it where an IOMMU or the mainboard then loses bytes, so a copy is tried. Copies between two
    workers on one device stay in its memory.
    """
    return source == target or _arrives(source, target)


@cache
def _arrives(source: Devices, target: Devices) -> bool:
    here, there, reaches = source.torch_device, target.torch_device, vendor_of(source.kind).reaches
    one, other = source.index, target.index
    if not (reaches(one, other) and reaches(other, one)):
        return False
    sent = torch.arange(_NUMBERS, dtype=torch.int32)
    return torch.equal(sent.to(here).to(there).cpu(), sent)
