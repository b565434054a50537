"""What is read and how: one source of a data set, as the configuration says it."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from outsize.errors import DataError

DEFAULT_TEXT_FIELD = "text"
TrainOn = Literal["replies", "last", "all"]
_NUM_KEPT = 3


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """One source of a data set.

    Attributes:
        path: a file or a directory.
        glob: which files of a directory are read; None takes every known kind.
        format: one of `FORMATS`; ``auto`` looks at the first record.
        text_field: field of a record that holds its text.
        columns: our name of a field to the name that the records give to the field.
        roles: name of a speaker in the records to the role that the speaker has.
        train_on: what of a conversation is trained: the replies, the last reply, or everything.
        max_bad_records: records that may be malformed; they are left out and counted.
        weight: how often each sequence is used in an epoch.
        split: share of the sequences that is held out.
        held: whether these are what is held out, and not all the rest.
        measured: whether a model is only measured on it: of a directory with splits, the one for that is read.
    """

    path: str | Path
    glob: str | None = None
    format: str = "auto"
    text_field: str = DEFAULT_TEXT_FIELD
    columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    train_on: TrainOn = "replies"
    max_bad_records: int = 0
    weight: float = 1.0
    split: float = 0.0
    held: bool = False
    measured: bool = False

    def options(self) -> dict[str, object]:
        """Return all that decides over the tokens, besides the files themselves."""
        return {
            "format": self.format,
            "text_field": self.text_field,
            "columns": dict(self.columns),
            "roles": dict(self.roles),
            "train_on": self.train_on,
            "max_bad_records": self.max_bad_records,
        }


class Tolerance:
    """Counts the malformed records of a source, up to a limit. Safe to use from several threads.

    Args:
        limit: malformed records that are left out; one more ends the reading.

    Attributes:
        count: malformed records so far.
        messages: what was wrong with the first of them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.count = 0
        self.messages: list[str] = []

    def forgive(self, error: DataError) -> None:
        """Count a malformed record.

        Raises:
            DataError: ``error``, where the limit is reached.
        """
        with self._lock:
            if self.count >= self._limit:
                if not self._limit:
                    raise DataError(
                        f"{error}; mend the record, or leave up to ten such out with data.max_bad_records=10"
                    ) from error
                raise DataError(
                    f"more than {self._limit} malformed records (data.max_bad_records); the last: {error}"
                ) from error
            self.count += 1
            if len(self.messages) < _NUM_KEPT:
                self.messages.append(str(error))
