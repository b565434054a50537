"""Writes the files of a cache entry; `cache` says what they are."""

from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from outsize.data.detected import EXAMPLE_TOKENS
from outsize.data.encode import Encoded
from outsize.files import open_binary, system


class TokenWriter:
    """Appends encoded documents to the files of an entry.

    Attributes:
        num_tokens: tokens written.
        num_trained: of these, targets.
        num_documents: documents closed.
        num_untrained: of these, documents without a target.
        max_token_id: the largest id written, -1 before the first.
    """

    def __init__(self, directory: Path, *, masked: bool, files: ExitStack) -> None:
        self._tokens = files.enter_context(open_binary(directory / "tokens.bin", "w"))
        self._ends = files.enter_context(open_binary(directory / "documents.bin", "w"))
        self._trained = files.enter_context(open_binary(directory / "trained.bin", "w")) if masked else None
        self.num_tokens = self.num_trained = self.num_documents = self.num_untrained = 0
        self._trained_before = 0
        self.max_token_id = -1
        self._first: list[Encoded] = []

    def append(self, encoded: Encoded) -> None:
        """Write one document or one piece of a document."""
        if self.num_documents == 0 and self.num_tokens < EXAMPLE_TOKENS:
            self._first.append(encoded)
        self._tokens.write(encoded.ids.astype("<i4", copy=False).data)
        if self._trained is None:
            self.num_trained += len(encoded.ids)
        else:
            trained = np.ones(len(encoded.ids), np.uint8) if encoded.trained is None else encoded.trained
            self._trained.write(trained.data)
            self.num_trained += int(trained.sum())
        self.num_tokens += len(encoded.ids)
        if len(encoded.ids):
            self.max_token_id = max(self.max_token_id, int(encoded.ids.max()))
        if encoded.closes:
            self._ends.write(np.array([self.num_tokens], "<i8").data)
            self.num_documents += 1
            self.num_untrained += self.num_trained == self._trained_before
            self._trained_before = self.num_trained

    def first_document(self) -> tuple[NDArray[np.int32], NDArray[np.uint8] | None]:
        """Return ids and mask of the first document, its beginning at least."""
        ids = np.concatenate([np.empty(0, np.int32), *(e.ids for e in self._first)])[:EXAMPLE_TOKENS]
        masks = [e.trained for e in self._first if e.trained is not None]
        return ids, np.concatenate(masks)[:EXAMPLE_TOKENS] if masks else None

    def flush(self) -> None:
        """Flush buffers to the files, so that readers see all tokens."""
        for file in self._files():
            file.flush()

    def sync(self) -> None:
        """Bring what was written to the disk."""
        for file in self._files():
            file.flush()
            system().fsync(file.fileno())

    def _files(self) -> list[BinaryIO]:
        return [file for file in (self._tokens, self._ends, self._trained) if file is not None]
