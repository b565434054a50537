"""The model's own code between units: its forward on one thread, its backward entered once a piece.

A coroutine cannot change threads, and the forward of a microbatch goes on over stages of several workers. So the
compute thread of a worker runs units, and asks the thread of the glue to take the model's own code to the next one,
for this worker: with the rest as it lies in this worker's slot, behind what its compute lane has been given.
"""

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from outsize.compat.torch_private import buffers_of, keeps_alive, made_at, parameters_of
from outsize.errors import ModelError
from outsize.model.split import Split
from outsize.runtime.device.device_group import Workers
from outsize.runtime.forward.binding import TORCH_DTYPE, GradientSums, glue_places, weight_views
from outsize.runtime.forward.unit_visit import box_of

if TYPE_CHECKING:
    from outsize.runtime.forward.microbatch import MicrobatchRun
    from outsize.runtime.forward.staged_run import StagedRun


# An edge, without what keeps it alive.
_Key = tuple[Any, int]
# In the place of a piece: gradients that wait for none.
_AT_ONCE = -1


@dataclass(slots=True)
class _Waiting:
    """The sum so far of the gradients of what ``edge`` made, and the device where that lies; None where it is."""

    edge: GradientEdge
    gradient: Tensor
    device: torch.device | None

    def placed(self) -> Tensor:
        return self.gradient if self.device is None else self.gradient.to(self.device)


class OuterBackward:
    """Gradients of what the model's own code made, until the piece that made it goes backward.

    A piece is what that code does on the way to one unit, or behind the last. What it makes (a time embedding, a hidden
    state, a bias) may be used by many units and by other pieces. An uncut backward adds up the gradients of all these
    uses, that of the last one first, before it goes on; so they wait here, and `enter` goes on with the sums.

    Args:
        leaves_wait: whether gradients of leaves that units are given wait for the first piece; else each goes on at
            once, for parameters whose sums are open only where they are used.
    """

    def __init__(self, *, leaves_wait: bool = True) -> None:
        self._leaves_wait = leaves_wait
        self._ends: dict[int, int] = {}
        self._waiting: dict[int, dict[_Key, _Waiting]] = {}

    def end_piece(self, unit: int, num_nodes: int) -> None:
        """Note that the code on the way to ``unit`` has ended, when its thread had made so many nodes of graphs."""
        self._ends[unit] = num_nodes

    def defer(self, edge: GradientEdge, gradient: Tensor, device: torch.device | None = None) -> None:
        """Add a gradient of what ``edge`` made, which is to lie on ``device``."""
        waiting, key = self._waiting.setdefault(self._piece_of(edge.node), {}), _key(edge)
        earlier = waiting.get(key)
        if earlier is None:
            waiting[key] = _Waiting(edge, gradient, device)
        else:
            earlier.gradient = earlier.gradient.to(gradient.device) + gradient

    def take(self, edge: GradientEdge) -> Tensor | None:
        """Return the sum so far of the gradients of what ``edge`` made, which the caller adds to; None for none."""
        waiting = self._waiting.get(self._piece_of(edge.node), {}).pop(_key(edge), None)
        return None if waiting is None else waiting.gradient

    def enter_last(self) -> None:
        """Go backward through the code behind the last unit."""
        self.enter(self._behind())

    def enter(self, unit: int) -> None:
        """Go backward through the code on the way to ``unit``, as far as what pieces before it made."""
        begun = [*self._waiting.pop(unit, {}).values(), *self._waiting.pop(_AT_ONCE, {}).values()]
        boxes = [box_of(one.edge) for one in begun]
        if all(box is not None for box in boxes):
            for (box, position), one in zip(boxes, begun, strict=True):  # type: ignore[misc]
                box.add(position, one.gradient)
            return
        start = max((end for other, end in self._ends.items() if other < unit), default=0)
        crossings = _made_before(start, [one.edge for one in begun])
        seeds = [one for node in crossings for one in self._take_all_of(node)]
        with ExitStack() as stack:
            for node, owner in crossings.items():
                stack.callback(node.register_prehook(partial(self._hold_back, node, owner)).remove)
            pairs = [*seeds, *begun]
            torch.autograd.backward([p.edge for p in pairs], [p.placed() for p in pairs], retain_graph=True)

    def clear(self) -> None:
        """Forget all that waits."""
        self._waiting.clear()

    def _hold_back(self, node: Node, owner: Node, gradients: tuple[Tensor | None, ...]) -> tuple[None, ...]:
        """What ``node``, of a piece before, was given waits for that piece."""
        for at, gradient in enumerate(gradients):
            if gradient is not None:
                self.defer(GradientEdge(node, at, owner), gradient)
        return (None,) * len(gradients)

    def _take_all_of(self, node: Node) -> Iterable[_Waiting]:
        waiting = self._waiting.get(self._piece_of(node), {})
        return [waiting.pop(key) for key in list(waiting) if key[0] is node]

    def _piece_of(self, node: Node) -> int:
        if _is_leaf(node):
            return min(self._ends, default=0) if self._leaves_wait else _AT_ONCE
        number = made_at(node)
        return min((unit for unit, end in self._ends.items() if end > number), default=self._behind())

    def _behind(self) -> int:
        return max(self._ends, default=-1) + 1


def _key(edge: GradientEdge) -> _Key:
    return edge.node, edge.output_nr


def _is_leaf(node: Node) -> bool:
    return hasattr(node, "variable")


def _made_before(start: int, edges: Sequence[GradientEdge]) -> dict[Node, Node]:
    """Return where the graph behind ``edges`` goes on into nodes that were made before ``start``, with their owners.

    The Python object of a node of `torch.autograd.Function` may not keep the node alive (seen in torch 2.11); its owner
    does, a node further on in the graph.
    """
    waiting = [(edge.node, edge.ownership_token or edge.node) for edge in edges]
    visited, before_start = set[Node](), dict[Node, Node]()
    while waiting:
        node, owner = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        if keeps_alive(node):
            owner = node
        for before, _ in node.next_functions:
            if before is None or before in visited or _is_leaf(before):
                continue
            if made_at(before) < start:
                visited.add(before)
                before_start[before] = owner
            else:
                waiting.append((before, owner))
    return before_start


T = TypeVar("T")


class OuterForward:
    """Runs pieces of the model's own code, and has its parameters in place meanwhile.

    Args:
        split: the model; its units are never run here.
        workers: for whom.
        rest_planes: the rest's weights as they lie with a worker, see `weight_planes`.
        sums: where each worker sums gradients.
        num_threads: compute threads; None leaves torch's own number.

    Attributes:
        runs: passages under way, to unwind on failure.
    """

    def __init__(
        self,
        split: Split,
        workers: Workers,
        rest_planes: Callable[[int], tuple[Tensor, ...]],
        sums: list[GradientSums],
        num_threads: int | None,
    ) -> None:
        self._workers = workers
        self._rest_planes = rest_planes
        self._sums = sums
        self._rest = split.spec.units[-1]
        places = [glue_places(split, tensor.name) for tensor in self._rest.all_tensors]
        self._places = {i: at for i, at in enumerate(places) if at} if self._rest.kind == "rest" else {}
        self._stand_ins = _stand_ins(split, workers)
        self._former = {
            (id(module), name): (module, parameters_of(module)[name])
            for at in split.owners.values()
            for module, name in at
        }
        self._put_stand_ins()
        self._buffers = _buffers_outside(split, workers)
        self._local = threading.local()
        self.runs: set[MicrobatchRun] = set()
        start = (lambda: torch.set_num_threads(num_threads)) if num_threads is not None else None
        self._thread = ThreadPoolExecutor(1, "glue", initializer=start)

    @property
    def worker(self) -> int:
        """For which worker the thread that asks computes."""
        worker: int = self._local.worker
        return worker

    @worker.setter
    def worker(self, worker: int) -> None:
        self._local.worker = worker

    def device(self) -> torch.device:
        """Where tensors of the worker lie for which the thread that asks computes."""
        return self._workers.devices[self.worker].torch_device

    def run(self, run: "StagedRun", piece: Callable[[], T]) -> T:
        """Return what ``piece`` returns, run in the glue's thread for the worker of the thread that asks."""
        return self._thread.submit(self._piece, run, self.worker, piece).result()

    def wait_for_loads(self, worker: int) -> None:
        """Have what computes on the device of ``worker`` from now on wait for loads: the rest may come once more."""
        device = self._workers.devices[worker]
        mark = device.record(f"up:w{worker}")
        if mark is not None:
            device.wait(f"compute:w{worker}", mark)

    def let_go(self) -> None:
        """Give the modules their own parameters back until the next piece runs; between programs only."""
        for (_, name), (module, parameter) in self._former.items():
            parameters_of(module)[name] = parameter
        self._resting = True

    def close(self) -> None:
        """Unwind every forward that is under way and end the thread; idempotent."""
        self.worker = 0
        for run in list(self.runs):
            run.close()
        self.runs.clear()
        self._thread.shutdown()
        self.let_go()

    def _put_stand_ins(self) -> None:
        for (module, name), stand_in in self._stand_ins.items():
            parameters_of(module)[name] = stand_in[0]
        self._resting = False

    def _piece(self, run: "StagedRun", worker: int, piece: Callable[[], T]) -> T:
        self.worker = worker  # of this thread, too
        if self._resting:
            self._put_stand_ins()
        # Autograd runs the hook of a parameter on the stream that was current when the parameter was made.
        with self._behind(worker):
            # What a model calls its device is that of its first parameter.
            for (module, name), stand_ins in list(self._stand_ins.items())[:1]:
                parameters_of(module)[name] = stand_ins[worker]
            for position, parameter in self._parameters(run, worker).items():
                for module, name in self._places[position]:
                    parameters_of(module)[name] = parameter
            for buffers, name, copies in self._buffers:
                buffers[name] = copies[worker]
            return piece()

    def _behind(self, worker: int) -> AbstractContextManager[Any]:
        """Work behind what the compute lane of ``worker`` has been given, on its device."""
        return self._workers.devices[worker].behind(f"compute:w{worker}")

    def _parameters(self, run: "StagedRun", worker: int) -> dict[int, nn.Parameter]:
        """The rest's parameters for one run: its own, since gradients of several arrive at a time."""
        if self._places and worker not in run.parameters:
            # With a count of changes of their own: the rest may be loaded again, the same bits onto themselves, before
            # the backward of a passage that another worker goes on with.
            views = weight_views(self._rest, tuple(plane.data for plane in self._rest_planes(worker)))
            run.parameters[worker] = {i: self._parameter(run, i, views[i]) for i in self._places}
        return run.parameters.get(worker, {})

    def _parameter(self, run: "StagedRun", position: int, view: Tensor) -> nn.Parameter:
        tensor = self._rest.all_tensors[position]
        parameter = nn.Parameter(view, requires_grad=tensor.trainable)
        passage = weakref.ref(run)  # whose graph holds the parameter, which the collector does not see

        def add(parameter: Tensor) -> None:
            if parameter.grad is None:  # it was held back, see `OuterBackward`
                return
            run = passage()
            assert run is not None
            sums = self._sums[run.pulled_by]
            if not sums.is_open(self._rest.index):
                raise ModelError(
                    f"a gradient of {tensor.name} came from a unit that was not known to use it; use one device"
                )
            # The sum may lie on another device than the gradient, where the thread that autograd has for the gradient's
            # device is on no lane.
            with self._behind(run.pulled_by):
                sums.hook(self._rest.index, position)(parameter)

        if tensor.trainable:
            parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
        return parameter


def _stand_ins(split: Split, workers: Workers) -> dict[tuple[nn.Module, str], list[nn.Parameter]]:
    """For each parameter inside a unit, what code outside sees of it on each device: its form, and no number."""
    inside = {id(child) for module in split.modules for child in module.modules()}
    forms = {t.name: (t.shape, split.spec.dtype) for unit in split.spec.units for t in unit.tensors}
    parts = [part for unit in split.spec.units for part in unit.frozen]
    forms |= {t.name: (t.shape, part.dtype) for part in parts for t in part.tensors}
    empty = {
        kind: [torch.full((), math.nan, dtype=dtype, device=each.torch_device) for each in workers.devices]
        for kind, dtype in TORCH_DTYPE.items()
    }
    return {
        (module, attribute): [
            nn.Parameter(value.expand(forms[name][0]), requires_grad=False) for value in empty[forms[name][1]]
        ]
        for name, places in split.owners.items()
        for module, attribute in places
        if id(module) in inside
    }


def _buffers_outside(
    split: Split, workers: Workers
) -> list[tuple[dict[str, Tensor | None], str, list[Tensor]]]:
    """Buffers that the model's own code uses, on each worker's device; none where all workers share one."""
    devices = [device.torch_device for device in workers.devices]
    if len(set(devices)) == 1:
        return []
    inside = {id(child) for module in split.modules for child in module.modules()}
    return [
        (buffers_of(module), name, [buffer.to(device) for device in devices])
        for module in split.model.modules()
        if id(module) not in inside
        for name, buffer in buffers_of(module).items()
        if buffer is not None
    ]
