"""The C sources of this room and their checksum, for the build and for whoever loads what was built."""

import zlib
from pathlib import Path


def sources(room: Path) -> list[Path]:
    """Return the C files of ``room``, headers included, in an order that is the same everywhere."""
    return sorted((*room.glob("*.c"), *room.glob("*.h")), key=lambda path: path.name)


def checksum(room: Path) -> int:
    """Return 32 bits that change with the C files of ``room``."""
    value = 0
    for path in sources(room):
        value = zlib.crc32(path.read_bytes(), value)
    return value
