"""Copy a unit's weights from the offload store to the device: all of them, or rows of an embedding."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outsize.compat.torch_private import parameters_of
from outsize.inference.kv_cache import no_grad_parameter
from outsize.model.sizes.model_spec import PLANE_ELEMENTS, ModelSpec, TensorSpec, UnitSpec
from outsize.planner.program.program import Kind, Op
from outsize.runtime.device.device import Device
from outsize.runtime.forward.binding import TORCH_DTYPE, weight_planes
from outsize.runtime.ops.context import StepContext
from outsize.runtime.ops.load_ops import WeightOps
from outsize.storage.home import Home
from outsize.storage.ledger import Arena, Ledger, Pinner

# Rows that are read from disk together: a few MiB keep its queue full.
READ_BYTES = 4 * 2**20
# Rows that are worth a copy each: to gather them first goes through pageable memory.
LARGE_ROW_BYTES = 2**20


class Source:
    """Weights at rest.

    Args:
        spec: the model.
        device: what computes.
        home: where the weights rest.
        ledger: where a buffer between disk and device is reserved.
        pinner: what pins it.

    Attributes:
        ledger: as given.
        new_arena: makes an arena of host memory like its own.
        partly: units of which only some tensors come up, as they lie on the device then.
    """

    def __init__(
        self, spec: ModelSpec, device: Device, home: Home, ledger: Ledger, pinner: Pinner | None = None
    ) -> None:
        self._spec = spec
        self._device = device
        self._home = home
        self.ledger = ledger
        self.new_arena = partial(Arena, ledger=ledger, tier="host", pinner=pinner)
        self._arena = self.new_arena()
        self._buffers: list[Tensor] = []
        if not home.in_memory and not device.in_place:
            most = max(unit.link_bytes(spec.dtype) for unit in spec.units)
            self._buffers = self._arena.take_all([most, most], "weights between disk and device")
        self._marks: list[object] = [None, None]
        self._turn = 0
        self._slot = [torch.empty(0, dtype=torch.uint8)]
        self._weights = WeightOps(spec, device, home, self._slot, self._buffers)
        self._row_bytes = 0
        self._tables: dict[tuple[int, str, tuple[int, ...]], Tensor] = {}
        self._counting = threading.Lock()  # the loader and the caller both fetch rows
        self.partly: dict[int, UnitSpec] = {}
        self._nothing = StepContext(number=0, learning_rate=0.0, microbatches=())

    @property
    def bytes_moved(self) -> int:
        """Bytes read from home since the source was opened."""
        return self._weights.bytes_up + self._row_bytes

    def planes(self, unit: int, memory: Tensor) -> tuple[Tensor, ...]:
        """The weights of ``unit`` as they lie in a piece of memory: its plane, and those of its frozen parts."""
        return weight_planes(self.partly.get(unit, self._spec.units[unit]), self._spec.dtype, memory)

    def load(self, unit: int, memory: Tensor) -> None:
        """Bring the weights of ``unit`` into ``memory``; on the lane ``up``, or before any place there is allocated.

        Raises:
            StorageError: the disk failed.
        """
        if unit in self.partly:
            self._load_partly(self._spec.units[unit], self.partly[unit], memory)
            return
        self._slot[0] = memory
        if not self._buffers:
            self._weights.load(Op(kind=Kind.LOAD, unit=unit, worker=0, slot=0), self._nothing)
            return
        buffer, self._turn = self._turn, 1 - self._turn  # one is copied from while the disk fills the other
        if self._marks[buffer] is not None:
            self._device.wait("", self._marks[buffer])
        self._weights.read(Op(kind=Kind.READ, unit=unit, buffer=buffer), self._nothing)
        self._weights.load(Op(kind=Kind.LOAD, unit=unit, worker=0, slot=0, buffer=buffer), self._nothing)
        self._marks[buffer] = self._device.record("up")

    def _load_partly(self, unit: UnitSpec, part: UnitSpec, memory: Tensor) -> None:
        """Bring the tensors of ``part`` from where they lie in the plane of ``unit``."""
        (plane,) = weight_planes(part, self._spec.dtype, memory)
        places = {tensor.name: tensor for tensor in unit.tensors}
        for tensor in part.tensors:
            place = places[tensor.name]
            flat = TensorSpec(name=place.name, shape=(1, place.numel), offset=place.offset)
            row = self.rows(unit.index, flat, torch.tensor([0]))
            plane[tensor.offset : tensor.offset + tensor.numel].copy_(row[0])

    def table(self, unit: int, tensor: TensorSpec) -> Tensor | None:
        """Return a tensor of ``unit`` as it lies in a host home; None where it does not lie there as it is.

        Made once, and best before a forward is measured: a view of the home is none of what that takes of the device.
        """
        plane = self._home.lend(unit, "weights")
        if plane is None or unit in self._home.on_device:
            return None
        key = (unit, tensor.name, tensor.shape)
        if key not in self._tables:
            self._tables[key] = plane[tensor.offset : tensor.offset + tensor.numel].view(tensor.shape)
        return self._tables[key]

    def rows(self, unit: int, tensor: TensorSpec, numbers: Tensor) -> Tensor:
        """Return rows of a tensor of ``unit``, on the device: [len(numbers), ...].

        Args:
            unit: which.
            tensor: one of its tensors.
            numbers: of the rows, ascending and each once, on the CPU.
        """
        width = tensor.numel // tensor.shape[0]
        dtype = TORCH_DTYPE[self._spec.dtype]
        rows = torch.empty((len(numbers), *tensor.shape[1:]), dtype=dtype, device=self._device.torch_device)
        table = self.table(unit, tensor)
        if table is not None:
            # From where they lie pinned: an expert, not a token.
            if width * dtype.itemsize >= LARGE_ROW_BYTES:
                for row, number in enumerate(numbers.tolist()):
                    self._device.copy(rows[row], table[number])
            else:
                self._device.copy(rows, table.index_select(0, numbers))
            self._count(rows.nbytes)
            return rows
        if not len(numbers):
            return rows
        done = 0
        count = max(READ_BYTES // max(width * dtype.itemsize, 2 * 4096), 1)
        for part in numbers.tensor_split(tuple(range(count, len(numbers), count))):
            read = self._read_rows(unit, tensor, part, width, dtype)
            self._device.copy(rows[done : done + len(part)], read.view(len(part), *tensor.shape[1:]))
            done += len(part)
        return rows

    def _read_rows(
        self, unit: int, tensor: TensorSpec, numbers: Tensor, width: int, dtype: torch.dtype
    ) -> Tensor:
        """Read the stretches of the plane that rows lie in, all in flight together, and pick the rows out."""
        starts = tensor.offset + numbers * width
        lows, highs = starts // PLANE_ELEMENTS, (starts + width - 1) // PLANE_ELEMENTS + 1
        apart = lows[1:] > highs[:-1]  # neighbours are joined
        held_by = nn.functional.pad(apart.cumsum(0), (1, 0))
        firsts = lows[nn.functional.pad(apart, (1, 0), value=True)] * PLANE_ELEMENTS
        sizes = highs[nn.functional.pad(apart, (0, 1), value=True)] * PLANE_ELEMENTS - firsts
        with Arena() as arena:
            memory = arena.take(int(sizes.sum()) * dtype.itemsize, "rows").view(dtype)
            pieces = memory.tensor_split(sizes.cumsum(0)[:-1])
            self._home.read_ranges(unit, "weights", list(zip(firsts.tolist(), pieces, strict=True)))
            self._count(memory.nbytes)
            at = (sizes.cumsum(0) - sizes - firsts)[held_by] + starts
            return memory.as_strided((len(memory) - width + 1, width), (1, 1)).index_select(0, at)

    def _count(self, num_bytes: int) -> None:
        with self._counting:
            self._row_bytes += num_bytes

    def close(self) -> None:
        """Give buffers back; idempotent."""
        self._arena.close()


def is_table(module: nn.Module, unit: UnitSpec) -> bool:
    """Whether ``module`` does nothing but look rows of its one tensor up."""
    return (
        unit.kind == "embedding"
        and len(unit.all_tensors) == len(unit.tensors) == 1
        and type(module).forward is nn.Embedding.forward
        and module.max_norm is None
    )


class Table:
    """Calls an embedding on the rows that its ids name, and no others.

    The module's own forward runs, over a table of those rows and ids that count in it; the values are the same, since a
    lookup computes nothing.
    """

    def __init__(self, module: nn.Module, unit: UnitSpec, source: Source) -> None:
        self._module = module
        self._unit = unit.index
        self._tensor: TensorSpec = unit.tensors[0]
        self._source = source

    def run(self, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module's own forward."""
        name, ids = next(
            ((name, kwargs[name]) for name in ("input", "input_ids") if name in kwargs), ("", None)
        )
        token_ids: Tensor = args[0] if ids is None else ids
        numbers, places = torch.unique(token_ids, return_inverse=True)
        _check(numbers, self._tensor)
        table = self._source.rows(self._unit, self._tensor, numbers.cpu())
        args, kwargs = ((places, *args[1:]), kwargs) if ids is None else (args, {**kwargs, name: places})
        module = self._module
        weight, padding = parameters_of(module)["weight"], module.padding_idx
        parameters_of(module)["weight"], module.padding_idx = no_grad_parameter(table), None  # type: ignore[assignment]
        try:
            return real(*args, **kwargs)
        finally:
            parameters_of(module)["weight"], module.padding_idx = weight, padding


def _check(numbers: Tensor, tensor: TensorSpec) -> None:
    if len(numbers) and (int(numbers[0]) < 0 or int(numbers[-1]) >= tensor.shape[0]):
        raise IndexError(
            f"token ids {int(numbers[0])} to {int(numbers[-1])} for an embedding of {tensor.shape[0]} rows"
        )
