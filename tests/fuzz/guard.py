"""What reading bad input may do: raise an error of ours. Not: open a file elsewhere, run code, start a program."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from outsize.errors import OutsizeError

FORBIDDEN = (
    "pickle.find_class",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "socket.connect",
)
CHANGES = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.truncate",
    "os.symlink",
    "os.link",
    "shutil.rmtree",
)
# Modules that are imported late, and what Python itself reads.
LIBRARIES = tuple({sys.prefix, sys.base_prefix, "/proc", "/dev", str(Path(__file__).parents[2] / "src")})

_inside: list[Path] = []
_breaches: list[str] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _inside:
        return
    if event in FORBIDDEN:
        _breaches.append(f"{event} {arguments!r:.200}")
    elif (event == "open" or event in CHANGES) and isinstance(arguments[0], str | bytes | Path):
        name = arguments[0].decode() if isinstance(arguments[0], bytes) else str(arguments[0])
        path = Path(name).absolute()
        reads = event == "open" and not (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"))
        if not any(path.is_relative_to(root) for root in _inside) and not (
            reads and str(path).startswith(LIBRARIES)
        ):
            _breaches.append(f"{event} {name!r}")


sys.addaudithook(_hook)


@contextmanager
def within(*roots: Path) -> Iterator[None]:
    """Take note of everything that is done outside ``roots``, and fail."""
    _breaches.clear()
    _inside[:] = roots
    try:
        yield
    finally:
        _inside.clear()
    if _breaches:
        pytest.fail("; ".join(_breaches))


def survives(root: Path, call: Callable[[], object]) -> None:
    """Call what reads bad input: it may raise an error of ours."""
    with within(root), suppress(OutsizeError):
        call()
