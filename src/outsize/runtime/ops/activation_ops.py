"""Move kept activations, encoded or raw.

SAVE, FETCH, OFFLOAD, ONLOAD, SEND, RECV, PASS and RETURN: activations leave a device and come back, or to another.

SAVE and FETCH move the input of a unit, OFFLOAD and ONLOAD what its forward kept, SEND and RECV the gradient of its
input, all by way of the memory below the devices. PASS and RETURN copy an input and its gradient from one device's
memory to another's, as it is. Whoever makes the plan has counted a place there for each.

What comes up lies in memory of the lane that computes, taken in the order of the program (`ActivationOps.make_room`):
torch's allocator has a pool for each stream, and what two lanes took by turns would be reserved twice.

What has left is empty, whoever still refers to it. What comes back to the only worker fills the storages that were
emptied, so that all parts of the autograd graph that refer to them stay valid. With several workers it lies in fresh
memory of the one that runs the op, which need not be the one it left; and an input stays below until its last FETCH of
the step, which may be the one for its backward. Inputs may go encoded; a stage's forward and backward then see the same
decoded copy. All else goes as it is.

What leaves a device of an activation: the bytes of a storage, or where it is shorter an encoding of its elements.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from outsize.codecs.codec import DTYPE_NAME, Codec
from outsize.planner.program.program import Kind, Lane, Op, Program, lane_of
from outsize.planner.program.stages import Extent, Kept
from outsize.runtime.device.device import Device
from outsize.runtime.forward.microbatch import MicrobatchRun
from outsize.runtime.forward.saved_tensors import bytes_of
from outsize.runtime.forward.staged_run import StagedRun
from outsize.runtime.ops.context import Moved, StepContext, handles
from outsize.storage.scratch import Scratch


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """A storage that is away.

    Attributes:
        num_bytes: of the storage.
        sent_bytes: of what was sent for it.
        dtype: of its elements, where that is an encoding; None where it is the bytes themselves.
    """

    num_bytes: int
    sent_bytes: int
    dtype: torch.dtype | None = None


def pack(codec: Codec | None, content: Tensor, dtype: torch.dtype) -> tuple[Tensor, EncodedTensor]:
    """Return what is sent for the bytes of a storage, uint8, and how to read it.

    Args:
        codec: writes elements that are floating point; None none.
        content: uint8 [num_bytes].
        dtype: of the elements in it.
    """
    name = DTYPE_NAME.get(dtype)
    if codec is not None and name in codec.spec.dtypes and not content.nbytes % dtype.itemsize:
        assert name is not None
        elements = content.view(dtype)
        encoded = content.new_empty(codec.spec.max_bytes(elements.numel(), name))
        size = codec.encode(elements, encoded)
        if size < content.nbytes:
            return encoded[:size], EncodedTensor(content.nbytes, size, dtype)
    return content, EncodedTensor(content.nbytes, content.nbytes)


def room_for(parcel: EncodedTensor, content: Tensor) -> Tensor:
    """Return where the bytes of ``parcel`` arrive: in ``content``, uint8 [num_bytes], or beside it to be decoded."""
    return content if parcel.dtype is None else content.new_empty(parcel.sent_bytes)


def unpack(codec: Codec | None, parcel: EncodedTensor, arrived: Tensor, content: Tensor) -> None:
    """Fill ``content``, uint8 [num_bytes], with what ``arrived`` in its `room_for`."""
    if parcel.dtype is not None:
        assert codec is not None
        codec.decode(arrived, content.view(parcel.dtype))


Storage = torch.UntypedStorage
# What an op brings up of its unit and microbatch.
_CONTENT_OF = {Kind.FETCH: "input", Kind.RECV: "gradient", Kind.ONLOAD: "kept"}
FetchCounts = Counter[tuple[int | None, int | None]]
Key = tuple[int, int, int]
"""Number of a step, unit, microbatch."""


@dataclass(frozen=True, slots=True)
class Below:
    """What lies below the devices, of all workers together.

    Attributes:
        parcels: inputs and gradients of inputs, by key and which of the two it is.
        kept: what forwards kept: where, and the bytes of each part.
    """

    parcels: dict[tuple[Key, str], list[EncodedTensor]] = field(default_factory=dict)
    kept: dict[Key, tuple[Scratch, list[int]]] = field(default_factory=dict)


class ActivationOps:
    """Moves activations, for one worker.

    Args:
        device: of the worker.
        scratch: where inputs and their gradients go; shared by all workers. None where the program moves none.
        codec: writes inputs that are floating point, where that is shorter; None writes them as they are.
        rooms: where what forwards kept goes, by its extent.
        choices: what becomes of it, by unit and microbatch of a round.
        fetches: how often each input (unit, microbatch) is fetched in a step, for each of the programs that take turns;
            empty where that is once.
        below: what lies below the workers, shared by all of them; None for a single one.
        devices: of all workers, for what goes there by itself.

    Attributes:
        num_let_go: how often what a forward had kept had no room, so that it is recomputed.
        up: what has come up so far.
        down: what has gone down.
        across: what has gone to each other worker.
    """

    def __init__(
        self,
        device: Device,
        scratch: Scratch | None,
        codec: Codec | None = None,
        rooms: Mapping[Extent, Scratch] = MappingProxyType({}),
        choices: Kept = (),
        fetches: Sequence[FetchCounts] = (),
        below: Below | None = None,
        devices: Sequence[Device] = (),
    ) -> None:
        self._device, self._devices = device, devices
        self._scratch = scratch
        self._codec = codec
        self._rooms = rooms
        self._choices = choices
        self._fetches = fetches
        self._below = below or Below()
        self._made: dict[tuple[Key, str], tuple[list[Tensor], Any]] = {}
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

    @handles(Kind.SAVE)
    def save(self, op: Op, context: StepContext) -> None:
        """SAVE: the input goes below; the device memory is free afterwards."""
        key, run = _find(op, context)
        self._put((key, "input"), run.stored(key[1]), self._codec, empties=True)
        run.below.add(key[1])

    @handles(Kind.FETCH)
    def fetch(self, op: Op, context: StepContext) -> None:
        """FETCH: the input comes up, or a copy of it."""
        key, run = _find(op, context)
        last = not self._fetches or context.alone
        if not last:
            at = key[1:]
            context.fetched[at] += 1
            last = context.fetched[at] == self._fetches[context.program][at]
        arrived = self._take((key, "input"), op, run.emptied(key[1]), last=last)
        run.replace_input(key[1], arrived)
        if last:
            run.below.discard(key[1])

    @handles(Kind.SEND)
    def send(self, op: Op, context: StepContext) -> None:
        """SEND: the gradient of the input goes below."""
        key, run = _find_staged(op, context)
        self._put((key, "gradient"), zip(run.take_gradient(key[1]), repeat(torch.uint8), strict=False))

    @handles(Kind.RECV)
    def receive(self, op: Op, context: StepContext) -> None:
        """RECV: the gradient of the input comes up."""
        key, run = _find_staged(op, context)
        run.put_gradient(key[1], self._take((key, "gradient"), op))

    @handles(Kind.PASS)
    def pass_on(self, op: Op, context: StepContext) -> None:
        """PASS: the input goes to another worker; the device memory is free afterwards."""
        (_, unit, _), run = _find_staged(op, context)
        storages = run.input_storages(unit)
        arrived = self._cross(op, storages)
        run.replace_input(unit, arrived)
        for storage, copy in zip(storages, arrived, strict=True):
            if copy is not storage:
                storage.resize_(0)

    @handles(Kind.RETURN)
    def give_back(self, op: Op, context: StepContext) -> None:
        """RETURN: the gradient of the input goes to another worker."""
        (_, unit, _), run = _find_staged(op, context)
        run.put_gradient(unit, self._cross(op, run.take_gradient(unit)))

    @handles(Kind.OFFLOAD)
    def offload(self, op: Op, context: StepContext) -> None:
        """OFFLOAD: what the forward kept, device → its room; the device memory is free afterwards."""
        key, run = _find(op, context)
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
        self._below.kept[key] = room, sizes
        self.down = self.down.and_then(sum(sizes), sum(sizes))
        held.take()

    @handles(Kind.ONLOAD)
    def onload(self, op: Op, context: StepContext) -> None:
        """ONLOAD: its room → device."""
        key, run = _find(op, context)
        held = run.held(key[1])
        if held is None or key not in self._below.kept:
            return
        room, sizes = self._below.kept[key]
        contents = self._room((key, "kept"), op, sizes)
        with self._device.link(sum(sizes)):
            room.take(key, *contents)
        del self._below.kept[key]  # what fails before this can be forgotten
        self.up = self.up.and_then(sum(sizes), sum(sizes))
        held.put(content.untyped_storage() for content in contents)

    def make_room(self, arrival: Op, context: StepContext) -> None:
        """Take memory for what ``arrival`` brings up; called by the lane that computes, before it does so again.

        What it does not know the size of yet is left to the lane that brings it up.
        """
        if arrival.microbatch not in context.runs:
            return
        key, run = _find(arrival, context)
        place, fetched = (key, _CONTENT_OF[arrival.kind]), arrival.kind is Kind.FETCH
        sizes = self._sizes_below(place)
        if sizes and (not fetched or key[1] in run.below):
            into = run.emptied(key[1]) if fetched else ()
            self._made[place] = _taken(sizes, into, self._device), self._device.here()

    def _sizes_below(self, place: tuple[Key, str]) -> list[int]:
        """Return the bytes of each part of what lies below; none where nothing does yet."""
        if place[1] == "kept":
            return self._below.kept[place[0]][1] if place[0] in self._below.kept else []
        return [parcel.num_bytes for parcel in self._below.parcels.get(place, ())]

    def _room(
        self, place: tuple[Key, str], op: Op, sizes: Sequence[int], into: Sequence[Storage] = ()
    ) -> list[Tensor]:
        """Return memory that the calling lane may fill: behind all that has used it."""
        if place not in self._made:
            with self._device.behind(Lane("compute", op.worker)):
                self._made[place] = _taken(sizes, into, self._device), self._device.here()
        contents, mark = self._made.pop(place)
        self._device.rejoin(mark)
        return contents

    def forget(self, number: int) -> None:
        """Free what left for the step of that number and will not come back."""
        self._made.clear()
        for key in [key for key in self._below.kept if key[0] == number]:
            self._below.kept.pop(key)[0].forget(key)
        for place in [place for place in self._below.parcels if place[0][0] == number]:
            del self._below.parcels[place]
            assert self._scratch is not None
            self._scratch.forget(place)

    def _cross(self, op: Op, storages: list[Storage]) -> list[Storage]:
        """Return copies on the device of the other worker; of what lies there already, that itself.

        So does the gradient of an input, where the backward of the model's own code has put it there.
        """
        assert op.target is not None
        other, lane = self._devices[op.target], lane_of(op)
        arrivals = []
        for storage in storages:
            content = bytes_of(storage)
            if content.device == other.torch_device != self._device.torch_device:
                arrivals.append(storage)
                continue
            arrived = torch.empty(content.nbytes, dtype=torch.uint8, device=other.torch_device)
            with self._device.crossing(content.nbytes):
                arrived.copy_(content, non_blocking=True)
            self.across[op.target] = self.across[op.target].and_then(content.nbytes, content.nbytes)
            self._device.hold(content, lane)
            other.hold(arrived, Lane("compute", op.target))
            arrivals.append(arrived.untyped_storage())
        return arrivals

    def _put(
        self,
        place: tuple[Key, str],
        storages: Iterable[tuple[Storage, torch.dtype]],
        codec: Codec | None = None,
        *,
        empties: bool = False,
    ) -> None:
        """Send storages below, and empty them where nothing else does."""
        assert self._scratch is not None
        going = [(storage, *pack(codec, bytes_of(storage), dtype)) for storage, dtype in storages]
        parcels = self._below.parcels[place] = [parcel for *_, parcel in going]
        sent_bytes = sum(parcel.sent_bytes for parcel in parcels)
        with self._device.link(sent_bytes):
            self._scratch.put(place, *(sent for _, sent, _ in going))
        self.down = self.down.and_then(sent_bytes, sum(parcel.num_bytes for parcel in parcels))
        while going:
            storage = going.pop()[0]
            if empties:
                storage.resize_(0)

    def _take(
        self, place: tuple[Key, str], op: Op, into: Sequence[Storage] = (), *, last: bool = True
    ) -> list[Storage]:
        """Bring up what lies below, into empty storages or fresh ones."""
        assert self._scratch is not None
        parcels = self._below.parcels[place]
        contents = self._room(place, op, [parcel.num_bytes for parcel in parcels], into)
        arrived = [room_for(parcel, content) for parcel, content in zip(parcels, contents, strict=True)]
        sent_bytes = sum(parcel.sent_bytes for parcel in parcels)
        with self._device.link(sent_bytes):
            (self._scratch.take if last else self._scratch.read)(place, *arrived)
        for parcel, encoding, content in zip(parcels, arrived, contents, strict=True):
            unpack(self._codec, parcel, encoding, content)
        self.up = self.up.and_then(sent_bytes, sum(parcel.num_bytes for parcel in parcels))
        if last:
            del self._below.parcels[place]  # what fails before this can be forgotten
        return [content.untyped_storage() for content in contents]


def count_fetches(program: Iterable[Op] | Program) -> FetchCounts:
    """How often each input (unit, microbatch) is fetched in ``program``."""
    return Counter((op.unit, op.microbatch) for op in program if op.kind is Kind.FETCH)


def _taken(sizes: Sequence[int], into: Sequence[Storage], device: Device) -> list[Tensor]:
    """Return memory of the calling lane, uint8: empty storages that are filled again, or fresh ones."""
    if into:
        return [bytes_of(storage.resize_(size)) for storage, size in zip(into, sizes, strict=True)]
    return [torch.empty(size, dtype=torch.uint8, device=device.torch_device) for size in sizes]


def _find(op: Op, context: StepContext) -> tuple[Key, MicrobatchRun]:
    """Return the step, unit and microbatch of ``op``, and the passage of that microbatch."""
    assert op.unit is not None
    assert op.microbatch is not None
    return (context.number, op.unit, op.microbatch), context.runs[op.microbatch]


def _find_staged(op: Op, context: StepContext) -> tuple[Key, StagedRun]:
    key, run = _find(op, context)
    return key, cast("StagedRun", run)
