"""Records of the datasets library: what its ``save_to_disk`` has written, and datasets of the hub, streamed."""

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from outsize.errors import DataError

# A path of Python has one slash where the address has two.
_ON_THE_HUB = re.compile(
    r"hf://?datasets/(?P<repo>[^/@#]+/[^/@#]+)(?:@(?P<revision>[^/#]+))?(?:/(?P<name>[^/#]+))?(?:#(?P<split>.+))?"
)
_SAVED, _SAVED_SPLITS = ("state.json", "dataset_info.json"), "dataset_dict.json"


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the hub: ``hf://datasets/OWNER/NAME[@REVISION][/CONFIGURATION][#SPLIT]``."""

    repo: str
    revision: str | None
    name: str | None
    split: str

    @classmethod
    def from_path(cls, path: Path) -> Self | None:
        """Return the dataset that ``path`` names, None where it is none of the hub.

        Raises:
            DataError: it begins like one, and is none.
        """
        if path.parts[:1] != ("hf:",):
            return None
        found = _ON_THE_HUB.fullmatch(str(path))
        if found is None:
            raise DataError(
                f"{path}: a dataset of the hub is named hf://datasets/OWNER/NAME, with @REVISION, /CONFIGURATION and "
                "#SPLIT behind it where they are needed"
            )
        return cls(found["repo"], found["revision"], found["name"], found["split"] or "train")


def is_saved_dataset(path: Path) -> bool:
    """Return whether ``path`` is what ``Dataset.save_to_disk`` has written.

    Raises:
        DataError: it is what ``DatasetDict.save_to_disk`` has written, of which one part is to be named.
    """
    if (path / _SAVED_SPLITS).is_file():
        parts = sorted(each.name for each in path.iterdir() if each.is_dir())
        raise DataError(f"{path} holds several datasets; name one of them: {', '.join(parts)}")
    return all((path / name).is_file() for name in _SAVED)


def read_dataset(path: Path, on_read: Callable[[int], None]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number from 1, record) of a dataset.

    Raises:
        DataError: the library is not installed, or cannot read it.
    """
    try:
        library: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(f"{path}: reading datasets needs the library; pip install datasets") from error
    hub = HubDataset.from_path(path)
    try:
        if hub is None:
            records: Any = library.load_from_disk(str(path))
            on_read(sum(file.stat().st_size for file in path.iterdir()))
        else:
            how = {"split": hub.split, "revision": hub.revision, "streaming": True}
            records = library.load_dataset(hub.repo, hub.name, **how)
        yield from enumerate(map(without_nulls, records), 1)
    except Exception as error:  # datasets, the hub and the network raise a dozen kinds
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        where = "the files that save_to_disk has written"
        if hub is not None:
            where = "its name, revision, configuration and split, and at the network"
        raise DataError(f"{path}: cannot read: {first_line}; look at {where}") from error


def without_nulls(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of Arrow without what its structs hold nothing of: there, each has the fields of all.

    A field of the record itself stays, null or not: it is a column.
    """
    return {name: _without_nulls(value) for name, value in record.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
