"""List the files of a checkpoint directory, the tensors they hold, and the files beside the weights.

They are read once, when a run begins, and every checkpoint of the run holds what was read. A checkpoint may be due
hours later, when the directory that they came from has been edited, cleaned up or unmounted.
"""

import difflib
import logging
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outsize import files
from outsize.checkpoint.files.checkpoint_format import StoredTensor, read_header
from outsize.errors import CheckpointError

_log = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Of adapters, in PEFT's format.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Where transformers keeps the default chat template of a tokenizer.
TEMPLATE = "chat_template.jinja"
_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".py")
_TEXT, _MOST_TEXT = (".json", ".jinja"), 2**30
# A directory with any of these holds a tokenizer.
_OF_TOKENIZERS = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def has_tokenizer(directory: Path) -> bool:
    """Whether the files of a tokenizer lie in ``directory``; those beside adapters go before their model's."""
    return any((directory / name).is_file() for name in _OF_TOKENIZERS)


def is_own_file(path: Path, directory: Path) -> bool:
    """Whether ``path`` is a file of a model's ``directory``, and no link to what lies elsewhere, which is told.

    A directory of the hub's cache is made of links to blobs beside it, and those are its files.
    """
    if not path.is_file():
        return False
    place = directory.resolve()
    places = [place, place.parent.parent / "blobs"] if place.parent.name == "snapshots" else [place]
    if not path.is_symlink() or any(path.resolve().is_relative_to(each) for each in places):
        return True
    _log.warning("%s links to a file outside of the model's directory, and is not copied", path)
    return False


def lone_template(directory: Path) -> Path | None:
    """Return the chat template in ``directory`` where no tokenizer lies beside it; None for no such template."""
    path = directory / TEMPLATE
    return path if path.is_file() and not has_tokenizer(directory) else None


def locate_checkpoint(path_or_hub_id: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Return the directory of a model: the one named, or the local copy of the hub's, downloaded if need be.

    Args:
        path_or_hub_id: which.
        revision: branch, tag or commit on the hub; None is the main one.

    Raises:
        CheckpointError: neither a directory nor a model that the hub hands out; or a pipe or device in that directory.
    """
    path = Path(os.path.expanduser(path_or_hub_id))
    if path.is_dir():
        _refuse_special_files(path)
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; weights are read from the directory of a model")
    from huggingface_hub import snapshot_download

    try:
        patterns = ["adapter_model.bin", *(f"*{suffix}" for suffix in _SUFFIXES)]
        return Path(snapshot_download(os.fspath(path_or_hub_id), revision=revision, allow_patterns=patterns))
    except (
        Exception
    ) as error:  # the hub client raises a dozen kinds: no network, no such model, gated, bad name
        raise CheckpointError(describe_missing(path_or_hub_id, error)) from error


def describe_missing(path_or_hub_id: str | os.PathLike[str], error: Exception) -> str:
    """Return a sentence about a name that is no directory, which the hub has refused with ``error``."""
    from huggingface_hub.errors import HFValidationError

    path = Path(os.path.expanduser(path_or_hub_id))
    beside = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
    near = [str(path.with_name(name)) for name in difflib.get_close_matches(path.name, beside, 1)]
    missing = f"no directory {path_or_hub_id}" + "".join(f" (there is {name})" for name in near)
    if isinstance(error, HFValidationError):
        return f"{missing}, nor is that an id of the hub, OWNER/NAME"
    first_line = str(error).strip().partition("\n")[0]
    return f"{missing}, and the hub does not hand out such a model: {first_line}"


def _refuse_special_files(directory: Path) -> None:
    """Refuse pipes, sockets and devices by the names of a model's files, and text that no library should read.

    A library takes the former for files that are not there, and the latter fills the memory.
    """
    for path in sorted(directory.iterdir()):
        if path.suffix in _TEXT and path.is_file() and path.stat().st_size > _MOST_TEXT:
            raise CheckpointError(
                f"{path} is larger than a file of a model's texts can be; remove or replace it"
            )
        if path.suffix in _SUFFIXES and not (path.is_file() or path.is_dir()) and path.exists():
            raise CheckpointError(
                f"{path} is not a regular file; remove it, or put the model's file in its place"
            )


def find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return every tensor stored in ``directory``, by name; each file's header is checked against its size.

    Raises:
        CheckpointError: no weights, pickled weights only, or a file that is missing, truncated or not in the
            index.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; give the directory of a Hugging Face model")
    if (directory / WEIGHTS).exists():
        return read_header(directory / WEIGHTS)
    if not (directory / INDEX).exists():
        raise CheckpointError(_no_weights(directory))
    files_of = _read_index(directory / INDEX)
    stored: dict[str, StoredTensor] = {}
    for file in sorted(set(files_of.values())):
        stored.update(read_header(directory / file))
    for name, file in files_of.items():
        if name not in stored or stored[name].path.name != file:
            raise CheckpointError(
                f"{directory / file} does not hold {name}, as the index says; download it again"
            )
    return stored


def _read_index(path: Path) -> dict[str, str]:
    """Read the index of a sharded checkpoint: tensor name to file name."""
    weight_map = files.read_json(path, CheckpointError, "download it again").get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path} is not an index of safetensors files; download it again")
    for file in weight_map.values():
        if not isinstance(file, str) or not file or Path(file).name != file or "\0" in file:
            raise CheckpointError(f"{path} names {file!r}, which is no file beside it; download it again")
    return weight_map


def _no_weights(directory: Path) -> str:
    """Say what is there in place of safetensors files, and what to do."""
    pickled = sorted(
        p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in directory.glob(pattern)
    )
    if pickled:
        return (
            f"{directory} holds only pickled weights ({pickled[0]}), which run code when they are opened; "
            "convert them once with AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    return f"{directory} holds neither {WEIGHTS} nor {INDEX}; give the directory of a model with its weights"


# What belongs to a tokenizer; weights and config are written anew.
_OF_TOKENIZER = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "*.tiktoken",
)
GENERATION, _CODE = "generation_config.json", "*.py"
# Where transformers keeps the chat templates of a tokenizer beside its default one.
NAMED_TEMPLATES = "additional_chat_templates"

# Contents of files by their path in the directory of a model, compressed: vocabularies are text of tens of megabytes.
Beside = Mapping[str, bytes]


def read_generation_config(directory: Path) -> Any:
    """Return what a model directory says of how text is written, as transformers reads it; None where it says nothing.

    Raises:
        CheckpointError: transformers cannot read it, and would load no model beside it.
    """
    path = directory / GENERATION
    if not path.exists():
        return None
    from transformers import GenerationConfig

    try:
        files.read_bytes(path)
        return GenerationConfig.from_pretrained(str(directory))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; mend or remove it") from error


def stop_at(end: str, tokenizer: Any, config: Any, announce: Callable[[str], object]) -> bool:
    """Put the end of a trained reply among the marks of a generation config that end a text.

    Args:
        end: what ends a reply, as its chat template writes it.
        tokenizer: of the model.
        config: of transformers; changed.
        announce: told that the mark is taken, or that it is none of the tokenizer's special tokens.

    Returns:
        Whether ``config`` changed: not where it has the mark already, or the mark is not one special token.
    """
    ids = tokenizer(end, add_special_tokens=False)["input_ids"]
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if not ids or ids[-1] in ends:
        return False
    if len(ids) > 1 or ids[0] not in tokenizer.added_tokens_decoder:
        announce(
            f"note: replies end with {end!r}, which is no special token of the tokenizer: generated text does not stop "
            "there by itself; name it in generate --stop, or take a template whose mark the tokenizer has"
        )
        return False
    config.eos_token_id = [*ids, *(mark for mark in ends if mark is not None)]
    announce(f"replies end with {end!r}: with what is saved, generated text stops there too")
    return True


def read_beside(
    source: str | Path, *, with_code: bool, template: str | None = None, adapters: Path | None = None
) -> Beside:
    """Return the tokenizer files of a model, its generation config where there is one, and its code.

    Args:
        source: directory or hub id of the model.
        with_code: whether the model comes with code; that of a tokenizer is read in any case.
        template: the chat template, instead of those of ``source``; None takes them.
        adapters: directory of adapters of ``source``, whose generation config and tokenizer, or chat template alone,
            go before.

    Raises:
        CheckpointError: there is no such model, or a file cannot be read.
    """
    origin = locate_checkpoint(source)
    owner = adapters if adapters is not None and has_tokenizer(adapters) else origin
    try:
        says = origin if adapters is None or not (adapters / GENERATION).is_file() else adapters
        read = _read(says, (GENERATION,)) | (_read(origin, (_CODE,)) if with_code else {})
        has_code = "auto_map" in files.json_or_empty(owner / "tokenizer_config.json")
        read |= _read(owner, (*_OF_TOKENIZER, _CODE) if has_code else _OF_TOKENIZER)
        lone = lone_template(adapters) if adapters is not None else None
        if template is None and lone is not None:
            template = files.read_text(lone)
        if template is None:
            read |= _read(owner, (f"{NAMED_TEMPLATES}/*.jinja",))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"a file beside the weights of {origin} cannot be read: {error}; checkpoints hold a copy of it"
        ) from error
    if template is not None:
        read[TEMPLATE] = zlib.compress(template.encode(), 1)
    return read


def state_of_files(directory: Path) -> list[list[str | int]]:
    """Return name, size in bytes and time of change in nanoseconds of each file that a model is read from."""
    patterns = ("*.safetensors", "adapter_model.bin", INDEX, "*config.json", _CODE, *_OF_TOKENIZER)
    places = {p for pattern in (*patterns, f"{NAMED_TEMPLATES}/*.jinja") for p in directory.glob(pattern)}
    states = ((path.relative_to(directory).as_posix(), path.stat()) for path in places if path.is_file())
    return sorted([name, state.st_size, state.st_mtime_ns] for name, state in states)


def write_beside(directory: Path, beside: Beside) -> None:
    """Write what `read_beside` has returned into ``directory``; raises `OSError` as the system says."""
    for name, content in beside.items():
        files.make_directories((directory / name).parent)
        with files.open_binary(directory / name, "w") as file:
            file.write(zlib.decompress(content))


def copy_named_templates(origin: Path, directory: Path) -> None:
    """Copy the chat templates that a tokenizer has beside its default one, where there are any."""
    write_beside(directory, _read(origin, (f"{NAMED_TEMPLATES}/*.jinja",)))


def _read(origin: Path, patterns: Sequence[str]) -> dict[str, bytes]:
    """Return the files of ``origin`` that match, compressed."""
    contents = {}
    for path in sorted(path for pattern in patterns for path in origin.glob(pattern)):
        if is_own_file(path, origin):
            with files.open_binary(path, "r") as file:
                contents[str(path.relative_to(origin))] = zlib.compress(file.read(), 1)
    return contents
