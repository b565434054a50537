"""``heartbeat.jsonl``: one flushed JSON object per step, for ``tail -f | jq`` and for the report."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any, TextIO

from outsize.errors import StorageError
from outsize.train.records import StepRecord

SCHEMA_VERSION = 1


class Heartbeat:
    """Appends to the heartbeat of a run directory; a context manager.

    Raises:
        StorageError: the file cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        try:
            self._file: TextIO = (run_dir / "heartbeat.jsonl").open("a", encoding="utf-8")
        except OSError as error:
            raise StorageError(
                f"cannot write in {run_dir}: {error.strerror}; choose another train.run_dir"
            ) from error

    def beat(self, record: StepRecord) -> None:
        """Write one record, with the schema's version and the wall-clock time in seconds since 1970."""
        line: dict[str, Any] = {"schema": SCHEMA_VERSION, "time": time.time(), **record.to_dict()}
        # NaN is not JSON; a missing number is null.
        clean = {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in line.items()
        }
        self._file.write(json.dumps(clean, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def __enter__(self) -> "Heartbeat":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file so that it is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
