"""Every exception that outsize raises on purpose.

The tree, and whose mistake each branch is::

    OutsizeError
    ├── ConfigError            yours: a key, a value or a combination of them
    ├── DataError              yours: the data set is empty, unreadable or does not fit the model
    ├── ModelError             yours: a model that cannot be split, or whose forward raised
    │   └── CheckpointError    the files: missing, truncated, or of another shape than the config says
    ├── InfeasiblePlanError    the machine: a budget is too small, and by how much
    ├── StorageError           the machine: disk full, not writable, short read
    │   └── BudgetExceededError   ours: a tier would hold more than was promised
    ├── CodecError             the bytes: damaged, or not the encoding of what is asked for
    ├── StalledError           the machine: no op of a step has ended for far too long
    ├── LostRankError          the machines: of the processes of a run, one is gone, and which
    ├── NonFiniteError         the numbers: loss or gradient norm is NaN or infinite
    ├── ProgramError           ours: a program breaks a rule of `planner.passes.slots`
    └── ExecutionError         ours: an op failed, and on which lane; the cause is chained

Commands print the message of an `OutsizeError` and exit with status 2; anything else is a bug of outsize and keeps
its traceback. In a library call, ``except outsize.OutsizeError`` catches what a user can act upon.
What has to be closed whether a block ends in an error or not is a `Closing`.
"""

import errno
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import BuiltinMethodType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, Self

from outsize.units import format_bytes


class Closing:
    """Something that is closed as its ``with`` block ends."""

    __slots__ = ()

    def close(self) -> None:
        """End it; a second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class OutsizeError(Exception):
    """Root of all errors raised on purpose; the message says what to try."""


class ConfigError(OutsizeError):
    """The run configuration is wrong: unknown key, bad value, or a combination that cannot be."""


class DataError(OutsizeError):
    """The data set is empty, unreadable, or does not fit the model."""


class ModelError(OutsizeError):
    """The model cannot be split into units, or one of its units raised."""


def model_raised(message: str, error: Exception) -> ModelError:
    """Return an error of a model's own code, which is caught as what the code raised as well: ``except ValueError``.

    It has the attributes of ``error`` too, such as an ``errno``; in another process it is a plain `ModelError`.
    """
    more = {
        "__str__": lambda self: message,
        "__reduce__": lambda self: (ModelError, (message,)),
        "__module__": __name__,
    }
    if isinstance(error, StopIteration | StopAsyncIteration):  # would end whatever iterates over results
        return ModelError(message)
    try:
        kind: Any = type("ModelError", (ModelError, type(error)), more)
        # Python's own: a class may ask for what is not known here.
        makers = (vars(each).get("__new__") for each in kind.__mro__)
        make: Any = next(maker for maker in makers if isinstance(maker, BuiltinMethodType))
        raised: ModelError = make(kind, *error.args)
    except (TypeError, ValueError):  # classes that let no other stand beside them
        return ModelError(message)
    vars(raised).update(vars(error))
    for each in type(error).__mro__:
        for name, attribute in vars(each).items():
            if isinstance(attribute, MemberDescriptorType | GetSetDescriptorType) and not name.startswith(
                "__"
            ):
                with suppress(AttributeError, TypeError):  # it has none, or cannot be set
                    attribute.__set__(raised, attribute.__get__(error))
    return raised


class CheckpointError(ModelError):
    """A checkpoint is missing, truncated, or does not match its config."""


class InfeasiblePlanError(OutsizeError):
    """No plan fits the budgets.

    Attributes:
        short_by: bytes missing per tier, e.g. ``{"device": 12_582_912}``.
    """

    def __init__(self, message: str | Callable[[], str], short_by: Mapping[str, int]) -> None:
        """Take the message, or what finds it: what to try is searched for, and most of these are never read."""
        self.short_by = dict(short_by)
        self._message = message
        super().__init__(message, short_by)

    def __reduce__(self) -> tuple[type, tuple[str, dict[str, int]]]:
        """Go to another process with the message, not with what finds it."""
        return type(self), (self.message, self.short_by)

    @property
    def message(self) -> str:
        """What lacks and what to try, without the shortage of each tier."""
        if not isinstance(self._message, str):
            self._message = self._message()
        return self._message

    def __str__(self) -> str:
        shortage = ", ".join(f"{tier} by {format_bytes(n)}" for tier, n in self.short_by.items())
        return f"{self.message} (short: {shortage})"


class StorageError(OutsizeError):
    """A tier could not hold, read or write its bytes."""


class BudgetExceededError(StorageError):
    """A reservation would push a tier over its budget."""


class CodecError(OutsizeError):
    """Encoded bytes are damaged, or are not the encoding of what is asked for."""


class StalledError(OutsizeError):
    """No op of a step has ended for far too long; what was saved before stays."""


class LostRankError(OutsizeError):
    """A rank of a run over several processes is gone, or can no longer be reached; what all had saved stays.

    Attributes:
        rank: number of the rank, as far as that could be told; None where only the meeting place is gone.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(message)


class NonFiniteError(OutsizeError):
    """Loss or gradient is NaN or infinite; nothing of that step is saved, see docs/exactness.md."""


class ProgramError(OutsizeError):
    """A program breaks one of the rules every program obeys."""


class ExecutionError(OutsizeError):
    """An op of a program failed; ``__cause__`` is the error of the lane that ran it."""


FREE_SPACE = "free some space or choose another directory"
_RIGHTS = "choose a directory that you may write to"
_REMEDY = {
    errno.ENOSPC: FREE_SPACE,
    errno.EDQUOT: FREE_SPACE,
    errno.EFBIG: "raise the file size limit (ulimit -f) or choose another file system",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: _RIGHTS,
    errno.ENOENT: "create the directory first",
    errno.EEXIST: "choose a path that is not a file",
    errno.ENOTDIR: "choose a directory",
    errno.EISDIR: "choose a path that is not a directory",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EIO: "the device reports a fault; look at the kernel log (dmesg) and use another disk",
}

_OF_PLACES = frozenset(
    (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
)


def explain(error: OSError, action: str, otherwise: str = "") -> StorageError:
    """Return the `StorageError` for ``error``.

    Args:
        error: what the system said.
        action: what failed, e.g. ``"create x"``.
        otherwise: what to try where the place is at fault, and no limit or device.
    """
    remedy = _REMEDY.get(error.errno or 0, otherwise)
    if otherwise and error.errno in _OF_PLACES:
        remedy = otherwise
    return StorageError(f"cannot {action}: {error.strerror or error}" + (f"; {remedy}" if remedy else ""))
