"""A page goes to its file whole or not at all."""

import os
from pathlib import Path

from outsize.errors import StorageError


def write_page(path: Path, text: str) -> int:
    """Write ``text`` to ``path``, and return its bytes.

    Raises:
        StorageError: it cannot be written; what was there before still is.
    """
    encoded = text.encode("utf-8")
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(encoded)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise StorageError(
            f"cannot write {path}: {error.strerror}; name another place with --output"
        ) from error
    return len(encoded)
