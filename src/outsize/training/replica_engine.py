"""What the loop over steps asks of an engine, where plain data parallel computes: ops that are timed, and checkpoints.

torch's `DistributedDataParallel` decides what runs when. Here its work gets names: ``F 0`` and ``B 0`` are the forward
and the backward of microbatch 0, ``REDUCE 2`` the sum of bucket 2 over all ranks, ``AGREE`` that of the losses. A
REDUCE begins when its bucket is ready and ends when its future is done; a backward ends with the last bucket that
becomes ready, since what it does after that is to wait.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from outsize.accelerators import Devices, new_event
from outsize.checkpoint.saving import Saving
from outsize.errors import ExecutionError
from outsize.group.gloo import GlooGroup
from outsize.planner.program.lanes import Lane
from outsize.planner.program.ops import Kind, Op
from outsize.planner.simulate.timeline import Event, Timeline
from outsize.runtime.device.device import open_device
from outsize.runtime.device.driver import Moved, OpRanges
from outsize.runtime.engine.engine import StoreHandle
from outsize.runtime.engine.executor import LaneTask, Waiting
from outsize.training.replica import Replica

if TYPE_CHECKING:
    from torch.distributed import GradBucket  # type: ignore[attr-defined]

COMPUTE, NET = Lane("compute", 0), Lane("net:reduce")
Hook = Callable[[Any, "GradBucket"], torch.futures.Future[Tensor]]


class _Timed(NamedTuple):
    """An op and the marks of its ends, which on a GPU pass later than the code that made them."""

    lane: str
    op: Op
    begun: Any
    ended: Any
    waited_for: Op | None


class ReplicaEngine:
    """Times the ops of a replica that trains together with others.

    Args:
        replica: what is trained.
        group: the ranks.
        device: of the replica.
        end_waits: has every call fail that waits for another rank.

    Attributes:
        ranges: names of ops in profiles.
        num_ended: changes whenever something ends.
        reduced: bytes of gradients sent to other ranks.
        error: why the run was given up; None while it goes on.
    """

    def __init__(
        self, replica: Replica, group: GlooGroup, device: torch.device, end_waits: Callable[[], None]
    ) -> None:
        self._replica, self._group, self._end_waits = replica, group, end_waits
        self._device = open_device(Devices.parse(str(device)))
        self.ranges = OpRanges(device)
        self.num_ended = 0
        self.reduced = Moved()
        self.error: BaseException | None = None
        self._timed: list[_Timed] = []
        self._under_way: dict[str, str] = {}
        self._last_sent: tuple[Any, Op] | None = None
        self._waits_for: Op | None = None

    @contextlib.contextmanager
    def op(self, kind: Kind, index: int | None = None, lane: str = COMPUTE) -> Iterator[None]:
        """Time the block as an op of ``lane``. The op of the compute lane after it waits for what it has sent."""
        op = Op(kind=kind, unit=index)
        name = str(op)
        begun, self._last_sent = self._mark(), None
        self._under_way[name] = lane
        with self.ranges.around(name):
            yield
        ended, sent = self._last_sent or (self._mark(), op if lane == NET else None)
        self._timed.append(_Timed(lane, op, begun, ended, self._waits_for if lane == COMPUTE else None))
        self._waits_for = sent
        self._end(name)

    def timing(self, send: Hook, wire_bytes: Callable[[Tensor], int]) -> Hook:
        """Return the communication hook ``send``, timed; ``wire_bytes`` says what it has made of a bucket."""

        def hook(state: Any, bucket: "GradBucket") -> torch.futures.Future[Tensor]:
            op, begun = Op(kind=Kind.REDUCE, unit=bucket.index()), self._mark()
            name = str(op)
            self._last_sent = begun, op
            self._under_way[name] = NET
            future = send(state, bucket)
            # Each rank of a ring sends a bucket twice, but for its own part.
            each_way = 2 * (self._group.size - 1) / self._group.size
            sent = (wire_bytes(bucket.buffer()), bucket.buffer().nbytes)
            self.reduced = self.reduced.and_then(*(int(each_way * size) for size in sent))

            def arrived(future: torch.futures.Future[Tensor]) -> Tensor:
                self._timed.append(_Timed(NET, op, begun, self._mark(), None))
                self._end(name)
                return future.value()

            return future.then(arrived)

        # DDP takes a hook whose annotations are classes of its own, or none.
        hook.__annotations__.clear()
        return hook

    def take_timeline(self) -> Timeline:
        """Return what has ended since the last call, and forget it."""
        timed, self._timed = self._timed, []
        events: list[Event] = []
        free_s: dict[str, float] = {}
        for one in timed:
            if not _passed(one.ended):  # asked once: it may pass meanwhile
                self._timed.append(one)
            else:
                start_s, end_s = self._seconds(one.begun), self._seconds(one.ended)
                # Buckets that are ready while another is under way wait for it.
                start_s = min(max(start_s, free_s.get(one.lane, start_s)), end_s)
                free_s[one.lane] = end_s
                events.append(
                    Event(lane=one.lane, op=one.op, start_s=start_s, end_s=end_s, waited_for=one.waited_for)
                )
        return Timeline(tuple(sorted(events, key=lambda event: event.start_s)))

    def moved(self) -> dict[str, Moved]:
        """Return what has gone to other ranks so far, by lane."""
        return {NET: self.reduced}

    def waiting(self) -> dict[str, Waiting]:
        """Return for each lane with unfinished work its first unfinished op."""
        under_way = list(self._under_way.items())
        found = {lane: Waiting(op) for op, lane in reversed(under_way)}
        if NET in found and COMPUTE in found and self._last_sent is not None:
            found[COMPUTE] = Waiting(found[COMPUTE].op, (found[NET].op,))
        return found

    def position(self) -> str:
        """What is under way; empty between steps."""
        return "\n".join(f"--> {op}" for op in list(self._under_way))

    def note_progress(self) -> None:
        """Say that something which takes long is getting on."""
        self.num_ended += 1

    def give_up(self, error: BaseException) -> None:
        """End all waiting for other ranks; the step under way then fails of ``error``."""
        self.error = error
        self._end_waits()

    def store(self, saving: Saving) -> StoreHandle:
        """Write a checkpoint: all ranks compare their weights, and the first one writes its own.

        Raises:
            ExecutionError: the replicas have come apart.
        """
        self._check_same(saving.step)
        resting = self._replica.at_rest() if self._group.rank == 0 else iter(())
        for _ in self._replica.spec.units:
            for unit in itertools.islice(resting, 1):
                saving(unit)
            self._group.barrier()  # a rank that waits sees unit by unit that it is no stall
            self.note_progress()
        return StoreHandle(saving, [], [])

    def store_rest(self, handle: StoreHandle) -> None:
        """Nothing: a checkpoint is whole, or given up, when `store` returns."""

    def wait(self, tasks: Iterable[LaneTask]) -> None:
        """Nothing, likewise."""

    def _check_same(self, step: int) -> None:
        digest = xxhash.xxh3_64()
        for parameter in self._replica.parameters.values():
            digest.update(parameter.detach().cpu().view(-1).numpy().data)
            self.note_progress()
        told = self._group.gather_objects(digest.hexdigest())
        wrong = [rank for rank, found in enumerate(told) if found != told[0]]
        if wrong:
            raise ExecutionError(
                f"after step {step} the weights of rank {wrong[0]} are not those of rank 0; nothing is saved. Go on "
                "from the last checkpoint, and look at that machine's memory and libraries"
            )

    def _end(self, op: str) -> None:
        self._under_way.pop(op, None)
        self.num_ended += 1

    def _mark(self) -> Any:
        """Return the time, on a GPU an event that passes when all work so far is done."""
        if self._device.torch_device.type == "cpu":
            return time.perf_counter()
        event = new_event(self._device.torch_device)
        event.record()
        return event

    def _seconds(self, mark: Any) -> float:
        return mark if isinstance(mark, float) else self._device.seconds(mark)


def _passed(mark: Any) -> bool:
    return isinstance(mark, float) or bool(mark.query())
