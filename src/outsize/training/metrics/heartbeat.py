"""``heartbeat.jsonl``: one flushed JSON object per step, for ``tail -f | jq`` and for the report."""

import contextlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outsize import files
from outsize.errors import StorageError
from outsize.storage.prealloc import explain
from outsize.telemetry.heartbeat_schema import SCHEMA_VERSION
from outsize.training.metrics.run_records import StepRecord

HEARTBEAT = "heartbeat.jsonl"


class Telling:
    """Writes what tells of a run: whatever becomes of that does not end what trains.

    Args:
        announce: told once of each kind of thing that could not be written.

    Attributes:
        num_failed: writes that failed so far.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._told: set[str] = set()
        self.num_failed = 0

    def tell(self, what: str, write: Callable[[], object]) -> bool:
        """Call ``write``, and count where it fails; returns whether it went well. ``what`` is its kind, for people."""
        try:
            write()
        except (OSError, StorageError) as error:
            self.num_failed += 1
            if what not in self._told:
                self._told.add(what)
                self._announce(f"warning: {what} cannot be told, and the run goes on: {error}")
            return False
        return True


class Heartbeat:
    """Appends to the heartbeat of a run directory; a context manager. A half line that is there already is ended.

    Args:
        run_dir: of the run.
        announce: told once where a line cannot be written.

    Attributes:
        telling: counts those, and what else cannot be told of the run.

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(self, run_dir: Path, announce: Callable[[str], None]) -> None:
        self._path = run_dir / HEARTBEAT
        self.telling = Telling(announce)
        try:
            self._is_torn = _ends_within_a_line(self._path)
            self._file = files.open_binary(self._path, "a", buffered=False)
        except OSError as error:
            raise explain(error, f"write {self._path}") from error

    def beat(self, record: StepRecord) -> None:
        """Write one record, with the schema's version; one that cannot be written is counted."""
        line: dict[str, Any] = {"schema": SCHEMA_VERSION, **record.to_dict()}
        # NaN and infinity are not JSON; a missing number is null.
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in line.items()
        }
        text = json.dumps(clean, allow_nan=False) + "\n"
        self.telling.tell("a line of the heartbeat", lambda: self._write(text.encode()))

    def _write(self, line: bytes) -> None:
        """Write a line; what is written of one that fails is ended before the next one."""
        left = memoryview(b"\n" + line if self._is_torn else line)
        self._is_torn = True
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise explain(error, f"write {self._path}") from error
        self._is_torn = False

    def close(self) -> None:
        """Close the file; idempotent."""
        with contextlib.suppress(OSError):
            self._file.close()

    def __enter__(self) -> "Heartbeat":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _ends_within_a_line(path: Path) -> bool:
    """Whether a file ends with half a line, as one that was cut off does."""
    if not path.exists():
        return False
    with files.open_binary(path, "r") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, see `write_whole`."""
    write_whole(path, json.dumps(content, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that it is there whole or not at all, after a loss of power too.

    Raises:
        StorageError: it cannot be written; what was there before still is.
    """
    try:
        files.write_whole(path, text)
    except OSError as error:
        raise explain(error, f"write {path}") from error
