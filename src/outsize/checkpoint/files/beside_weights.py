"""The files beside a model's weights: its tokenizer, chat templates, how it generates, code that comes with it.

They are read once, when a run begins, and every checkpoint of the run holds what was read. A checkpoint may be due
hours later, when the directory that they came from has been edited, cleaned up or unmounted.
"""

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outsize import files
from outsize.checkpoint.files.checkpoint_files import (
    TEMPLATE,
    has_tokenizer,
    is_own_file,
    locate_checkpoint,
    lone_template,
)
from outsize.errors import CheckpointError

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
_GENERATION, _CODE = "generation_config.json", "*.py"
# Where transformers keeps the chat templates of a tokenizer beside its default one.
NAMED_TEMPLATES = "additional_chat_templates"

# Contents of files by their path in the directory of a model, compressed: vocabularies are text of tens of megabytes.
Beside = Mapping[str, bytes]


def read_generation_config(directory: Path) -> Any:
    """Return what a model directory says of how text is written, as transformers reads it; None where it says nothing.

    Raises:
        CheckpointError: transformers cannot read it, and would load no model beside it.
    """
    path = directory / _GENERATION
    if not path.exists():
        return None
    from transformers import GenerationConfig

    try:
        files.read_bytes(path)
        return GenerationConfig.from_pretrained(str(directory))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; mend or remove it") from error


def read_beside(
    source: str | Path, *, with_code: bool, template: str | None = None, adapters: Path | None = None
) -> Beside:
    """Return the tokenizer files of a model, its generation config where there is one, and its code.

    Args:
        source: directory or hub id of the model.
        with_code: whether the model comes with code; that of a tokenizer is read in any case.
        template: the chat template, instead of those of ``source``; None takes them.
        adapters: directory of adapters of ``source``, whose tokenizer, or chat template alone, goes before.

    Raises:
        CheckpointError: there is no such model, or a file cannot be read.
    """
    origin = locate_checkpoint(source)
    owner = adapters if adapters is not None and has_tokenizer(adapters) else origin
    try:
        read = _read(origin, (_GENERATION, _CODE) if with_code else (_GENERATION,))
        read |= _read(owner, (*_OF_TOKENIZER, _CODE) if _brings_code(owner) else _OF_TOKENIZER)
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


def _brings_code(directory: Path) -> bool:
    """Whether the tokenizer in ``directory`` is one of its own code."""
    return "auto_map" in files.json_or_empty(directory / "tokenizer_config.json")
