"""Builds the made-up device: once for each version of torch and of its source, kept in the user's cache."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

SOURCE = Path(__file__).parent / "native"
# Whose internals the source was written for: another one may build, and mean something else.
WRITTEN_FOR = "2.13"
# Most of a minute goes into torch's headers, whatever the optimisation.
FLAGS = (
    "-shared",
    "-O1",
    "-std=c++20",
    "-fPIC",
    "-pthread",
    "-Wno-attributes",
    "-DTORCH_EXTENSION_NAME=_late",
)


class CannotBuildError(Exception):
    """This machine has no made-up device; the message says why."""


def missing() -> str | None:
    """Return why the device cannot be had here; None where it can."""
    if not sys.platform.startswith("linux"):
        return "the made-up accelerator needs Linux (memfd)"
    if not torch.__version__.startswith(f"{WRITTEN_FOR}."):
        return f"the made-up accelerator is written for torch {WRITTEN_FOR}, and this is {torch.__version__}"
    if compiler() is None:
        return "the made-up accelerator needs g++ (or CXX)"
    return None


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def load() -> ModuleType:
    """Return the extension module, built if need be; processes that ask at once build it once.

    Raises:
        CannotBuildError: there is no compiler, it is another torch, or the compiler fails.
    """
    why = missing()
    if why is not None:
        raise CannotBuildError(why)
    path = built()
    spec = importlib.util.spec_from_file_location("_late", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built() -> Path:
    """Return where the library lies, after building it if need be."""
    directory = _cache() / "outsize-tests" / _key()
    library = directory / "late.so"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            sys.stderr.write("building the made-up accelerator, about a minute\n")
            _compile(directory / "unfinished.so")
            (directory / "unfinished.so").rename(library)
    return library


def _cache() -> Path:
    """Return the user's cache; while tests run, ``XDG_CACHE_HOME`` is a place that goes with them."""
    return Path(os.environ.get("LATE_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _key() -> str:
    parts = [torch.__version__, sys.version, str(compiler()), *FLAGS, Path(__file__).read_text()]
    parts += [path.read_text() for path in sorted(SOURCE.iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(into: Path) -> None:
    root = Path(torch.__file__).parent
    headers = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    command = [str(compiler()), *FLAGS, str(SOURCE / "late.cpp"), "-o", str(into), f"-L{root / 'lib'}"]
    command += [option for path in headers for option in ("-isystem", str(path))]
    command += [f"-Wl,-rpath,{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuildError(f"the made-up accelerator does not build:\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    sys.stdout.write(f"{built()}\n")
