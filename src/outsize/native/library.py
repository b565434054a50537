"""Where the built kernels lie, whether they can be used, and if not, why not.

``OUTSIZE_NATIVE=0`` in the environment turns them off.
"""

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from outsize.native.kernel_sources import checksum, sources

_ROOM = Path(__file__).parent
LIBRARY = _ROOM / "libkernels.so.0"
VARIABLE = "OUTSIZE_NATIVE"
_BUILD = "pip install . with a C compiler at hand; in a checkout: python setup.py build_ext --inplace"
LEVELS = ("plain", "avx2", "avx512")


@dataclass(frozen=True, slots=True)
class _Loaded:
    handle: ctypes.CDLL | None
    reason: str | None


def available() -> bool:
    """Return whether the kernels can be called."""
    return _load().handle is not None


def reason() -> str | None:
    """Return why the kernels cannot be called, and what to do; None where they can."""
    return _load().reason


def call(name: str, *arguments: Any) -> int:
    """Call the kernel ``outsize_<name>`` and return its int; the GIL is not held meanwhile.

    Args:
        name: of the function, without its prefix.
        arguments: ctypes values, as the C source says. Nothing is checked: whoever calls knows that addresses and
            lengths are right, and that the memory stays.

    Raises:
        RuntimeError: the kernels cannot be used; ask `available` first.
    """
    loaded = _load()
    if loaded.handle is None:
        raise RuntimeError(f"no native kernels: {loaded.reason}")
    return int(getattr(loaded.handle, f"outsize_{name}")(*arguments))


def turned_off() -> bool:
    """Return whether the environment turns kernels off."""
    return os.environ.get(VARIABLE, "").strip().lower() in ("0", "off", "false", "no")


def level() -> str:
    """Return the instruction set in use: ``plain``, ``avx2`` or ``avx512``.

    Raises:
        RuntimeError: the kernels cannot be used.
    """
    return LEVELS[call("level")]


def use_level(wanted: str) -> str:
    """Use the instruction set ``wanted`` from now on, or the best there is where that is lower; return which.

    All of them compute the same bits; this is for the tests that show it.

    Raises:
        ValueError: no such level; there are ``plain``, ``avx2`` and ``avx512``.
        RuntimeError: the kernels cannot be used.
    """
    if wanted not in LEVELS:
        raise ValueError(f"no instruction set {wanted!r}; there is {', '.join(LEVELS)}")
    return LEVELS[call("use_level", ctypes.c_int(LEVELS.index(wanted)))]


@cache
def _load() -> _Loaded:
    if turned_off():
        return _Loaded(None, f"turned off by {VARIABLE}={os.environ[VARIABLE]}")
    return open_library(LIBRARY)


def open_library(path: Path) -> _Loaded:
    """Load the library at ``path``, unless it was built from other sources than lie beside it."""
    if not path.exists():
        return _Loaded(None, f"{path.name} was not built ({_BUILD})")
    try:
        handle = ctypes.CDLL(str(path))
        handle.outsize_checksum.restype = ctypes.c_uint32
        built_from = handle.outsize_checksum()
    except (OSError, AttributeError) as error:
        return _Loaded(None, f"{path.name} cannot be loaded: {error} ({_BUILD})")
    if sources(path.parent) and built_from != checksum(path.parent):
        return _Loaded(None, f"{path.name} was built from other sources than lie beside it ({_BUILD})")
    return _Loaded(handle, None)
