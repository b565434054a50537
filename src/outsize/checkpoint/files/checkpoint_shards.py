"""The files of a checkpoint in Hugging Face layout: a shard per unit, an index, the config, what lies beside them.

The weights of a checkpoint in few files: a run writes one for each unit, and who takes the model wants one.
"""

import contextlib
import copy
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from outsize import files
from outsize.checkpoint.files.checkpoint_files import INDEX, Beside, write_beside
from outsize.checkpoint.files.checkpoint_format import (
    FileSum,
    Moved,
    StoredTensor,
    TensorWriter,
    bytes_of,
    read_elements,
    read_header,
    sum_the_rest,
    write_file,
)
from outsize.checkpoint.files.checkpoint_map import Chunk, write_plane
from outsize.checkpoint.files.checkpoint_reader import CheckpointReader, persistent_buffers
from outsize.model.sizes.model_spec import UnitSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class CheckpointWriter:
    """Writes the files of a checkpoint into a directory, unit by unit, in any order; the caller makes it whole or none.

    Every method raises `OSError` as the system says.

    Args:
        directory: is there, and holds no checkpoint.
        model: for names and rules; its buffers are written, its parameters are not read.
        units: all units of the model.
        moved: called after every piece that was written.
        tied: all names of each parameter, where the model's own come and go; None asks it in the end.

    Attributes:
        files: size and checksum of each file written, by name; all are synced.
    """

    def __init__(
        self,
        directory: Path,
        model: nn.Module,
        units: Sequence[UnitSpec],
        moved: Moved = lambda: None,
        tied: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self.files: dict[str, FileSum] = {}
        self._moved = moved
        self._tied = tied
        self._directory = directory
        self._model = model
        self._buffers = _saved_buffers(model)
        with_weights = [unit.index for unit in units if unit.all_tensors]
        self._numbers = {index: number for number, index in enumerate(with_weights, 1)}
        self._num_shards = len(with_weights) + bool(self._buffers)
        self._dtypes: Counter[torch.dtype] = Counter()
        self._weight_map: dict[str, str] = {}
        self._total_bytes = 0

    def write_unit(self, unit: UnitSpec, tensors: Mapping[str, Tensor]) -> None:
        """Write the shard of ``unit`` from its parameters by name, all of them in memory."""
        self._write_tensors(self.shard_of(unit), _checked(unit, tensors))

    def stream_unit(self, unit: UnitSpec, dtype: torch.dtype, chunks: Iterable[Chunk]) -> None:
        """Write the shard of ``unit`` from the chunks of its plane of weights.

        Where the architecture's checkpoints have other tensors than the model (experts one by one, say) and the plane
        comes in several chunks, it is laid down in a file first and converted from there.
        """
        names = _plain_names(self._model, unit, dtype)
        if names is None:
            self._stream_converted(unit, dtype, chunks)
            return
        shard = self.shard_of(unit)
        written = write_plane(self._directory / shard, unit, dtype, chunks, names, self._moved)
        self._note_plain(unit, dtype, written, names.values())

    def link_unit(self, unit: UnitSpec, dtype: torch.dtype, previous: Path, expected: FileSum) -> bool:
        """Take the shard of a unit that has not changed from another checkpoint; whether that went."""
        names = _plain_names(self._model, unit, dtype)
        shard = self.shard_of(unit)
        if names is None:
            return False
        try:
            files.system().link(previous / shard, self._directory / shard)
        except OSError:  # a file system without links, or a checkpoint that somebody changed
            return False
        self._note_plain(unit, dtype, expected, names.values())
        return True

    def shard_of(self, unit: UnitSpec) -> str:
        """Name of the file that holds the weights of ``unit``."""
        return self._name(self._numbers[unit.index])

    def finish(self, hf_config: "PretrainedConfig", beside: Beside) -> None:
        """Write everything but weights.

        Args:
            hf_config: the config to write, as the user gave it.
            beside: the files beside the weights.

        Raises:
            CheckpointError: what was written is not the whole model.
        """
        if self._buffers:
            self._write_tensors(self._name(self._num_shards), self._buffers)
        directory = self._directory
        index = {
            "metadata": {"total_size": self._total_bytes},
            "weight_map": dict(sorted(self._weight_map.items())),
        }
        files.write_text(directory / INDEX, json.dumps(index, indent=2) + "\n")
        _write_config(directory, self._model, hf_config, self._dtypes.most_common(1)[0][0])
        write_beside(directory, beside)
        CheckpointReader(directory, self._model, self._tied)  # every name and shape is there, or this raises
        sum_the_rest(directory, self.files)

    def close(self) -> None:
        """Nothing: no file is open between two calls."""

    def _name(self, number: int) -> str:
        return f"model-{number:05d}-of-{self._num_shards:05d}.safetensors"

    def _write_tensors(self, shard: str, tensors: dict[str, Tensor]) -> None:
        stored = _in_original_layout(self._model, tensors)
        self.files[shard] = write_file(self._directory / shard, stored, self._moved)
        self._weight_map.update(dict.fromkeys(stored, shard))
        self._total_bytes += sum(tensor.numel() * tensor.dtype.itemsize for tensor in stored.values())
        if tensors is not self._buffers:
            self._dtypes.update(_elements_by_dtype(tensors))

    def _stream_converted(self, unit: UnitSpec, dtype: torch.dtype, chunks: Iterable[Chunk]) -> None:
        raw = self._directory / f".{self.shard_of(unit)}.raw"
        try:
            plane = _whole_plane(unit, dtype, chunks, raw)
            parts = {t.name: plane[t.offset : t.offset + t.numel].view(t.shape) for t in unit.tensors}
            self.write_unit(unit, parts)
        finally:
            with contextlib.suppress(FileNotFoundError):
                files.system().unlink(raw)

    def _note_plain(self, unit: UnitSpec, dtype: torch.dtype, written: FileSum, names: Iterable[str]) -> None:
        shard, numel = self.shard_of(unit), sum(tensor.numel for tensor in unit.tensors)
        self.files[shard] = written
        self._weight_map.update(dict.fromkeys(names, shard))
        self._dtypes[dtype] += numel
        self._total_bytes += numel * dtype.itemsize


def _plain_names(model: nn.Module, unit: UnitSpec, dtype: torch.dtype) -> dict[str, str] | None:
    """Return what each parameter is called in a checkpoint; None where one is more than renamed there."""
    tensors = {t.name: torch.empty(t.shape, dtype=dtype, device="meta") for t in unit.tensors}
    names = {id(tensor): name for name, tensor in tensors.items()}
    stored = _in_original_layout(model, dict(tensors))
    matched = {names[id(tensor)]: name for name, tensor in stored.items() if id(tensor) in names}
    return matched if len(matched) == len(tensors) == len(stored) else None


def _whole_plane(unit: UnitSpec, dtype: torch.dtype, chunks: Iterable[Chunk], raw: Path) -> Tensor:
    """Return the plane itself where it comes in one chunk, else a mapping of the file ``raw``."""
    with files.open_binary(raw, "w") as file:
        for _, chunk in chunks:
            if chunk.numel() == unit.numel:
                return chunk
            file.write(bytes_of(chunk))
    return torch.from_file(str(raw), shared=False, size=unit.numel, dtype=dtype)


def _checked(unit: UnitSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of ``unit`` by name; what ``read`` gave has to be complete and in shape."""
    for spec in unit.all_tensors:
        if spec.name not in tensors or tuple(tensors[spec.name].shape) != spec.shape:
            got = tuple(tensors[spec.name].shape) if spec.name in tensors else "nothing"
            raise ValueError(f"unit {unit.name}: {spec.name} has shape {spec.shape}, read returned {got}")
    return {spec.name: tensors[spec.name].detach() for spec in unit.all_tensors}


def _in_original_layout(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` as the architecture's checkpoints have them, e.g. experts one by one."""
    from transformers.core_model_loading import revert_weight_conversion

    return cast("dict[str, Tensor]", revert_weight_conversion(cast(Any, model), tensors))


def _elements_by_dtype(tensors: Mapping[str, Tensor]) -> Counter[torch.dtype]:
    count: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        count[tensor.dtype] += tensor.numel()
    return count


def _saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong in a checkpoint, each once."""
    ignored = getattr(cast(Any, model), "_keys_to_ignore_on_save", None) or ()
    once = {
        id(b): (name, b) for name, b in reversed(persistent_buffers(model).items()) if name not in ignored
    }
    return dict(once.values())


def _write_config(
    directory: Path, model: nn.Module, hf_config: "PretrainedConfig", dtype: torch.dtype
) -> None:
    """Write ``config.json`` and, for a model that generates, ``generation_config.json``."""
    from transformers import GenerationConfig

    config = copy.deepcopy(hf_config)
    nested = [getattr(config, name) for name in config.sub_configs]
    for part in (config, *(part for part in nested if part is not None)):
        part.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    files.write_text(directory / "config.json", config.to_json_string(use_diff=True))
    if cast(Any, model).can_generate():
        generation = GenerationConfig.from_model_config(config)
        files.write_text(directory / "generation_config.json", generation.to_json_string(use_diff=True))


# What transformers writes into one file by default.
_SHARD_BYTES = 5 * 10**9
_PIECE_BYTES = 1 << 23


def join_shards(shards: Sequence[Path], target: Path, shard_bytes: int = _SHARD_BYTES) -> dict[str, FileSum]:
    """Write the tensors of ``shards`` into ``target``, as one file or as few as hold ``shard_bytes`` each.

    A piece of a tensor is in memory at a time. Every method of writing raises `OSError` as the system says.

    Returns:
        Sizes and checksums of the shards, by name, where each was read from its beginning to its end.

    Raises:
        CheckpointError: a shard cannot be read.
    """
    stored = [tensor for shard in shards for tensor in read_header(shard).values()]
    groups = list(_groups(stored, shard_bytes))
    read = {shard: _Reading(shard) for shard in shards}
    if len(groups) == 1:
        _write(target / "model.safetensors", groups[0], read)
        return _sums(read)
    weight_map = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write(target / name, group, read)
        weight_map.update({tensor.name: name for tensor in group})
    index = {
        "metadata": {"total_size": sum(map(_bytes, stored))},
        "weight_map": dict(sorted(weight_map.items())),
    }
    files.write_text(target / INDEX, json.dumps(index, indent=2) + "\n", sync=True)
    return _sums(read)


class _Reading:
    """The checksum of a file as its pieces are read, one behind the other; a piece out of order ends it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_bytes = self.crc32 = 0

    def take(self, offset: int, data: memoryview) -> None:
        """Take the bytes at ``offset``; of the first ones, the header before them is read."""
        if self.num_bytes == 0:
            with files.open_binary(self._path, "r") as file:
                header = file.read(offset)
            self.num_bytes, self.crc32 = len(header), zlib.crc32(header)
        if self.num_bytes != offset:
            self.num_bytes = -1
            return
        self.num_bytes, self.crc32 = offset + len(data), zlib.crc32(data, self.crc32)


def _sums(read: Mapping[Path, _Reading]) -> dict[str, FileSum]:
    return {
        path.name: FileSum(each.num_bytes, each.crc32)
        for path, each in read.items()
        if each.num_bytes == path.stat().st_size
    }


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


def _write(path: Path, tensors: Sequence[StoredTensor], read: Mapping[Path, _Reading]) -> None:
    # The larger items first, so that every tensor is aligned for its dtype.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    with TensorWriter(path, ((t.name, t.dtype, t.shape) for t in ordered)) as file:
        for tensor in ordered:
            step = _PIECE_BYTES // tensor.dtype.itemsize
            for start in range(0, tensor.numel, step):
                piece = torch.empty(min(step, tensor.numel - start), dtype=tensor.dtype)
                read_elements(tensor, start, start + len(piece), piece)
                data = bytes_of(piece)
                read[tensor.path].take(tensor.offset + start * tensor.dtype.itemsize, data)
                file.write(data)
        file.sync()


def _bytes(tensor: StoredTensor) -> int:
    return tensor.numel * tensor.dtype.itemsize
