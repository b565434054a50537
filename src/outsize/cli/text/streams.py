"""stdout and stderr that nothing ends which trains: a reader that goes away, a full disk, a terminal that is gone.

What could not be written is counted. Of a reader that has gone, as in ``outsize … | head``, nothing more is heard, and
that is no failure; where a result could not be written for another reason, the command says so and fails at its end.
"""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, cast

LOST_STATUS = 1
# What a pipe says whose reader is gone, and a terminal that was hung up.
_GONE = (errno.EPIPE, errno.EIO)


class Told:
    """A stream of text whose writes and flushes never raise what the system says; all else is the stream's.

    Attributes:
        num_lost: writes that did not arrive, but for those that nobody waits for any more.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.num_lost = 0

    def write(self, text: str) -> int:
        """Write, as far as that goes."""
        with self._counted():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush, as far as that goes."""
        with self._counted():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.num_lost += error.errno not in _GONE
            self._forget(forever=error.errno in _GONE)

    def _forget(self, *, forever: bool) -> None:
        """Drop what the stream could not write, which it would try to again; ``forever`` all that follows, too."""
        with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
            descriptor = self._stream.fileno()
            there, nowhere = os.dup(descriptor), os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, descriptor)
                self._stream.flush()
                if not forever:
                    os.dup2(there, descriptor)
            finally:
                os.close(there)
                os.close(nowhere)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Have nothing that is said end the command; exit with `LOST_STATUS` where the result could not be written.

    Raises:
        SystemExit: of the body; or as said.
    """
    _open_closed_streams()
    streams = sys.stdout, sys.stderr
    out, err = Told(sys.stdout), Told(sys.stderr)
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        yield
    except SystemExit as ended:
        out.flush()
        if not ended.code and out.num_lost:
            err.write("outsize: the result could not be written to stdout; is its disk full?\n")
            raise SystemExit(LOST_STATUS) from None
        raise
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = streams


def _open_closed_streams() -> None:
    """Lead streams that a shell has closed (``>&-``) to nowhere: nobody waits for what they say."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            nowhere = Path(os.devnull).open("w" if descriptor else "r", encoding="utf-8")  # noqa: SIM115 - stays open
            setattr(sys, name, nowhere)
