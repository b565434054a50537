"""Print records in words: the plan of a dry run, findings of the doctor, results of a command that goes on."""

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outsize import files
from outsize.cli.text.console import Output
from outsize.errors import ConfigError, StorageError
from outsize.units import format_seconds

if TYPE_CHECKING:
    from outsize.config import Config
    from outsize.doctor.examine import NotJudged, Report
    from outsize.doctor.finding import Finding


def print_plan(config: "Config", output: Output) -> None:
    """Print the configuration of a run, then its plans, then what it does; fails as the run would if nothing fits."""
    from outsize.config import dump_config
    from outsize.objectives.recipes import objective_of
    from outsize.training.forecast import foresee

    more: dict[str, Any]
    if objective_of(config) is not None:  # plans of the model that trains, and of the one beside it
        from outsize.objectives import objective_run

        plans = objective_run.foresee(config, output.say)
        trained = plans["trained"]
        more = {f"plan_{name}": plan.to_dict() for name, plan in plans.items() if plan is not trained}
        tables = [f"{name} model\n{plan.table}" for name, plan in plans.items()]
    else:
        foreseen = foresee(config, announce=output.say)
        trained, config = foreseen.plan, foreseen.config
        predicted_s = None if foreseen.forecast is None else foreseen.forecast.step_s
        more = {"predicted_step_s": predicted_s, "would": foreseen.headline}
        step = "" if predicted_s is None else f"\npredicted step{format_seconds(predicted_s):>24}"
        tables = [f"{trained.table}{step}", f"would {foreseen.headline}"]
    settings = config.model_dump(mode="json")
    output.emit({"config": settings, "plan_id": trained.plan_id, "plan": trained.to_dict(), **more})
    output.print_result("\n\n".join([dump_config(config).rstrip(), *tables]))


def describe(report: "Report") -> str:
    """Return the findings, the largest gain first, and what could not be judged."""
    lines = [] if report.bottleneck is None else [f"limited by {report.bottleneck.limits}", ""]
    lines += [line for finding in report.findings for line in _finding(finding)]
    lines.append(_count(report))
    if report.not_judged:
        lines += ["", "not judged, for want of:", *_lacking(report.not_judged)]
    return "\n".join(lines)


def _finding(finding: "Finding") -> Iterator[str]:
    yield f"{finding.severity}: {finding.evidence}"
    yield f"  expected  {finding.expected}"
    yield f"  causes    {'; '.join(finding.causes)}"
    yield f"  fix       {finding.fix}"
    yield f"  gain      {finding.gain}"
    yield f"  verify    {finding.verify}"
    yield ""


def _count(report: "Report") -> str:
    from outsize.doctor.finding import SEVERITIES

    numbers = {name: sum(finding.severity == name for finding in report.findings) for name in SEVERITIES}
    parts = [f"{number} {name}" for name, number in numbers.items() if number]
    return f"{', '.join(parts) or 'no findings'}; {report.num_passed} rules found nothing to say"


def _lacking(not_judged: "Iterable[NotJudged]") -> list[str]:
    """Return a line for each thing that is lacking, with how many rules need it."""
    rules: dict[str, list[str]] = {}
    for entry in not_judged:
        rules.setdefault(entry.lacks, []).append(entry.id)
    return [f"  {lacks} ({len(names)} rule{'s' * (len(names) > 1)})" for lacks, names in rules.items()]


SAY_S = 10.0  # between two lines of progress
_PART_BYTES = 2**20


@contextlib.contextmanager
def results_at(out: Path, settings: Mapping[str, str], *, in_files: bool = False) -> Iterator[None]:
    """Hold the place of results for this process, and note beside them what they are made with.

    Args:
        out: where they are, or are to be.
        settings: what they are made with.
        in_files: whether each is a file in a directory, and no line of one file.

    Raises:
        ConfigError: they were made with other settings, or by something else.
        StorageError: another process writes them now.
    """
    note = out.with_name(out.name + ".made-with.json")
    begun = any(out.iterdir()) if out.is_dir() else out.exists() and out.stat().st_size > 0
    if begun and not note.exists():
        raise ConfigError(f"{out} exists, and this command has not made it; choose another --out")
    if out.exists() and out.is_dir() != in_files:
        kinds = ("a directory", "one file") if out.is_dir() else ("a file", "files in a directory")
        raise ConfigError(f"{out} is {kinds[0]}, and these results are {kinds[1]}; choose another --out")
    files.make_directories(out if in_files else out.parent)
    flags = os.O_RDONLY | os.O_DIRECTORY if in_files else os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK
    descriptor = files.system().open(out, flags)
    try:
        try:
            is_ours = files.lock(descriptor)
        except OSError as error:
            raise StorageError(f"{out} cannot be locked: {error}; choose another --out") from error
        if not is_ours:
            raise StorageError(
                f"{out} is written by another process now; wait for it, or choose another --out"
            )
        begun = any(out.iterdir()) if in_files else os.fstat(descriptor).st_size > 0
        if not (begun and note.exists()):
            files.write_whole(note, json.dumps(settings))
        else:
            _check_alike(out, note, settings)
        yield
    finally:
        files.system().close(descriptor)


def _check_alike(out: Path, note: Path, settings: Mapping[str, str]) -> None:
    """Check that results were made with ``settings``, as the note beside them says."""
    notes = files.read_json(note, ConfigError, "choose another --out")
    if unknown := sorted(settings.keys() - notes.keys()):
        raise ConfigError(
            f"{out} was made by a version that did not note {' and '.join(unknown)}, so results of other data or "
            "weights might come behind it; choose another --out"
        )
    if changed := sorted(name for name in notes if notes[name] != settings.get(name)):
        raise ConfigError(
            f"{out} was made with other settings ({', '.join(changed)}), see {note}; choose another --out"
        )


def digest_of(content: object) -> str:
    """Return a digest of what JSON knows."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def digest_of_data(data: Path) -> str:
    """Return a digest of a file; what can be read but once, such as a pipe, or not at all, is like no other."""
    if data.is_file():
        with contextlib.suppress(OSError), files.open_binary(data, "r") as file:
            digest = hashlib.sha256()
            while part := file.read(_PART_BYTES):
                digest.update(part)
            return digest.hexdigest()
    return uuid.uuid4().hex


class ResumedLines:
    """Lines of JSON in a file.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._num_bytes = 0
        self._former = list(self._read())
        self.count = len(self._former)

    def former(self) -> Iterator[dict[str, Any]]:
        """Return the lines of a former run, once."""
        lines, self._former = self._former, []
        return iter(lines)

    def add(self, line: Mapping[str, Any]) -> None:
        """Write a line.

        Raises:
            StorageError: the file is not as the last line left it.
        """
        with files.open_binary(self._out, "a") as file:
            if file.tell() != self._num_bytes:
                raise StorageError(
                    f"{self._out} was changed or removed while this command wrote it: what is there no longer goes "
                    "with what was asked; remove it and start again"
                )
            self._num_bytes += file.write(json.dumps(line).encode() + b"\n")
        self.count += 1

    def _read(self) -> Iterator[dict[str, Any]]:
        """Return the lines of a former run; what it wrote of a line that is not whole goes, and all behind it."""
        if not self._out.exists():
            return
        try:
            content = files.read_bytes(self._out, files.MOST_TEXT)
        except OSError as error:
            raise ConfigError(f"{self._out} cannot be read: {error}; choose another --out") from error
        # Zeros, which JSON never has, are blocks that a loss of power has left unwritten.
        written = content.partition(b"\0")[0]
        complete = written[: written.rfind(b"\n") + 1]
        if len(complete) < len(content):
            files.cut(self._out, len(complete))
        self._num_bytes = len(complete)
        for number, text in enumerate(complete.splitlines(), 1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            if not isinstance(line, dict):
                raise ConfigError(
                    f"{self._out}, line {number}: not what this command writes; choose another --out"
                )
            yield line


def now_and_then(say: Callable[[str], None]) -> Callable[[Callable[[], str]], None]:
    """Return what says how far a command is, at most every `SAY_S` seconds."""
    said = time.monotonic()

    def tell(text: Callable[[], str]) -> None:
        nonlocal said
        if time.monotonic() - said > SAY_S:
            said = time.monotonic()
            say(text())

    return tell
