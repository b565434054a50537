"""Which files a run's data are: what a state says of them, and which of them have changed when a run goes on."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from outsize.data.reading.corpus_files import find_sources

# Files beyond so many are one entry of a state, which every commit of a home writes.
MOST_LISTED = 200
_REST = "files beyond the first"
_MOST_NAMED = 5


def list_files(sources: Iterable[tuple[str, str | None]]) -> dict[str, list[int]]:
    """Return size in bytes and time of change in nanoseconds of each file of data, by its name below its source.

    Args:
        sources: path and pattern of each source, see `find_sources`.

    Raises:
        DataError: a source is not there.
    """
    listed: dict[str, list[int]] = {}
    for number, (path, glob) in enumerate(sources):
        root = Path(path)
        for file in find_sources(root, glob).files:
            name = file.path.name if file.path == root else file.path.relative_to(root).as_posix()
            key = f"data.more[{number - 1}]: {name}" if number else name
            if len(listed) < MOST_LISTED:
                listed[key] = [file.size_bytes, file.mtime_ns]
            else:
                size, newest = listed.get(_REST, [0, 0])
                listed[_REST] = [size + file.size_bytes, max(newest, file.mtime_ns)]
    return listed


def changed_files(recorded: Any, given: Mapping[str, list[int]]) -> str:
    """Return in words which files of data have changed; empty where none has, or ``recorded`` does not say.

    Args:
        recorded: what `list_files` returned for the run before, as read from a file.
        given: what it returns now.
    """
    if not isinstance(recorded, Mapping) or dict(recorded) == dict(given):
        return ""
    changes = [
        f"{name} {change}"
        for name in dict.fromkeys([*given, *recorded])
        if (change := _change(recorded.get(name), given.get(name)))
    ]
    more = len(changes) - _MOST_NAMED
    return ", ".join([*changes[:_MOST_NAMED], *([f"{more} more"] if more > 0 else [])])


def _change(recorded: Any, given: list[int] | None) -> str:
    if recorded == given:
        return ""
    if given is None:
        return "is no longer there"
    if recorded is None:
        return "is new"
    if not isinstance(recorded, list) or len(recorded) != 2 or recorded[0] != given[0]:
        size = recorded[0] if isinstance(recorded, list) and recorded else "other"
        return f"has {given[0]} bytes, and had {size}"
    return "was written again, with as many bytes"
