"""Tokens that are made while they are read, so that a run may begin before all of its data are tokenised."""

import threading
from collections.abc import Callable
from pathlib import Path

from outsize.data.survey import Detected
from outsize.data.token_cache import TokenWriter
from outsize.data.tokens import ArrayReader, TokenStore, token_readers
from outsize.errors import DataError

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
        """See `TokenStore`.

        Raises:
            OutsizeError: as of `reach`.
            IndexError: there are fewer.
        """
        total = self.reach(num_tokens)
        if total is not None and num_tokens > total:
            raise IndexError(f"tokens to {num_tokens} of {total}")
        return self._tokens

    def _run(self, write: Callable[[Told], Detected]) -> None:
        try:
            found = write(self._told)
        except _ClosedError:
            return
        except BaseException as error:  # told to whoever waits for tokens
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            return
        with self._changed:
            self._is_whole, self._detected = True, found
            self._changed.notify_all()

    def _told(self, directory: Path, writer: TokenWriter, found: Callable[[], Detected]) -> None:
        if self._is_stopped:
            raise _ClosedError
        writer.flush()
        with self._changed:
            if writer.num_trained:
                if not self._known:
                    self._detected = found()
                    self._tokens, self._trained = token_readers(directory, _ENDLESS)
                self._known = writer.num_tokens
            self._changed.notify_all()
