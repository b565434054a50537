"""Tokens of a data set on disk, written once, and read while they are still being written.

An entry is a directory named by its fingerprint::

    <cache_dir>/<fingerprint>/
    ├── tokens.bin      int32, little endian, all documents one after the other
    ├── trained.bin     one byte per token, 1 where it is a target; absent where all are
    ├── documents.bin   int64, where each document ends
    └── index.json      what was detected; written last

It is written in a temporary directory beside it and renamed when complete and on the disk, so an entry is whole or
absent; one that is broken all the same is made anew. A run that is killed leaves its temporary directory; the next one
on the same host removes it, one of the same process number too, as processes in containers have.
"""

import hashlib
import itertools
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import psutil
from numpy.typing import NDArray

from outsize import files
from outsize.data.encode import Encoded
from outsize.data.reading.corpus_files import Sources
from outsize.data.survey import EXAMPLE_TOKENS, Detected
from outsize.data.tokens import ArrayFile, ArrayReader, TokenStore, token_readers
from outsize.errors import DataError, StorageError, explain
from outsize.files import open_binary, system
from outsize.units import format_bytes


class TokenWriter:
    """Appends encoded documents to the files of an entry.

    Attributes:
        num_tokens: tokens written.
        num_trained: of these, targets.
        num_documents: documents closed.
        num_untrained: of these, documents without a target.
        max_token_id: the largest id written, -1 before the first.
    """

    def __init__(self, directory: Path, *, masked: bool, opened: ExitStack) -> None:
        self._tokens = opened.enter_context(open_binary(directory / "tokens.bin", "w"))
        self._ends = opened.enter_context(open_binary(directory / "documents.bin", "w"))
        self._trained = opened.enter_context(open_binary(directory / "trained.bin", "w")) if masked else None
        self.num_tokens = self.num_trained = self.num_documents = self.num_untrained = 0
        self._directory, self._next_look_bytes = directory, _FIRST_LOOK_BYTES
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

    def check_room(self, num_read: int, num_bytes: int) -> None:
        """Refuse data of which ``num_read`` of ``num_bytes`` are written, where the rest plainly finds no room.

        Raises:
            StorageError: it takes over twice what is free.
        """
        written = sum(file.tell() for file in self._files())
        if written < self._next_look_bytes or not num_read:
            return
        self._next_look_bytes = 2 * written
        left, free = written * (num_bytes - num_read) // num_read, files.free_bytes(self._directory)
        if left > 2 * free:
            raise StorageError(
                f"tokenised, the data will take some {format_bytes(left)} more in {self._directory.parent}, and "
                f"{format_bytes(free)} are free; free some, or choose a train.run_dir on another disk"
            )

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


_log = logging.getLogger(__name__)
_LAYOUT = 6  # raised whenever the files or the way to tokenise change
_TEMPORARY = ".writing"
_FIRST_LOOK_BYTES = 2**24
_NUMBERS = itertools.count()
_being_written: set[Path] = set()
_REMEDY = "remove that directory, and the data is tokenised again"


def fingerprint(sources: Sources, encoder: str, options: dict[str, object]) -> str:
    """Return the name of an entry: a hash of the files' names, sizes and times, tokenizer and options."""
    places = [f.path if f.path.parts[0] == "hf:" else f.path.absolute() for f in sources.files]
    files = [(str(place), f.size_bytes, f.mtime_ns) for place, f in zip(places, sources.files, strict=True)]
    described = json.dumps([_LAYOUT, files, encoder, options], sort_keys=True)
    return hashlib.blake2b(described.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()


def whole_entry(entry: Path) -> "CachedTokens | None":
    """Return an entry of the cache, open; None where there is none, or a broken one, which is removed and told of."""
    if not entry.exists():
        return None
    try:
        return CachedTokens(entry)
    except DataError as error:
        _log.warning("tokenised data are broken and made anew: %s", error)
        files.system().remove_tree(entry)
        return None


class CachedTokens(TokenStore):
    """An entry of the cache, open for reading."""

    def __init__(self, entry: Path) -> None:
        """Open the files of an entry.

        Raises:
            DataError: one is missing or damaged.
        """
        self.detected = _read_index(entry)
        num_tokens, num_documents = self.detected.num_tokens, self.detected.num_documents or 0
        sizes = {"tokens.bin": 4 * num_tokens, "documents.bin": 8 * num_documents}
        if self.detected.mask_source != "all tokens" or (entry / "trained.bin").exists():
            sizes["trained.bin"] = num_tokens
        for name, num_bytes in sizes.items():
            held = (entry / name).stat().st_size if (entry / name).is_file() else 0
            if held != num_bytes:
                raise DataError(f"{entry / name} holds {held} bytes, not {num_bytes}; {_REMEDY}")
        super().__init__(*token_readers(entry, num_tokens))
        self.num_documents = num_documents
        self._directory = entry
        try:
            self._ends = ArrayReader([ArrayFile(entry / "documents.bin", np.dtype("<i8"), num_documents)])
        except BaseException:
            super().close()
            raise

    def document_ends(self, first: int, count: int) -> NDArray[np.int64]:
        """See `TokenStore.document_ends`."""
        ends = self._ends.read(first, count).astype(np.int64, copy=False)
        if count and not (ends[0] >= 0 and (np.diff(ends) >= 0).all() and ends[-1] <= self.num_tokens):
            raise DataError(
                f"a document from {first} to {first + count} of {self._directory} ends where it cannot; {_REMEDY}"
            )
        return ends

    def close(self) -> None:
        """Close the files. May be called twice."""
        super().close()
        self._ends.close()


def _read_index(entry: Path) -> Detected:
    """Return what was detected when an entry was made."""
    try:
        return Detected.from_json(json.loads(files.read_text(entry / "index.json")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{entry / 'index.json'} cannot be read ({error}); {_REMEDY}") from error


@contextmanager
def new_entry(entry: Path) -> Iterator[Path]:
    """Give a temporary directory that becomes ``entry`` if the body succeeds, and vanishes if it does not.

    Raises:
        StorageError: the cache directory cannot be written.
    """
    unique = f"{os.getpid()}-{next(_NUMBERS)}"  # another thread may write the same entry
    temporary = entry.parent / f"{_TEMPORARY}-{socket.gethostname()}-{unique}-{entry.name}"
    try:
        files.make_directories(entry.parent)
        _being_written.add(temporary)
        _remove_abandoned(entry.parent)
        files.system().remove_tree(temporary)
        files.system().mkdir(temporary)
        yield temporary
        files.sync(temporary)  # an entry that has its name has all of its files, after a loss of power too
        _rename(temporary, entry)
    except OSError as error:
        raise explain(error, f"write tokenised data to {entry.parent}", "choose another cache_dir") from error
    finally:
        files.system().remove_tree(temporary)
        _being_written.discard(temporary)


def write_index(directory: Path, detected: Detected) -> None:
    """Write ``index.json``, the last file of an entry."""
    files.write_text(directory / "index.json", json.dumps(detected.to_json(), indent=1), sync=True)


def _rename(temporary: Path, entry: Path) -> None:
    try:
        files.system().rename(temporary, entry)
    except OSError:
        if not (entry / "index.json").exists():  # else another process was first, with the same bytes
            raise


def _remove_abandoned(cache_dir: Path) -> None:
    mine = f"{_TEMPORARY}-{socket.gethostname()}-"
    for path in cache_dir.glob(f"{mine}*"):
        pid = path.name.removeprefix(mine).split("-")[0]
        is_ours = pid == str(os.getpid()) and path not in _being_written
        if is_ours or (pid.isdigit() and not psutil.pid_exists(int(pid))):
            files.system().remove_tree(path)


# Told after each batch of documents: the directory that they are written to, what writes them, what was found so far.
Told = Callable[[Path, TokenWriter, Callable[[], Detected]], None]
# More elements than any file will have: how many there are is known here, and not by a reader.
_ENDLESS = 2**56


class _ClosedError(Exception):
    """Nobody will read what is still to be written."""


class GrowingTokens(TokenStore):
    """Tokens that a thread of its own writes, one document after the other; without bounds of documents.

    Whoever reads tokens that are still to come waits for them.

    Args:
        write: writes all tokens, and tells of every batch.
    """

    def __init__(self, write: Callable[[Told], Detected]) -> None:
        self._changed = threading.Condition()
        self._known = 0
        self._is_whole = self._is_stopped = False
        self._failure: BaseException | None = None
        self._detected: Detected | None = None
        self._thread = threading.Thread(target=self._run, args=(write,), name="outsize-tokenise", daemon=True)
        self._thread.start()

    @property
    def num_made(self) -> int:
        """Number of tokens written to this moment."""
        return self._known

    @property
    def num_tokens(self) -> int:
        """Number of tokens, as soon as all are there."""
        self.reach(_ENDLESS)
        return self._known

    @property
    def detected(self) -> Detected:
        """What was found in the first batch of documents, or in all of them as soon as all are tokenised."""
        self.reach(1)
        assert self._detected is not None
        return self._detected

    def reach(self, num_tokens: int) -> int | None:
        """See `TokenStore.reach`.

        Raises:
            OutsizeError: the tokens cannot be made, or nobody makes them any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._known >= num_tokens or self._has_ended())
            if self._known < num_tokens and self._is_stopped:
                raise DataError("read after the data set was closed")
            if self._known < num_tokens and self._failure is not None:
                raise self._failure
            return self._known if self._is_whole else None

    def stop(self) -> None:
        """Have no more tokens made, and let go whoever waits for them."""
        with self._changed:
            self._is_stopped = not self._is_whole
            self._changed.notify_all()

    def close(self) -> None:
        """Stop writing, and close the files. May be called twice."""
        self.stop()
        self._thread.join()
        if self._known:
            super().close()

    def _has_ended(self) -> bool:
        return self._is_whole or self._is_stopped or self._failure is not None

    def _up_to(self, num_tokens: int) -> ArrayReader:
        """See `TokenStore`."""
        total = self.reach(num_tokens)
        if total is not None and num_tokens > total:
            raise IndexError(f"tokens to {num_tokens} of {total}")
        return self._tokens

    def _run(self, write: Callable[[Told], Detected]) -> None:
        try:
            detected = write(self._told)
        except _ClosedError:
            return
        except BaseException as error:  # told to whoever waits for tokens
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            return
        with self._changed:
            self._is_whole, self._detected = True, detected
            self._changed.notify_all()

    def _told(self, directory: Path, writer: TokenWriter, detect: Callable[[], Detected]) -> None:
        if self._is_stopped:
            raise _ClosedError
        writer.flush()
        with self._changed:
            if writer.num_trained:
                if not self._known:
                    self._detected = detect()
                    self._tokens, self._trained = token_readers(directory, _ENDLESS)
                self._known = writer.num_tokens
            self._changed.notify_all()
