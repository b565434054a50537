"""The weights of a checkpoint in few files: a run writes one for each unit, and who takes the model wants one."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from outsize import files
from outsize.checkpoint.files.checkpoint_files import INDEX
from outsize.checkpoint.files.checkpoint_format import (
    StoredTensor,
    TensorWriter,
    bytes_of,
    read_elements,
    read_header,
)

# What transformers writes into one file by default.
_SHARD_BYTES = 5 * 10**9
_PIECE_BYTES = 1 << 23


def join_shards(shards: Sequence[Path], target: Path, shard_bytes: int = _SHARD_BYTES) -> None:
    """Write the tensors of ``shards`` into ``target``, as one file or as few as hold ``shard_bytes`` each.

    A piece of a tensor is in memory at a time. Every method of writing raises `OSError` as the system says.

    Raises:
        CheckpointError: a shard cannot be read.
    """
    stored = [tensor for shard in shards for tensor in read_header(shard).values()]
    groups = list(_groups(stored, shard_bytes))
    if len(groups) == 1:
        _write(target / "model.safetensors", groups[0])
        return
    weight_map = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write(target / name, group)
        weight_map.update({tensor.name: name for tensor in group})
    index = {
        "metadata": {"total_size": sum(map(_bytes, stored))},
        "weight_map": dict(sorted(weight_map.items())),
    }
    files.write_text(target / INDEX, json.dumps(index, indent=2) + "\n", sync=True)


def _groups(stored: Sequence[StoredTensor], most_bytes: int) -> Iterator[list[StoredTensor]]:
    """Yield tensors in order, as many at a time as fit, and at least one."""
    group: list[StoredTensor] = []
    size = 0
    for tensor in stored:
        if group and size + _bytes(tensor) > most_bytes:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += _bytes(tensor)
    yield group


def _write(path: Path, tensors: Sequence[StoredTensor]) -> None:
    # The larger items first, so that every tensor is aligned for its dtype.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    with TensorWriter(path, ((t.name, t.dtype, t.shape) for t in ordered)) as file:
        for tensor in ordered:
            step = _PIECE_BYTES // tensor.dtype.itemsize
            for start in range(0, tensor.numel, step):
                piece = torch.empty(min(step, tensor.numel - start), dtype=tensor.dtype)
                read_elements(tensor, start, start + len(piece), piece)
                file.write(bytes_of(piece))
        file.sync()


def _bytes(tensor: StoredTensor) -> int:
    return tensor.numel * tensor.dtype.itemsize
