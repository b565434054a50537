"""Build what is released: the source archive, and from it a wheel with the kernels in C and one without.

Usage: ``package.py [DIRECTORY]``, dist by default. Wheels are built from the archive, so that it is known to be whole.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
_BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"


def build(kind: str, source: Path, target: Path, *, plain: bool = False) -> None:
    """Run the hook ``kind`` of the build backend (PEP 517) in ``source``."""
    environment = {**os.environ, "OUTSIZE_PLAIN": str(int(plain))}
    command = [sys.executable, "-c", _BUILD, kind, str(target)]
    subprocess.run(command, cwd=source, env=environment, check=True, stdout=subprocess.DEVNULL)


def package(target: Path, source: Path = ROOT) -> list[Path]:
    """Write archive and wheels of the tree ``source`` into ``target``, which is empty; returns the three.

    Raises:
        RuntimeError: no compiler has built the kernels.
    """
    target.mkdir(parents=True, exist_ok=True)
    build("build_sdist", source, target)
    (archive,) = target.glob("outsize-*.tar.gz")
    for plain in (False, True):
        with tempfile.TemporaryDirectory() as directory:
            with tarfile.open(archive) as packed:
                packed.extractall(directory, filter="data")
            build("build_wheel", Path(directory, archive.name.removesuffix(".tar.gz")), target, plain=plain)
    made = sorted(target.iterdir())
    if len(made) != 3:
        raise RuntimeError("the kernels in C were not built; is there a compiler?")
    return made


if __name__ == "__main__":
    for made in package(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").resolve()):
        sys.stdout.write(f"{made}\n")
