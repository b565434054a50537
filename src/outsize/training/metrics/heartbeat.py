"""``heartbeat.jsonl``: one flushed JSON object per step, for ``tail -f | jq`` and for the report."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any, TextIO

from outsize import files
from outsize.storage.prealloc import explain
from outsize.telemetry.heartbeat_schema import SCHEMA_VERSION
from outsize.training.metrics.run_records import StepRecord

HEARTBEAT = "heartbeat.jsonl"


class Heartbeat:
    """Appends to the heartbeat of a run directory; a context manager.

    Raises:
        StorageError: the file cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / HEARTBEAT
        try:
            self._file: TextIO = files.open_text(self._path, "a")
        except OSError as error:
            raise explain(error, f"write {self._path}") from error

    def beat(self, record: StepRecord) -> None:
        """Write one record, with the schema's version.

        Raises:
            StorageError: the line cannot be written.
        """
        line: dict[str, Any] = {"schema": SCHEMA_VERSION, **record.to_dict()}
        # NaN and infinity are not JSON; a missing number is null.
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in line.items()
        }
        try:
            self._file.write(json.dumps(clean, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise explain(error, f"write {self._path}") from error

    def close(self) -> None:
        """Close the file; idempotent. A line that could not be written has been reported already."""
        with contextlib.suppress(OSError):
            self._file.close()

    def __enter__(self) -> "Heartbeat":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


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
