"""Loading a tokenizer so that a disk that fails is an error, and never another tokenizer.

A library that looks for a file takes a look that fails for a file that is not there: one EIO on ``chat_template.jinja``
or ``tokenizer_config.json`` gives a tokenizer without them, and no word. So its files are read here, where every
failure is one, and the library gets a copy. The copy stays while the process runs, for tokenizers that save themselves
by copying files that they were loaded from.
"""

import errno
import itertools
import logging
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outsize import files
from outsize.checkpoint.files.checkpoint_files import NAMED_TEMPLATES
from outsize.errors import StorageError, explain
from outsize.storage.directory import directory_of_process

# Linked and not copied: weights, and what is too large to belong to a tokenizer.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_LARGEST_BYTES = 2**27
# What libraries pass over where it is no file, and load another tokenizer without a word.
_ITS_FILE = re.compile(
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json|merges\.txt|chat_template\..*|.*\.model"
)

_log = logging.getLogger(__name__)
_numbers = itertools.count()


def load_tokenizer(directory: Path, *, trust_remote_code: bool) -> Any:
    """Load the tokenizer in ``directory`` as transformers does.

    Raises:
        StorageError: a file of the directory cannot be read.
        Exception: what transformers raises where it cannot make a tokenizer of the files, of a dozen kinds.
    """
    from transformers import AutoTokenizer

    place = _copy_of(directory)
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
    except Exception as error:
        error.args = tuple(_said_of(directory, place, each) for each in error.args)
        _check_json(place, directory)
        raise
    longest = tokenizer.model_max_length
    if not isinstance(longest, (int, float)):
        raise ValueError(f"model_max_length of tokenizer_config.json is {longest!r}, which is no number")
    tokenizer.name_or_path = tokenizer.init_kwargs["name_or_path"] = str(directory)
    return tokenizer


def _check_json(place: Path, directory: Path) -> None:
    """Name the file that made a library fail, where it is one that holds no object of JSON."""
    for path in sorted(place.glob("*.json")):
        if _ITS_FILE.fullmatch(path.name):
            files.read_json(
                path, lambda text: ValueError(_said_of(directory, place, text)), "mend or remove it"
            )


def _said_of(directory: Path, place: Path, value: Any) -> Any:
    return value.replace(str(place), str(directory)) if isinstance(value, str) else value


def _copy_of(directory: Path) -> Path:
    """Return a copy of the files of a model that may belong to its tokenizer, with links to all others.

    Where there is no room for one it returns ``directory``, and a warning says so.
    """
    contents = dict(_contents(directory))
    try:
        above = directory_of_process() / f"tokenizer-{next(_numbers)}"
        # Of the same name: modules of code that comes with a tokenizer are called by it.
        place = above / (directory.resolve().name or "model")
        for path, content in contents.items():
            target = place / path.relative_to(directory)
            target.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                target.symlink_to(path.absolute())
            else:
                target.write_bytes(content)
    except (OSError, StorageError) as error:
        _log.warning("the tokenizer in %s is read in place, not from a copy: %s", directory, error)
        return directory
    return place


def _contents(directory: Path) -> Iterator[tuple[Path, bytes | None]]:
    """Yield every file of ``directory`` with its bytes; None of weights, directories and what may not be read."""
    with _said_as_storage_error(directory):
        paths = sorted(directory.iterdir())
    for path in paths:
        with _said_as_storage_error(path):
            try:
                status = path.stat()
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ELOOP):  # a link that leads nowhere
                    continue
                raise
        if path.name == NAMED_TEMPLATES and stat.S_ISDIR(status.st_mode):
            yield from _contents(path)
        elif stat.S_ISDIR(status.st_mode) and _ITS_FILE.fullmatch(path.name):
            raise StorageError(f"{path} is a directory, where a tokenizer has a file; remove it")
        elif (
            stat.S_ISREG(status.st_mode)
            and status.st_size <= _LARGEST_BYTES
            and path.suffix.lower() not in WEIGHT_SUFFIXES
            and os.access(path, os.R_OK)
        ):
            with _said_as_storage_error(path), files.open_binary(path, "r") as file:
                yield path, file.read()
        else:
            yield path, None


@contextmanager
def _said_as_storage_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise explain(error, f"read {path}") from error
