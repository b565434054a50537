"""Results that are kept from one command to the next, in the user's cache directory.

An entry is a file named by what it is of. A file that is broken, that somebody else has put there in another form, or
that cannot be read counts as none; a directory that cannot be written costs time and nothing else. Of many entries
those that have not been used for longest go.
"""

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

MOST_ENTRIES = 256
MOST_BYTES = 64 * 2**20
_SUFFIX = ".json"


def cache_directory() -> Path:
    """Return the directory of this package below the user's cache directory, as the XDG base directories say."""
    named = Path(os.environ.get("XDG_CACHE_HOME") or "relative")
    return (named if named.is_absolute() else Path.home() / ".cache") / "outsize"


def digest_of(content: Any) -> str:
    """Return a name for ``content``, of what JSON knows."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def load(kind: str, name: str) -> bytes | None:
    """Return the entry ``name`` of a ``kind`` of results; None where there is none, or a broken one."""
    path = cache_directory() / kind / f"{name}{_SUFFIX}"
    try:
        # A pipe in its place would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_size > MOST_BYTES:
            os.close(descriptor)
            return None
        with open(descriptor, "rb") as file:
            head, _, content = file.read(MOST_BYTES).partition(b"\n")
        if head.decode("ascii", "replace") != hashlib.sha256(content).hexdigest():
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # in use, see `_prune`
    except (OSError, RuntimeError):
        return None
    return content


def store(kind: str, name: str, content: bytes) -> None:
    """Keep ``content`` as the entry ``name`` of a ``kind`` of results, whole or not at all."""
    with contextlib.suppress(OSError, RuntimeError):  # no home directory, no permission, no room
        directory = cache_directory() / kind
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(dir=directory)
        try:
            with open(descriptor, "wb") as file:
                file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
            os.replace(unfinished, directory / f"{name}{_SUFFIX}")
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished)
        _prune(directory)


def _prune(directory: Path) -> None:
    """Remove all but the newest entries, and what processes that were killed have left unfinished."""
    with os.scandir(directory) as entries:
        by_age = sorted(((entry.stat().st_mtime, entry.path) for entry in entries), reverse=True)
    for _, path in by_age[MOST_ENTRIES:]:
        os.unlink(path)


def versions_of(*packages: str) -> Mapping[str, str | None]:
    """Return the versions of packages that are installed, None for others, without importing any."""

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    return {package: version(package) for package in packages}


def source_digest(*rooms: str) -> str:
    """Return a digest of the source files in folders of this package, so that a changed checkout has other results."""
    root, digest = Path(__file__).parent, hashlib.sha256()
    for room in rooms:
        for path in sorted((root / room).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
