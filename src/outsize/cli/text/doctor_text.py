"""Findings in words."""

from collections.abc import Iterable, Iterator

from outsize.doctor.examine import NotJudged, Report
from outsize.doctor.finding import SEVERITIES, Finding


def describe(report: Report) -> str:
    """Return the findings, the largest gain first, and what could not be judged."""
    lines = [] if report.bottleneck is None else [f"limited by {report.bottleneck.limits}", ""]
    lines += [line for finding in report.findings for line in _finding(finding)]
    lines.append(_count(report))
    if report.not_judged:
        lines += ["", "not judged, for want of:", *_lacking(report.not_judged)]
    return "\n".join(lines)


def _finding(finding: Finding) -> Iterator[str]:
    yield f"{finding.severity}: {finding.evidence}"
    yield f"  expected  {finding.expected}"
    yield f"  causes    {'; '.join(finding.causes)}"
    yield f"  fix       {finding.fix}"
    yield f"  gain      {finding.gain}"
    yield f"  verify    {finding.verify}"
    yield ""


def _count(report: Report) -> str:
    numbers = {name: sum(finding.severity == name for finding in report.findings) for name in SEVERITIES}
    parts = [f"{number} {name}" for name, number in numbers.items() if number]
    return f"{', '.join(parts) or 'no findings'}; {report.num_passed} rules found nothing to say"


def _lacking(not_judged: Iterable[NotJudged]) -> list[str]:
    """Return a line for each thing that is lacking, with how many rules need it."""
    rules: dict[str, list[str]] = {}
    for entry in not_judged:
        rules.setdefault(entry.lacks, []).append(entry.id)
    return [f"  {lacks} ({_counted(len(names))})" for lacks, names in rules.items()]


def _counted(number: int) -> str:
    return "1 rule" if number == 1 else f"{number} rules"
