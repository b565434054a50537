"""Read data sets by the rules of the datasets library: splits of a directory, and records saved or streamed.

In order, and the first that says something decides:

1. ``configs`` in the front matter of ``README.md`` names the files of each split;
2. ``data/SPLIT-00000-of-00003.parquet``, as datasets are pushed to the hub;
3. a directory whose name has a word for a split, such as ``train/`` or ``my-test-set/``;
4. a file whose name has one, such as ``train.jsonl`` or ``chats_validation.jsonl``.
"""

import glob
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

import yaml

from outsize.errors import DataError
from outsize.files import read_text

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
        match = _ON_THE_HUB.fullmatch(str(path))
        if match is None:
            raise DataError(
                f"{path}: a dataset of the hub is named hf://datasets/OWNER/NAME, with @REVISION, /CONFIGURATION and "
                "#SPLIT behind it where they are needed"
            )
        return cls(match["repo"], match["revision"], match["name"], match["split"] or "train")


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


TRAIN = "train"
# Splits in the order in which they are taken, for training and for measuring.
TO_TRAIN, TO_MEASURE = (TRAIN,), ("validation", "test")
_WORDS = {
    TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_BETWEEN = r"[-._ 0-9]"
_IN_FILES = {
    split: re.compile(rf"(?:.*{_BETWEEN})?(?:{'|'.join(words)}){_BETWEEN}.*", re.DOTALL)
    for split, words in _WORDS.items()
}
_IN_DIRECTORIES = {
    split: re.compile(rf"(?:.*{_BETWEEN})?(?:{'|'.join(words)})(?:{_BETWEEN}.*)?", re.DOTALL)
    for split, words in _WORDS.items()
}
_SHARD = re.compile(r"data/(?P<split>[^/]*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_FRONT_MATTER = re.compile(r"\A(?:\ufeff)?---[ \t]*\r?\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)
_MOST_FRONT_MATTER = 1 << 20
_READ_KEYS = {"config_name", "data_files", "default", "version", "description"}


@dataclass(frozen=True)
class SplitFiles:
    """The files of a directory, by split.

    Attributes:
        splits: names of files, by split; a file may be in several.
        source: what has said so, for people.
    """

    splits: Mapping[str, Sequence[str]]
    source: str

    def choose(self, names: Sequence[str], root: Path, wanted: Sequence[str]) -> tuple[list[str], str | None]:
        """Return the data files of the first split that is wanted, and a sentence that names what is left out.

        Args:
            names: of all data files of the directory.
            root: the directory, for errors.
            wanted: splits, the one to take first in front.

        Raises:
            DataError: several splits, and none of them is wanted.
        """
        there = {split: [n for n in names if n in set(files)] for split, files in self.splits.items()}
        there = {split: files for split, files in there.items() if files}
        of_none = [name for name in names if not any(name in files for files in there.values())]
        split = next((split for split in wanted if split in there), None)
        if split is not None:
            chosen, label = there.pop(split), f"split {split}"
        elif of_none:
            chosen, label, of_none = of_none, "files of no split", []
        elif len(there) == 1:
            split, chosen = there.popitem()
            label = f"split {split}, the only one there is"
        else:
            advice = f"choose with data.glob, e.g. glob={_as_pattern(next(iter(there.values()))[0])!r}"
            if wanted == TO_MEASURE:  # where data.glob would be that of what is trained, too
                advice = "name a file, or a directory of them, in eval.data"
            raise DataError(
                f"{root}: {self.source} tells the splits {_counted(there)}, and none is called "
                f"{' or '.join(wanted)}; {advice}"
            )
        others = _counted({**there, **({"of no split": of_none} if of_none else {})})
        note = f"{label}: {_files(chosen)}, by {self.source}"
        return chosen, f"{note}; left out: {others}" if others else note


def find_splits(root: Path, names: Sequence[str]) -> SplitFiles | None:
    """Return the splits of a directory; None where nothing tells any.

    Args:
        root: the directory.
        names: of all files in it, relative, with slashes, but for hidden ones.

    Raises:
        DataError: ``README.md`` says what cannot be, or names several configurations and none as the default.
    """
    if (root / "README.md").is_file() and (configured := _of_card(root)) is not None:
        return SplitFiles(configured, "the configuration in README.md")
    shards: dict[str, list[str]] = {}
    for name in names:
        if (shard := _SHARD.fullmatch(name)) is not None:
            shards.setdefault(shard["split"], []).append(name)
    by_directory = _by_word((name, PurePosixPath(name).parts[:-1], _IN_DIRECTORIES) for name in names)
    by_name = _by_word((name, PurePosixPath(name).parts[-1:], _IN_FILES) for name in names)
    for splits, source in (
        (shards, "the names of shards"),
        (by_directory, "names of directories"),
        (by_name, "names of files"),
    ):
        if splits:
            return SplitFiles(splits, source)
    return None


def _by_word(
    places: Iterable[tuple[str, Sequence[str], Mapping[str, re.Pattern[str]]]],
) -> dict[str, list[str]]:
    """Return the files that have a word for a split in a part of their path."""
    splits: dict[str, list[str]] = {}
    for name, parts, patterns in places:
        for split, pattern in patterns.items():
            if any(pattern.fullmatch(part) for part in parts):
                splits.setdefault(split, []).append(name)
    return {split: splits[split] for split in _WORDS if split in splits}


def _of_card(root: Path) -> dict[str, list[str]] | None:
    """Return the files that the front matter of ``README.md`` names; None where it names none."""
    card = root / "README.md"
    try:
        matter = _FRONT_MATTER.match(read_text(card)[:_MOST_FRONT_MATTER])
        front_matter: Any = yaml.safe_load(matter[1]) if matter else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        first_line = str(error).partition("\n")[0]
        raise DataError(
            f"{card}: its front matter cannot be read: {first_line}; mend it, or set data.glob"
        ) from error
    configurations = front_matter.get("configs") if isinstance(front_matter, dict) else None
    if not configurations:
        return None
    try:
        named = {str(each["config_name"]): each for each in configurations}
    except (TypeError, KeyError) as error:
        raise DataError(
            f"{card}: configs is no list of mappings with config_name; mend it, or set data.glob"
        ) from error
    defaults = [
        name for name, each in named.items() if len(named) == 1 or name == "default" or each.get("default")
    ]
    if len(defaults) != 1:
        raise DataError(
            f"{card} names several configurations ({', '.join(named)}), and not one of them as the default; choose "
            "files with data.glob"
        )
    chosen = named[defaults[0]]
    if "data_files" not in chosen:
        return None
    if unread := sorted(set(map(str, chosen)) - _READ_KEYS):
        raise DataError(
            f"{card}: the configuration {defaults[0]} sets {', '.join(unread)}, which is not honoured here; choose "
            "files with data.glob, and say how they are read in the section data"
        )
    return {
        split: _resolved(root, patterns, card)
        for split, patterns in _patterns(chosen["data_files"], card).items()
    }


def _patterns(front_matter: Any, card: Path) -> dict[str, list[str]]:
    entries = front_matter if isinstance(front_matter, list) else [front_matter]
    splits: dict[str, list[str]] = {}
    for entry in entries:
        split, paths = (entry.get("split"), entry.get("path")) if isinstance(entry, dict) else (TRAIN, entry)
        for path in paths if isinstance(paths, list) else [paths]:
            if not isinstance(split, str) or not isinstance(path, str):
                raise DataError(
                    f"{card}: data_files is a path, a list of paths, or a list of split and path, not {entry!r}; mend "
                    "it, or set data.glob"
                )
            splits.setdefault(split, []).append(path)
    return splits


def _resolved(root: Path, patterns: Sequence[str], card: Path) -> list[str]:
    names: set[str] = set()
    for pattern in patterns:
        here = glob.glob(pattern, root_dir=root, recursive=True)
        if "://" in pattern or PurePosixPath(pattern).is_absolute() or not here:
            raise DataError(
                f"{card}: data_files names {pattern}, and no such file lies in {root}; set data.glob"
            )
        names.update(PurePosixPath(name).as_posix() for name in here)
    return sorted(names)


def _counted(splits: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{split} ({_files(files)})" for split, files in splits.items())


def _files(names: Sequence[str]) -> str:
    return f"{len(names):,} file{'' if len(names) == 1 else 's'}"


def _as_pattern(name: str) -> str:
    """Return the pattern of a file and of its further shards."""
    return (
        glob.escape(re.sub(r"-\d{5}-of-\d{5}.*", "", name)) + "*"
        if _SHARD.fullmatch(name)
        else glob.escape(name)
    )
