"""One microbatch on its way through stages of several workers.

As `MicrobatchRun`, but for four things. The model's own code runs in the thread of `OuterForward`. What unit ``u``
receives may be moved between workers, by way of the memory below them, before its forward and again before its
backward; so may the gradient of what it returned. A unit may be recomputed before that gradient is there. And what no
unit made (masks, position tables) is copied to a worker once, when the first of its units asks for it.

Moved are the arguments that carry a gradient or lie in what the unit before returned, but for those that other units,
or code behind the unit, use as well (an encoder's output, a time embedding, a skip): these stay where they were made,
are copied like masks, and their gradients are summed where they come about. Where nothing but the worker changes, the
code between the units has run before they move; the head's arguments come into being where it runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from outsize.compat.torch_private import has_memory, leaves_of, map_only, memory_key, storage_key
from outsize.errors import ModelError
from outsize.model.walk import Finished, UnitCall
from outsize.runtime.forward.microbatch import Ambient, MicrobatchRun, Reseed, Storage
from outsize.runtime.forward.outer_code import OuterBackward, OuterForward
from outsize.runtime.forward.saved_tensors import Form, SavedTensors, bytes_of, storages_of
from outsize.runtime.forward.short_recompute import Shortcuts
from outsize.runtime.forward.unit_facts import NO_EFFECTS, SideEffects
from outsize.runtime.forward.unit_visit import Forward, Roots, UnitVisit, box_of, versions_of

# What asks a tensor for its form, or makes another view of it.
READ_NO_VALUE = {"__get__", "size", "dim", "numel", "stride", "detach", "is_floating_point", "view_as"}


class StagedRun(MicrobatchRun):
    """The passage of one microbatch through stages.

    Args:
        model: the model whose units are replaced by boundaries.
        inputs: keyword arguments of its forward.
        tracked: for each unit, whether its outputs can carry a gradient.
        reseed: as of `MicrobatchRun`.
        graph: as of `MicrobatchRun`, as for the next two.
        ambient: see there.
        shortcuts: see there.
        effects: see there.
        outer: runs the model's own code.

    Attributes:
        parameters: the rest's parameters as the model's own code saw them, by worker; the glue's own business.
        pulled_by: the worker that goes backward now.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        tracked: tuple[bool, ...],
        reseed: Reseed,
        graph: bool = True,
        ambient: Ambient = nullcontext,
        shortcuts: Shortcuts | None = None,
        effects: SideEffects = NO_EFFECTS,
        check_settings: Callable[[], None] = lambda: None,
        *,
        outer: OuterForward,
    ) -> None:
        super().__init__(model, inputs, tracked, reseed, graph, ambient, shortcuts, effects, check_settings)
        self._glue = outer
        self._staying: set[int] = set()  # memory of arguments that are shared
        self._outer = OuterBackward(leaves_wait=False)
        self.parameters: dict[int, dict[int, nn.Parameter]] = {}
        self.pulled_by = 0
        self._ran_on: dict[int, int] = {}
        self._moving: dict[int, tuple[int, ...]] = {}
        self._passed: frozenset[int] = frozenset()
        self._handed: dict[
            int, tuple[frozenset[int], int]
        ] = {}  # what came from the unit before, and input bytes
        self._copies: dict[tuple[torch.device, int, Form, int], tuple[Tensor, Tensor]] = {}
        self._gradient_forms: dict[int, dict[int, tuple[int, Form]]] = {}

    def _recompute(self, unit: int, visit: UnitVisit, forward: Forward) -> Roots:
        self._localise(visit)
        return super()._recompute(unit, visit, forward)

    def input_storages(self, unit: int) -> list[Storage]:
        """Storages of what ``unit`` receives and of what moves with it, each once."""
        return [storage for storage, _ in self.stored(unit)]

    def emptied(self, unit: int) -> list[Storage]:
        """Return nothing: what arrives lies in fresh memory of the worker."""
        return []

    def replace_input(self, unit: int, storages: list[Storage]) -> None:
        """Let what ``unit`` receives lie in other storages, in the order of `input_storages`."""
        leaves, positions = self._input(unit)
        index = {storage_key(storage): i for i, storage in enumerate(self.input_storages(unit))}
        for position in positions:
            old = leaves[position]
            leaves[position] = Form.of(old).shown(storages[index[memory_key(old)]])
        if unit not in self._visits:
            self._waiting = leaves

    def take_gradient(self, unit: int) -> list[Storage]:
        """Take the gradient of the input of ``unit`` out, and return its storages, each once.

        What the unit before returned besides (router logits) keeps its gradient here, where there is no room for more
        than the input.
        """
        box, (passed, room) = self._visits[unit - 1].box, self._handed[unit]
        arrived = {i: gradient for i, gradient in enumerate(box.values) if gradient is not None}
        held: dict[int, Tensor] = {}
        storages: list[Storage] = []
        for i in sorted(arrived, key=lambda i: i not in passed):
            more = {**held, i: arrived[i]}
            parts = [storage for storage, _ in storages_of(more.values())]
            if sum(storage.nbytes() for storage in parts) <= room:
                held, storages = more, parts
        index = {storage_key(storage): i for i, storage in enumerate(storages)}
        self._gradient_forms[unit] = {
            i: (index[memory_key(gradient)], Form.of(gradient)) for i, gradient in held.items()
        }
        for i in held:
            box.values[i] = None
        return storages

    def put_gradient(self, unit: int, storages: list[Storage]) -> None:
        """Put the gradient back, from storages in the order of `take_gradient`."""
        box = self._visits[unit - 1].box
        for i, (index, form) in self._gradient_forms.pop(unit).items():
            box.values[i] = form.shown(storages[index])

    def close(self) -> None:
        """See `MicrobatchRun.close`."""
        super().close()
        self._copies.clear()
        self.parameters.clear()

    def _hold(self, visit: UnitVisit, held: SavedTensors, returned: list[Tensor]) -> None:
        """See `MicrobatchRun._hold`; what the unit returned moves away by itself, and is computed again."""
        if visit.selected is not None:
            visit.selected.leave_out(returned)
        super()._hold(visit, held, returned)

    def _input(self, unit: int) -> tuple[list[Tensor], tuple[int, ...]]:
        """What ``unit`` receives, and which of it moves; before the model calls it, what the unit before returned."""
        if unit in self._visits:
            return self._visits[unit].leaves, self._moving[unit]
        leaves = list(self._waiting)
        tensors = [i for i, leaf in enumerate(leaves) if memory_key(leaf) not in self._staying]
        return leaves, tuple([i for i in tensors if i in self._passed] or tensors)

    def stored(self, unit: int) -> list[tuple[Storage, torch.dtype]]:
        """Return the storages of what ``unit`` receives and of what moves with it, each once with its dtype."""
        leaves, positions = self._input(unit)
        return storages_of(leaves[position] for position in positions)

    def arrive(self, unit: int) -> UnitVisit:
        """Bring the model to ``unit`` and its arguments to this worker."""
        if unit not in self._visits:
            before = _storages(self._waiting)
            visit = super().arrive(unit)
            if visit is None:
                raise ModelError(
                    f"the model passes over unit {unit} in this forward (it is given vectors for tokens, or drops "
                    "layers), and several workers hand on what every unit returned; use one device"
                )
            received = _storages(visit.leaves)
            self._staying |= {storage for i, storage in received.items() if (unit, i) in self._effects.shared}
            addresses = set(before.values()) - self._staying
            self._moving[unit] = tuple(
                i
                for i, storage in received.items()
                if (i in visit.sources or storage in addresses) and storage not in self._staying
            )
            # Blocks return more than the next one asks for (attention weights): that stays where it is.
            handed = frozenset(received.values()) - self._staying
            self._passed = frozenset(i for i, storage in before.items() if storage in handed)
            self._handed[unit] = self._passed, sum(one.nbytes() for one in self.input_storages(unit))
        self._localise(self._visits[unit])
        return self._visits[unit]

    def _localise(self, visit: UnitVisit) -> None:
        """Have every argument on the worker's device; what has been copied there before is there."""
        device = self._glue.device()
        for i, leaf in enumerate(visit.leaves):
            if _has_moved(leaf):
                raise ModelError(
                    "a layer is given what an earlier layer was given or returned, and that has moved on to another "
                    "worker, which a trial of the model did not show; use one device"
                )
            if leaf.device != device:
                key = (device, memory_key(leaf), Form.of(leaf), versions_of([leaf])[0])
                if key not in self._copies:
                    self._copies[key] = (leaf, leaf.to(device, non_blocking=True))
                visit.leaves[i] = self._copies[key][1]

    def _advance(self, unit: int, waiting: list[Tensor]) -> UnitCall | Finished:
        self._ran_on[unit] = self._glue.worker
        present = _StillThere(self._glue.device())

        def piece() -> UnitCall | Finished:
            with present:
                return super(StagedRun, self)._advance(unit, waiting)

        return self._glue.run(self, piece)

    def _end_walk(self) -> None:
        self._glue.run(self, self._walk.close)

    def _descend(self, unit: int, roots: Roots) -> None:
        visit, device = self._visits[unit], self._glue.device()
        visit.box.values = [None if g is None else g.to(device) for g in visit.box.values]
        for position, source in visit.sources.items():
            _refill(source.tensor, visit.leaves[position])
        super()._descend(unit, roots)

    def _enter_last(self) -> None:
        self._pull(max(self._ran_on, default=0))
        super()._enter_last()

    def _pull(self, unit: int) -> None:
        """Note who goes backward through the code on the way to ``unit``, which reads weights where it ran."""
        self.pulled_by = self._glue.worker
        where = self._ran_on.get(unit, self.pulled_by)
        if where != self.pulled_by:
            self._glue.wait_for_loads(where)

    def _enter(self, unit: int) -> None:
        """Go backward through the code on the way to ``unit``, on the worker where it ran."""
        self._pull(unit)
        super()._enter(unit)

    def backward(self, unit: int, forward: Forward) -> None:
        """See `MicrobatchRun.backward`."""
        with saved_things_here():
            super().backward(unit, forward)

    def backward_from(self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        """See `MicrobatchRun.backward_from`."""
        with saved_things_here():
            super().backward_from(edges, gradients)


@contextmanager
def saved_things_here() -> Iterator[None]:
    """Say what is wrong where outer code goes backward from memory that is elsewhere."""
    try:
        yield
    except RuntimeError as error:
        # Torch's words for memory that has been given away.
        if "its data is not allocated yet" not in str(error):
            raise
        raise ModelError(
            "code between the layers has saved for its backward what a layer was given, in a way that a trial of the "
            "model did not show, and that has moved on to another worker; use one device"
        ) from error


class _StillThere(TorchFunctionMode):
    """While entered, refuses code that computes with what has moved on to another worker, and copies what stayed there.

    Args:
        device: of the worker that the code runs on.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ not in READ_NO_VALUE and any(map(_has_moved, leaves_of((args, kwargs)))):
            raise ModelError(
                "code between the layers uses what an earlier layer was given or returned, and that has moved on to "
                "another worker with the layer that follows; use one device"
            )
        if self._device.type != "cpu" and func.__name__ not in READ_NO_VALUE:
            args, kwargs = map_only(Tensor, self._here, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _here(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` as it is on the device of the worker, where it lies on another one's."""
        elsewhere = tensor.device.type == self._device.type and tensor.device != self._device
        return tensor.to(self._device) if elsewhere else tensor


def _has_moved(value: object) -> bool:
    """Whether ``value`` is a tensor whose memory is no longer here."""
    if not isinstance(value, Tensor) or not has_memory(value) or value.device.type == "meta":
        return False
    return value.numel() > 0 and value.untyped_storage().nbytes() == 0


def _storages(leaves: list[Tensor]) -> dict[int, int]:
    """The storage of each tensor, by its position in ``leaves``."""
    return {i: memory_key(leaf) for i, leaf in enumerate(leaves) if has_memory(leaf)}


def _refill(source: Tensor, leaf: Tensor) -> None:
    """Fill the storage of a tensor that was moved away again, where code before the unit may go backward from it."""
    storage = source.untyped_storage()
    if storage.nbytes() or box_of(source) is not None:
        return
    content = leaf.detach().untyped_storage()
    storage.resize_(content.nbytes())
    bytes_of(storage).copy_(bytes_of(content))
