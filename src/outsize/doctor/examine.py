"""All rules over one record, the largest gain first."""

from collections.abc import Sequence
from dataclasses import dataclass

from outsize.doctor.facts import Facts, LackingError
from outsize.doctor.finding import SEVERITIES, Finding, Rule, Seen
from outsize.doctor.rules import RULES

_PARTS = {
    "link": "the time on the link",
    "disk": "the time on the disk",
    "host": "the time of the processors",
    "compute": "the time of the device's compute",
    "run": "a step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NotJudged:
    """A rule that could not be applied.

    Attributes:
        id: of the rule.
        lacks: what the record would have to hold.
    """

    id: str
    lacks: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of all rules.

    Attributes:
        findings: the largest gain first, see `examine`.
        not_judged: rules that the record does not suffice for.
        num_passed: rules that found nothing wrong.
    """

    findings: tuple[Finding, ...]
    not_judged: tuple[NotJudged, ...]
    num_passed: int


def examine(facts: Facts, rules: Sequence[Rule] = RULES) -> Report:
    """Apply ``rules`` to ``facts``.

    What costs or endangers something (``error``, ``warning``) comes before what is only worth knowing. Among them the
    largest gain comes first; those whose gain only a trial can tell follow, errors first.
    """
    findings: list[Finding] = []
    not_judged: list[NotJudged] = []
    for rule in rules:
        try:
            seen = rule.look(facts)
        except LackingError as error:
            not_judged.append(NotJudged(id=rule.id, lacks=str(error)))
            continue
        if seen is not None:
            findings.append(_finding(rule, seen, facts))
    findings.sort(key=_rank)
    return Report(
        findings=tuple(findings),
        not_judged=tuple(not_judged),
        num_passed=len(rules) - len(findings) - len(not_judged),
    )


def _rank(finding: Finding) -> tuple[bool, float, int]:
    gain = -1.0 if finding.gain_share is None else finding.gain_share
    return finding.severity in ("info", "good"), -gain, SEVERITIES.index(finding.severity)


def _finding(rule: Rule, seen: Seen, facts: Facts) -> Finding:
    gain, words = seen.gain_share, "not known without a trial"
    if gain is not None:
        weight, part = _weight(rule, facts)
        gain *= weight
        words = f"up to {gain:.0%} of {part}"
    return Finding(
        id=rule.id,
        severity=seen.severity,
        evidence=seen.evidence,
        expected=seen.expected,
        causes=rule.causes,
        fix=rule.fix,
        gain=words,
        gain_share=gain,
        verify=rule.verify,
    )


def _weight(rule: Rule, facts: Facts) -> tuple[float, str]:
    """Return the share of a step that the rule's part takes where a run tells, and what the gain is a share of."""
    if rule.part == "run" or facts.recorded is None:
        return 1.0, _PARTS[rule.part]
    shares = {**facts.recorded.waits(), "compute": facts.recorded.compute_share}
    return min(1.0, shares.get(rule.part, 0.0)), _PARTS["run"]
