"""Recompute only what a backward needs, with the random numbers of the forward.

A block ends in a product, say, of its MLP and in a sum with what it received. The backward of both needs what went into
them, not what comes out, and nobody looks at the output of a recompute. For the blocks of today's language models that
last product is a quarter of the forward.

The story of one recompute:

1. Autograd saves tensors; each is counted, but for random states: attention saves two on a GPU, and none on the CPU
   that tried it. Of a trial (`runtime.trial.calibrate`) it is known how many there are, and with which of them the last
   operation that saves anything begins.
2. Just before that operation a dispatch mode is entered. It sees operations below autograd, when their graph is made.
3. Once all tensors are saved, operations of `SKIPPED` return memory of the right form that nobody has written to.
4. An operation that is not one of them, or one more tensor to save, was not in the trial: the unit is run again, in
   full, and is from now on. The same where someone still holds such memory when nothing but the graph should be left,
   as a module does that keeps an activation.
5. A unit into which somebody looks with hooks is run in full: hooks see what was computed.
6. What an MLP in parts makes (`model.tiled`) is left out as one operation, whatever is in it.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from outsize.compat import torch_private
from outsize.compat.torch_private import OperationMode, operations
from outsize.model.tiled import Call
from outsize.runtime.forward.unit_facts import Needed

T = TypeVar("T")
# What takes time and has no effect but its result.
SKIPPED = operations(
    "mm.default",
    "addmm.default",
    "bmm.default",
    "add.Tensor",
    "mul.Tensor",
    "cat.default",
    "gelu.default",
    "pow.Tensor_Scalar",
    "relu.default",
    "silu.default",
    "tanh.default",
    "clone.default",
    "_to_copy.default",
)
# What takes none, and shows the memory that it is given.
PASSED = operations(
    "detach.default",
    "view.default",
    "_unsafe_view.default",
    "_reshape_alias.default",
    "t.default",
    "transpose.int",
    "permute.default",
    "expand.default",
    "unsqueeze.default",
    "squeeze.dim",
    "split.Tensor",
    "slice.Tensor",
    "alias.default",
)
PRODUCTS = operations("mm.default", "addmm.default", "bmm.default") | {Call.joined}


def _is_random_state(tensor: Tensor) -> bool:
    """Return whether a saved tensor may be a seed or an offset of random numbers, which attention saves on GPUs."""
    return not tensor.is_floating_point() and tensor.numel() <= 2


class _UnforeseenError(BaseException):
    """Not an `Exception`: the model's own code is not to catch it."""


@dataclass(slots=True)
class Trial:
    """Notes what a forward with a graph saves, and which operations it ran when; for one forward.

    Attributes:
        ops: operations in order, appended by whoever sees them.
        saved_at: for each tensor saved, how many operations had run; without random states.
        state_at: how many had run where a random state was last saved.
    """

    ops: list[Any]
    saved_at: list[int]
    state_at: int = -1

    def hooks(self) -> Any:
        """A context in which the forward runs."""

        def save(tensor: Tensor) -> Tensor:
            if _is_random_state(tensor):
                self.state_at = len(self.ops)
            else:
                self.saved_at.append(len(self.ops))
            return tensor.detach()

        return torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)

    def parts(self) -> TorchFunctionMode:
        """A context, as well, in which operations inside an MLP in parts are noted as that."""

        def note(call: Call, rows: Tensor) -> list[Tensor]:
            start = len(self.ops)
            outputs = call.joined(rows)
            self.ops[start:] = [Call.joined] * (len(self.ops) - start)
            return outputs

        return _OfParts(note)

    def needed(self) -> Needed | None:
        """What a recompute may leave out; None where that is nothing worth it, or not known to be safe."""
        if not self.saved_at:
            return None
        last = self.saved_at[-1]
        if self.state_at > last:
            return None
        rest = self.ops[last:]
        enter_at = sum(at < last for at in self.saved_at)
        if (
            not enter_at
            or PRODUCTS.isdisjoint(rest)
            or not (SKIPPED | PASSED | {Call.joined}).issuperset(rest)
        ):
            return None
        return Needed(len(self.saved_at), enter_at, Call.joined in rest)


class Shortcuts:
    """Runs units again, as far as their backward needs.

    Args:
        needed: by unit; a unit that is not there is run in full.
        look: called at every tensor saved or used, to keep to a budget.
        watched: whether somebody looks into a unit, see `is_watched`.
    """

    def __init__(
        self,
        needed: Mapping[int, Needed],
        look: Callable[[], None],
        watched: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._needed = dict(needed)
        self._look = look
        self._watched = watched

    def run(self, unit: int, call: Callable[[], T]) -> T:
        """Return what ``call`` makes of its outputs, whose graph is whole and whose values are anything.

        Args:
            unit: the unit.
            call: runs it, and returns nothing that holds an output: `microbatch.roots_of` it, say.
        """
        needed = self._needed.get(unit)
        if needed is not None and not self._watched(unit):
            shortened = _Shortened(needed, self._look)
            try:
                with shortened:
                    roots = call()
                if not shortened.is_held():
                    return roots
            except _UnforeseenError:
                pass  # run in full below, as it is from now on
            self._needed.pop(unit, None)
        return call()


class _Shortened:
    """The context of one shortened recompute."""

    def __init__(self, needed: Needed, look: Callable[[], None]) -> None:
        self._needed = needed
        self._look = look
        self._count = 0
        self._mode: _Skip | None = None
        self._modes = ExitStack()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, self._use)

    def __enter__(self) -> None:
        self._hooks.__enter__()
        if self._needed.in_parts:
            # Modes over functions nest within those of the user, so this one does not begin amid an operation.
            self._modes.enter_context(_OfParts(self._joined))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._modes.__exit__(kind, error, trace)
        self._hooks.__exit__(kind, error, trace)

    def is_held(self) -> bool:
        """Whether a tensor that was not computed is still there."""
        fresh = self._mode.made if self._mode is not None else []
        return not all(storage.expired() for storage in fresh)  # type: ignore[no-untyped-call]

    def _save(self, tensor: Tensor) -> Tensor:
        self._look()
        saved = tensor.detach()  # a result that its own graph holds would keep that graph alive for ever
        if _is_random_state(tensor):
            if self._mode is not None and self._mode.skips:
                raise _UnforeseenError
            return saved
        self._count += 1
        if self._count > self._needed.num_saved:
            raise _UnforeseenError
        if self._count == self._needed.enter_at:
            self._mode = _Skip()
            self._modes.enter_context(self._mode)
        if self._mode is not None:
            self._mode.skips = self._count == self._needed.num_saved
        return saved

    def _use(self, tensor: Tensor) -> Tensor:
        self._look()
        return tensor

    def _joined(self, call: Call, rows: Tensor) -> list[Tensor]:
        if self._mode is None or not self._mode.skips:
            return call.joined(rows)
        return [self._mode.note(leaf) for leaf in call.unwritten(rows)]


class _Skip(OperationMode):
    """Leaves operations out while ``skips``."""

    def __init__(self) -> None:
        super().__init__()
        self.skips = False
        self.made: list[StorageWeakRef] = []

    def handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, or leave it out."""
        if not self.skips or func in PASSED:
            return func(*args, **kwargs)
        if func not in SKIPPED:
            raise _UnforeseenError
        device = next(
            leaf.device for leaf in torch_private.leaves_of((args, kwargs)) if isinstance(leaf, Tensor)
        )
        formed = func(
            *_forms(args), **_forms({**kwargs, **({"device": "meta"} if "device" in kwargs else {})})
        )
        return self.note(
            torch.empty_strided(formed.size(), formed.stride(), dtype=formed.dtype, device=device)
        )

    def note(self, unwritten: Tensor) -> Tensor:
        """Remember ``unwritten``, and return it."""
        self.made.append(StorageWeakRef(unwritten.untyped_storage()))  # type: ignore[no-untyped-call]
        return unwritten


class _OfParts(TorchFunctionMode):
    """While active, what MLPs in parts make is made by ``instead``, called with the call and its tokens."""

    def __init__(self, instead: Callable[[Call, Tensor], list[Tensor]]) -> None:
        super().__init__()
        self._instead = instead

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._instead(*args) if func is Call.joined else func(*args, **(kwargs or {}))


def _forms(values: Any) -> Any:
    """``values`` with tensors of the same form in place of tensors, and no memory."""
    return torch_private.map_only(
        Tensor, lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta"), values
    )
