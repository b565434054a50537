"""Types of the doctor: rules, their observations, and the findings made from both."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

from outsize.doctor.advice import Advice, Remedy
from outsize.doctor.facts import Facts

Severity = Literal["error", "warning", "info", "good"]
SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "info", "good")
# What a gain is a share of: the time that a step spends there. ``run`` is the whole step.
Part = Literal["link", "disk", "host", "compute", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the function of a rule saw.

    Attributes:
        evidence: what was recorded, with its numbers.
        expected: what it should be instead.
        severity: ``error``: does not work as it should; ``warning``: costs time or puts a run at risk; ``info``: worth
            knowing; ``good``: as it should be.
        gain_share: share of the time of the rule's part, 0 to 1, that the fix is expected to save; None where only a
            trial can tell.
    """

    evidence: str
    expected: str
    severity: Severity = "warning"
    gain_share: float | None = None


def worst(observations: Iterable[Seen]) -> Seen | None:
    """Return the one with the largest gain, the first of equal ones; None of none."""
    return max(observations, key=lambda one: one.gain_share or 0.0, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the table.

    Attributes:
        id: by which a finding is known.
        part: what it slows down.
        look: returns what it sees in the facts, None where nothing is wrong; raises `LackingError` where the record
            does not hold what it needs.
        causes: the likely ones, the likeliest first.
        fix: a command, a line of the configuration, or what to change; of several, those that are possible are told.
        verify: how to see that it helped.
        limits: what limits a run of which this is found, in words; empty for what is never said to.
    """

    id: str
    part: Part
    look: Callable[[Facts], Seen | None]
    causes: tuple[str, ...]
    fix: tuple[str | Remedy | Advice, ...] | str
    verify: str
    limits: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found, ready to be told.

    Attributes:
        id: of the rule.
        part: what it slows down.
        severity: how bad.
        evidence: what was recorded.
        expected: what it should be.
        causes: the likely ones, in order.
        fix: what to do.
        remedies: what of it settings do.
        gain: what that is expected to bring, in words.
        gain_share: the same as a share, 0 to 1, of a step where a run is known, else of the time of the part; None
            where only a trial can tell.
        verify: how to see that it helped.
        limits: what a run is limited by where this is its verdict, see `Rule`.
    """

    id: str
    part: Part
    severity: Severity
    evidence: str
    expected: str
    causes: tuple[str, ...]
    fix: str
    remedies: tuple[Remedy, ...] = ()
    gain: str
    gain_share: float | None
    verify: str
    limits: str = ""
