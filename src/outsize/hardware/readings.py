"""The two kinds of numbers in ``machine.json``: facts, which somebody reports, and measurements, which are timed.

Both say where they come from, and one that could not be had says why instead of standing at zero.
"""

import statistics
from collections.abc import Callable, Iterable
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Base of all parts of the file: frozen, and no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Fact(Record):
    """Something that the kernel, the driver or a library reports; the unit is in the name of the field.

    Attributes:
        value: None where it could not be had, and where there is no such thing (a limit that is not set).
        status: ``reported``, ``assumed`` or ``not measured``.
        source: where it was read, what was assumed, or why there is no value.
    """

    value: bool | int | float | str | None
    status: Literal["reported", "assumed", "not measured"]
    source: str

    @classmethod
    def read(cls, value: bool | int | float | str | None, source: str) -> Self:
        """Return what ``source`` reports."""
        return cls(value=value, status="reported", source=source)

    @classmethod
    def absent(cls, why: str) -> Self:
        """Return a fact that could not be had."""
        return cls(value=None, status="not measured", source=why)

    @classmethod
    def of(cls, source: object, read: Callable[[], bool | int | float | str | None]) -> Self:
        """Return what ``read()`` gives, or why it gave nothing: a machine may lack any source."""
        try:
            return cls.read(read(), str(source))
        except (OSError, LookupError, ValueError) as error:
            return cls.absent(f"{source}: {explain(error)}")

    @classmethod
    def unread(cls) -> Self:
        """Return what stands for a fact that older probes did not look for."""
        return cls.absent("this machine.json is of a probe that did not read it; run `outsize probe` again")

    def number(self) -> float | None:
        """Return the value as a number; None where there is none."""
        return float(self.value) if isinstance(self.value, int | float) else None


class Measurement(Record):
    """Something that was timed here, several times; the unit is in the name of the field.

    Attributes:
        median: of the samples; None where nothing was measured.
        spread: half the distance between the extremes, as a share of the median.
        samples: every value, in the order in which they were taken.
        status: ``measured`` or ``not measured``.
        source: how it was measured, or why it was not.
    """

    median: float | None
    spread: float
    samples: tuple[float, ...]
    status: Literal["measured", "not measured"]
    source: str

    @classmethod
    def of(cls, samples: Iterable[float], source: str) -> Self:
        """Return the summary of ``samples``.

        Raises:
            ValueError: there are none, or one is not above zero.
        """
        values = tuple(samples)
        if not values or min(values) <= 0:
            raise ValueError(f"{source}: need samples above zero, not {values}")
        median = statistics.median(values)
        spread = (max(values) - min(values)) / 2 / median
        return cls(median=median, spread=spread, samples=values, status="measured", source=source)

    @classmethod
    def absent(cls, why: str) -> Self:
        """Return a measurement that was not made."""
        return cls(median=None, spread=0.0, samples=(), status="not measured", source=why)

    @classmethod
    def untried(cls) -> Self:
        """Return what stands for a measurement that older probes did not make."""
        return cls.absent(
            "this machine.json is of a probe that did not measure it; run `outsize probe` again"
        )


def explain(error: BaseException) -> str:
    """Return why something could not be had, in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error).splitlines()[0] if str(error) else type(error).__name__
