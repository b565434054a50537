"""Kernels in C: optional, built at install where there is a compiler, loaded with ctypes, which lets go of the GIL.

Whatever they do is done in torch ops elsewhere, bit for bit the same, so nothing depends on them but time.
"""

from outsize.native.library import available, call, level, reason, turned_off, use_level

__all__ = ["available", "call", "level", "reason", "turned_off", "use_level"]
