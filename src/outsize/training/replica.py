"""The whole training state of a model on one device, laid out as in a home.

Plain data parallel has no need of a home, but what is written to checkpoints and read from them lies in planes of
units. So the state of a replica is made of views into the planes of a `HostHome`: parameters are its masters (fp32
weights, or the masters of bf16 ones), AdamW's moments are its moments. On a GPU they are copies, brought there after
loading and back before saving.

What the loop over steps asks of an engine is here too: ops that are timed, and checkpoints.

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
from torch import Tensor, nn

from outsize.accelerators import Devices, new_event
from outsize.checkpoint.saving import Saving
from outsize.compat.torch_private import parameters_of
from outsize.errors import ExecutionError
from outsize.group.gloo import GlooGroup
from outsize.model.sizes.model_spec import TensorSpec, UnitSpec
from outsize.optim.optimizer_spec import (
    EXP_AVG,
    EXP_AVG_SQ,
    GRADIENT,
    MASTER,
    WEIGHTS,
    StateLayout,
    planes_for,
)
from outsize.planner.program.program import Kind, Lane, Op
from outsize.planner.simulate.timeline import Event, Timeline
from outsize.runtime.device.device import open_device
from outsize.runtime.device.driver import Moved, OpRanges
from outsize.runtime.engine.engine import StoreHandle
from outsize.runtime.engine.executor import LaneTask, Waiting
from outsize.runtime.forward.binding import buffers_on
from outsize.runtime.ops.checkpoint_ops import StoreOps, UnitAtRest
from outsize.session.fill import fill
from outsize.session.job.prepare import Job
from outsize.session.steps import LossScale
from outsize.storage.home import HostHome
from outsize.storage.ledger import Arena

if TYPE_CHECKING:
    from torch.distributed import GradBucket  # type: ignore[attr-defined]

_MOMENTS = (EXP_AVG, EXP_AVG_SQ)


class Replica:
    """A model with real parameters, and where they rest. Made by `opened`.

    Attributes:
        prepared: the run.
        home: planes of all units but gradients.
        parameters: that train, by name, fp32.
        updates: how often each of them was stepped.
        loss_scale: 1, as none computes in fp16.
        state: how a trained unit lies in the home.
    """

    def __init__(self, prepared: Job, device: torch.device, arena: Arena) -> None:
        self.prepared = prepared
        self.loss_scale = LossScale(enabled=False)
        self.spec = prepared.split.spec
        self.state = StateLayout(dtype=self.spec.dtype)
        planes = planes_for(self.spec.dtype)
        del planes[GRADIENT]
        self.home = HostHome(self.spec, planes, arena)
        fill(self.home, self.spec, prepared.source)
        self.parameters: dict[str, nn.Parameter] = {}
        self.updates: dict[str, int] = {}
        self._device = device
        self._moments: dict[str, dict[str, Tensor]] = {}
        for unit, tensor in self._tensors():
            weights = self._view(unit, tensor, self._master(unit)).float().to(device)
            parameter = nn.Parameter(weights, requires_grad=tensor.trainable)
            for module, attribute in prepared.split.owners[tensor.name]:
                parameters_of(module)[attribute] = parameter
            if tensor.trainable:
                self.parameters[tensor.name] = parameter
                self._moments[tensor.name] = {
                    plane: self._view(unit, tensor, plane).to(device) for plane in _MOMENTS
                }
                self.updates[tensor.name] = 0

    def load(self) -> None:
        """Take everything over from the home, after that was written to."""
        for (unit, tensor), parameter in self._trained():
            parameter.data.copy_(self._view(unit, tensor, self._master(unit)))
            for plane, moment in self._moments[tensor.name].items():
                moment.copy_(self._view(unit, tensor, plane))

    def give_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Have ``optimizer`` go on with the moments and counts of this."""
        for name, parameter in self.parameters.items():
            step = torch.tensor(float(self.updates[name]), device=self._device)
            optimizer.state[parameter] = {"step": step, **self._moments[name]}

    def at_rest(self) -> Iterator[UnitAtRest]:
        """Yield every unit as it is written to a checkpoint, the home brought up to date; valid until the next."""
        ops = StoreOps(self.spec, self.home, self, None)
        trained = {unit.index for (unit, _), _ in self._trained()}
        for (unit, tensor), parameter in self._trained():
            self._view(unit, tensor, self._master(unit)).copy_(parameter.data)
            for plane, moment in self._moments[tensor.name].items():
                self._view(unit, tensor, plane).copy_(moment)
        for unit in self.spec.units:
            if unit.index in trained and self._master(unit) != WEIGHTS:
                self.home.view(unit.index, WEIGHTS).copy_(self.home.view(unit.index, self._master(unit)))
            counts = {t.name: self.updates[t.name] for t in unit.tensors if t.name in self.updates}
            yield UnitAtRest(unit, counts, ops)

    def _tensors(self) -> Iterator[tuple[UnitSpec, TensorSpec]]:
        return ((unit, tensor) for unit in self.spec.units for tensor in unit.tensors)

    def _trained(self) -> Iterator[tuple[tuple[UnitSpec, TensorSpec], nn.Parameter]]:
        for unit, tensor in self._tensors():
            if tensor.name in self.parameters:
                yield (unit, tensor), self.parameters[tensor.name]

    def _master(self, unit: UnitSpec) -> str:
        return MASTER if unit.trainable and MASTER in self.state.planes else WEIGHTS

    def _view(self, unit: UnitSpec, tensor: TensorSpec, plane: str) -> Tensor:
        flat = self.home.view(unit.index, plane)
        return flat[tensor.offset : tensor.offset + tensor.numel].view(tensor.shape)


@contextlib.contextmanager
def opened(prepared: Job, device: torch.device) -> Iterator[Replica]:
    """Give the model real parameters on ``device`` for as long as the context lasts.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    split = prepared.split
    former = {(id(m), a): (m, parameters_of(m)[a]) for places in split.owners.values() for m, a in places}
    with Arena() as arena, buffers_on(split.model, device):
        try:
            yield Replica(prepared, device, arena)
        finally:
            for (_, attribute), (module, meta) in former.items():
                parameters_of(module)[attribute] = meta


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
