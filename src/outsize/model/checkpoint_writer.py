"""Writing a checkpoint in Hugging Face layout, one unit in memory at a time.

All files go into a hidden directory beside the destination; when each is complete, synced and seen to hold
what the model needs, one rename makes it the checkpoint. So there is a whole checkpoint or none, whatever
goes wrong.
"""

import copy
import errno
import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from outsize import files
from outsize.errors import StorageError
from outsize.model.checkpoint import CheckpointReader, persistent_buffers
from outsize.model.checkpoint_files import INDEX, locate_checkpoint
from outsize.model.checkpoint_format import write_file
from outsize.model.spec import UnitSpec
from outsize.units import format_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# What belongs to a tokenizer, and how the model generates; weights and config are written anew.
_COPIED = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "*.tiktoken",
    "generation_config.json",
)


def write_checkpoint(
    directory: str | os.PathLike[str],
    model_skeleton: nn.Module,
    hf_config: "PretrainedConfig",
    units: Sequence[UnitSpec],
    read: Callable[[UnitSpec], Mapping[str, Tensor]],
    *,
    tokenizer_source: "str | os.PathLike[str] | PreTrainedTokenizerBase | None" = None,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint that ``from_pretrained`` loads, with one shard per unit, and return its directory.

    Names and layout are those of ``save_pretrained``; a tied parameter is written once. The dtype in
    ``config.json`` is the one that most parameters come in.

    Args:
        directory: where it shall stand; made together with its parents.
        model_skeleton: the model, for names and rules; its buffers are written, its parameters are not read.
        hf_config: the config to write, as the user gave it.
        units: all units of the model.
        read: returns the parameters of a unit by name, in their shapes. It is called once per unit, and what
            it returned is let go before the next call.
        tokenizer_source: directory or hub id to copy the tokenizer and the generation config from, or a
            tokenizer.
        overwrite: whether a directory that is there already is replaced, once the new one is complete.

    Raises:
        StorageError: the disk is full, the place is not writable, or something is there already.
    """
    final = Path(directory).expanduser().absolute()
    if not overwrite and final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise StorageError(f"{final} exists already; choose another directory or remove it")
    units = [unit for unit in units if unit.tensors]
    with _storage_errors(final), _becoming(final) as partial:
        dtypes = _write_weights(partial, model_skeleton, units, read)
        _write_config(partial, model_skeleton, hf_config, dtypes.most_common(1)[0][0])
        _copy_tokenizer(partial, tokenizer_source, with_code=bool(getattr(hf_config, "auto_map", None)))
        CheckpointReader(partial, model_skeleton)  # every name and shape is there, or this raises
        for path in partial.iterdir():
            files.sync(path)
    return final


def _write_weights(
    directory: Path,
    model: nn.Module,
    units: Sequence[UnitSpec],
    read: Callable[[UnitSpec], Mapping[str, Tensor]],
) -> Counter[torch.dtype]:
    """Write all shards and their index; return how many elements came in which dtype."""
    buffers = _saved_buffers(model)
    num_shards = len(units) + bool(buffers)
    dtypes: Counter[torch.dtype] = Counter()
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number in range(1, num_shards + 1):
        if number <= len(units):
            tensors = _checked(units[number - 1], read(units[number - 1]))
            dtypes.update(_elements_by_dtype(tensors))
        else:
            tensors = buffers
        stored = _in_original_layout(model, tensors)
        file = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        write_file(directory / file, stored)
        weight_map.update(dict.fromkeys(stored, file))
        total_bytes += sum(tensor.numel() * tensor.dtype.itemsize for tensor in stored.values())
        del tensors, stored
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    files.write_text(directory / INDEX, json.dumps(index, indent=2) + "\n")
    return dtypes


def _checked(unit: UnitSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of ``unit`` by name; what ``read`` gave has to be complete and in shape."""
    for spec in unit.tensors:
        if spec.name not in tensors or tuple(tensors[spec.name].shape) != spec.shape:
            got = tuple(tensors[spec.name].shape) if spec.name in tensors else "nothing"
            raise ValueError(f"unit {unit.name}: {spec.name} has shape {spec.shape}, read returned {got}")
    return {spec.name: tensors[spec.name].detach() for spec in unit.tensors}


def _in_original_layout(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` as the architecture's checkpoints have them, e.g. experts one by one."""
    from transformers.core_model_loading import revert_weight_conversion

    return cast("dict[str, Tensor]", revert_weight_conversion(cast(Any, model), tensors))


def _elements_by_dtype(tensors: Mapping[str, Tensor]) -> Counter[torch.dtype]:
    """Return how many elements there are of each dtype."""
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


def _copy_tokenizer(directory: Path, source: Any, with_code: bool) -> None:
    """Copy tokenizer files, a generation config where there is one, and the code that a model brings."""
    if source is None:
        return
    if hasattr(source, "save_pretrained"):
        source.save_pretrained(directory)
        return
    origin = locate_checkpoint(source)
    for pattern in (*_COPIED, "*.py") if with_code else _COPIED:
        for path in origin.glob(pattern):
            if path.is_file():
                files.copy(path, directory / path.name)


@contextmanager
def _becoming(final: Path) -> Iterator[Path]:
    """Give out a hidden directory beside ``final``; at the end it takes that place, or it is removed."""
    files.make_directories(final.parent)
    token = uuid.uuid4().hex[:8]
    partial = final.parent / f".{final.name}.partial-{token}"
    former = final.parent / f".{final.name}.former-{token}"
    files.system().mkdir(partial)
    try:
        yield partial
        files.sync(partial)
        if final.exists():
            files.system().rename(final, former)
        files.system().rename(partial, final)
        files.sync(final.parent)
    except BaseException:  # Ctrl-C as well: nothing half-written stays, and what was there comes back
        files.system().remove_tree(partial)
        if former.exists() and not final.exists():
            files.system().rename(former, final)
        raise
    if former.is_dir():
        files.system().remove_tree(former)
    elif former.exists():
        files.system().unlink(former)


@contextmanager
def _storage_errors(final: Path) -> Iterator[None]:
    """Say what a failing file system means."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = format_bytes(shutil.disk_usage(final.parent).free)
            raise StorageError(
                f"{final}: the disk is full ({free} free once the partial copy was removed); "
                "free some space or choose another place"
            ) from error
        raise StorageError(f"{final} cannot be written: {error}; choose a place you can write to") from error
