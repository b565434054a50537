"""All rules over one record: what limits the run, and what else there is, the largest gain first.

The verdict is one finding of those that the run alone shows, whatever else is known of the machine, so that doctor,
report, watch and the summary of a run name the same one. A wait, or a host that is short of something, that takes a
quarter of a step is it, the largest first. Without one compute has the step to itself, and what slows compute down is;
then the shorter ones; then compute. Only a run beside which nothing is wrong is told that nothing can be done.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outsize.doctor.finding import SEVERITIES, Finding, Remedy, Rule, Seen, in_words_of, is_wrapped
from outsize.doctor.rules import RULES
from outsize.doctor.run_record import Facts, LackingError
from outsize.telemetry.run_reading import as_a_run

# Share of a step from which it is what limits a run, whatever else is slow.
_LONG = 0.25
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
        bottleneck: what limits the run; None where none is known.
        findings: the largest gain first, see `examine`; the bottleneck among them, before the others if it is trouble.
        not_judged: rules that the record does not suffice for.
        num_passed: rules that found nothing wrong.
    """

    bottleneck: Finding | None
    findings: tuple[Finding, ...]
    not_judged: tuple[NotJudged, ...]
    num_passed: int


def examine(facts: Facts, rules: Sequence[Rule] = RULES) -> Report:
    """Apply ``rules`` to ``facts``.

    What costs or endangers something (``error``, ``warning``) comes before what is only worth knowing. Among them the
    bottleneck comes first, then the largest gain; those whose gain only a trial can tell follow, errors first.

    Raises:
        ConfigError: what was recorded of a run is not what a run records.
    """
    where = contextlib.nullcontext() if facts.recorded is None else as_a_run(Path(facts.recorded.directory))
    with where:
        return _examined(facts, rules)


def _examined(facts: Facts, rules: Sequence[Rule]) -> Report:
    findings, not_judged = _apply(rules, facts)
    limiting, _ = _apply([rule for rule in rules if rule.limits], Facts(recorded=facts.recorded))
    first = min((one for one in limiting if one.gain_share is not None), key=_likelihood, default=None)
    verdict = "" if facts.recorded is None or first is None else first.id
    findings.sort(key=lambda finding: _rank(finding, verdict))
    findings = _tempered(findings)
    return Report(
        bottleneck=next((finding for finding in findings if finding.id == verdict), None),
        findings=tuple(findings),
        not_judged=tuple(not_judged),
        num_passed=len(rules) - len(findings) - len(not_judged),
    )


def _apply(rules: Sequence[Rule], facts: Facts) -> tuple[list[Finding], list[NotJudged]]:
    findings: list[Finding] = []
    not_judged: list[NotJudged] = []
    for rule in rules:
        try:
            observation = rule.look(facts)
        except LackingError as error:
            not_judged.append(NotJudged(id=rule.id, lacks=str(error)))
            continue
        if observation is not None:
            findings.append(_finding(rule, observation, facts))
    return findings, not_judged


def _likelihood(finding: Finding) -> tuple[int, float]:
    """Return where a finding stands among those that may limit the run, the least first."""
    gain = finding.gain_share or 0.0
    if finding.severity == "good":
        return 3, 0.0
    if finding.part == "compute":
        return 1, -gain
    return (0 if gain >= _LONG else 2), -gain


def _rank(finding: Finding, verdict: str) -> tuple[bool, bool, float, int]:
    gain = -1.0 if finding.gain_share is None else finding.gain_share
    is_trouble = finding.severity in ("error", "warning")
    return not is_trouble, finding.id != verdict, -gain, SEVERITIES.index(finding.severity)


def _tempered(findings: list[Finding]) -> list[Finding]:
    """Return the findings with what is good only worth knowing beside trouble, whose fix it points to."""
    trouble = [finding for finding in findings if finding.severity in ("error", "warning")]
    if not trouble:
        return findings
    worst = max(trouble, key=lambda finding: finding.gain_share or 0.0)
    fix = f"that of the {worst.severity} beside it: {worst.fix}"
    return [replace(f, severity="info", fix=fix) if f.severity == "good" else f for f in findings]


def _finding(rule: Rule, observation: Seen, facts: Facts) -> Finding:
    gain, words = observation.gain_share, "not known without a trial"
    if gain is not None:
        weight, part = _weight(rule, facts)
        gain *= weight
        words = f"up to {gain:.0%} of {part}"
    steps = _steps(rule, facts)
    return Finding(
        id=rule.id,
        part=rule.part,
        severity=observation.severity,
        evidence=observation.evidence,
        expected=observation.expected,
        causes=tuple(in_words_of(facts, cause) for cause in rule.causes),
        fix=in_words_of(facts, "; ".join(step if isinstance(step, str) else step.words for step in steps)),
        remedies=() if is_wrapped(facts) else tuple(step for step in steps if isinstance(step, Remedy)),
        gain=words,
        gain_share=gain,
        verify=rule.verify,
        limits=rule.limits,
    )


def _steps(rule: Rule, facts: Facts) -> list[str | Remedy]:
    steps = (rule.fix,) if isinstance(rule.fix, str) else rule.fix
    texts = (step(facts) if callable(step) else step for step in steps)
    return [step for step in texts if step is not None]


def _weight(rule: Rule, facts: Facts) -> tuple[float, str]:
    """Return the share of a step that the rule's part takes where a run tells, and what the gain is a share of."""
    if rule.part == "run" or facts.recorded is None:
        return 1.0, _PARTS[rule.part]
    shares = {**facts.recorded.waits(), "compute": facts.recorded.compute_share}
    return min(1.0, shares.get(rule.part, 0.0)), _PARTS["run"]
