"""Builds the C kernels of `outsize.native` where there is a compiler; everything else stands in pyproject.toml.

Without one the install succeeds, and `outsize doctor` says what is missing; ``OUTSIZE_PLAIN=1`` leaves the kernels out.
The library is loaded with ctypes and knows no Python, so a wheel serves every Python of its platform: all Linux systems
whose C library has the functions that it calls. It is built for any processor of its architecture: instruction sets are
chosen when it runs (versions.h).
"""

import os
import re
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOM = "src/outsize/native"
SOURCES = runpy.run_path(f"{ROOM}/kernel_sources.py")
DEPENDS = ["setup.py", f"{ROOM}/kernel_sources.py"]
OLDEST_GLIBC_MINOR = 17  # that pip has a tag for
FILES = [path.as_posix() for path in SOURCES["sources"](Path(ROOM))]


class PlainLibrary(build_ext):
    """Builds a shared library that is no Python module, under a name that no importer takes for one."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the path of the library below the root of the packages."""
        return os.path.join(*fullname.split(".")) + ".so.0"


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and any Python 3, or for any platform where it holds no library."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, of its ABI and of the platform, which is the oldest that will do (PEP 600)."""
        library = Path(self.bdist_dir, "outsize", "native", "libkernels.so.0")
        if not library.exists():
            return "py3", "none", "any"
        platform = super().get_tag()[2]
        wanted = [int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", library.read_bytes())]
        if wanted:
            platform = platform.replace("linux_", f"manylinux_2_{max(*wanted, OLDEST_GLIBC_MINOR)}_")
        return "py3", "none", platform


setup(
    ext_modules=[] if os.environ.get("OUTSIZE_PLAIN") == "1" else [
        Extension(
            "outsize.native.libkernels",
            sources=[name for name in FILES if name.endswith(".c")],
            depends=[*DEPENDS, *(name for name in FILES if name.endswith(".h"))],
            define_macros=[("OUTSIZE_CHECKSUM", f"{SOURCES['checksum'](Path(ROOM))}u")],
            # No contraction: a product and a sum are rounded apart, as in the torch ops that do the same.
            extra_compile_args=[
                "-std=gnu11", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
                "-fno-strict-aliasing", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra",
            ],
            extra_link_args=["-pthread", "-lm"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": PlainLibrary, "bdist_wheel": PlatformWheel},
)  # fmt: skip
