"""Frozen parts that a codec writes: made from a model's checkpoint, with their errors, and as they decode."""

from collections.abc import Mapping
from statistics import median

import torch
from torch import Tensor

from outsize.checkpoint.files.checkpoint_reader import WeightSource
from outsize.model.sizes.model_spec import FrozenPart, ModelSpec, UnitSpec
from outsize.runtime.forward.binding import TORCH_DTYPE
from outsize.runtime.ops.decoding import decode, encode
from outsize.storage.arena import Arena
from outsize.storage.home import Home


def fill_encoded(
    home: Home, unit: UnitSpec, part: FrozenPart, source: WeightSource, arena: Arena
) -> dict[str, float]:
    """Encode a part of ``unit`` into ``home``; returns the error of each tensor, see `errors_of`.

    Raises:
        CheckpointError: a tensor cannot be read.
        StorageError: the home cannot be written.
    """
    values = arena.take(part.num_bytes, "frozen weights").view(TORCH_DTYPE[part.dtype])
    decoded = arena.take(part.num_bytes, "frozen weights, decoded").view(TORCH_DTYPE[part.dtype])
    encoded = arena.take(part.encoded_bytes, "frozen weights, encoded")
    _read(part, source, values)
    encode(part, values, encoded)
    decode(part, encoded, decoded)
    home.write(unit.index, part.plane, 0, encoded)
    return errors_of(part, values, decoded)


def errors_of(part: FrozenPart, values: Tensor, decoded: Tensor) -> dict[str, float]:
    """Return, by name, the root mean square of each tensor's error by that of its weights; 0 for zeros."""
    found = {}
    for tensor in part.tensors:
        stretch = slice(tensor.offset, tensor.offset + tensor.numel)
        one = values[stretch].float()
        size = float(torch.linalg.vector_norm(one))
        error = float(torch.linalg.vector_norm(decoded[stretch].float().sub_(one)))
        found[tensor.name] = error / size if size else 0.0
    return found


def summary(errors: Mapping[str, float]) -> str:
    """Say errors by name in a few words; there is at least one."""
    worst = max(errors, key=lambda name: errors[name])
    return (
        f"root mean square error {median(errors.values()):.2%} of a tensor's weights (median), {errors[worst]:.2%} at "
        f"most ({worst})"
    )


class Decoded:
    """Weights as they arrive on a device: what a codec writes as it decodes, everything else as it is."""

    def __init__(self, source: WeightSource, spec: ModelSpec) -> None:
        self._source = source
        parts = [part for unit in spec.units for part in unit.frozen if part.codec is not None]
        self._part_of = {tensor.name: (part, tensor) for part in parts for tensor in part.tensors}
        self._last: tuple[FrozenPart, Tensor] | None = None

    def read(self, name: str, start: int, stop: int, into: Tensor) -> None:
        """See `WeightSource.read`; the part that was read last is kept."""
        if name not in self._part_of:
            self._source.read(name, start, stop, into)
            return
        part, tensor = self._part_of[name]
        if self._last is None or self._last[0] is not part:
            self._last = None
            self._last = part, self._decode(part)
        into.view(-1).copy_(self._last[1][tensor.offset + start : tensor.offset + stop])

    def _decode(self, part: FrozenPart) -> Tensor:
        values = torch.empty(part.numel, dtype=TORCH_DTYPE[part.dtype])
        _read(part, self._source, values)
        encoded = torch.empty(part.encoded_bytes, dtype=torch.uint8)
        encode(part, values, encoded)
        decode(part, encoded, values)
        return values


def _read(part: FrozenPart, source: WeightSource, into: Tensor) -> None:
    """Read a whole part; what lies between tensors is zero."""
    into.zero_()
    for tensor in part.tensors:
        source.read(tensor.name, 0, tensor.numel, into[tensor.offset : tensor.offset + tensor.numel])
